"""What a browser asks to be done to checkpoints: one job after the other, each begun, ended and gone wrong in words."""

from __future__ import annotations

from collections.abc import Callable

from sgpu.contract.errors import SgpuError
from sgpu.widgets.checkpoints import actions
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.checkpoints.wire import Message
from sgpu.widgets.errands import Errands
from sgpu.widgets.words import count, plain, whole

Say = Callable[[Message], None]


class Jobs:
    """Serves one shelf.

    Args:
        say: sends a message to the browsers; may be called from any thread.
        errands: for what reads whole checkpoints.
        changed: tells the browsers which rows are not as they were.
    """

    def __init__(self, shelf: Shelf, say: Say, *, errands: Errands, changed: Callable[[], None]) -> None:
        self._shelf, self._say, self._errands, self._changed = shelf, say, errands, changed
        self.handlers: dict[str, Callable[[Message], None]] = {
            "verify": self._verify, "export": self._export, "delete": self._delete, "resume": self._resume,
            "protect": self._protect, "unprotect": self._unprotect, "verify all": lambda _: self._verify_all(),
        }  # fmt: skip

    def guarded(self, errands: Errands, doing: str, errand: Callable[[], None]) -> None:
        """What goes wrong is told, and the next errand is done all the same."""

        def safely() -> None:
            try:
                errand()
            except (SgpuError, OSError, ImportError, ValueError, MemoryError) as error:
                self.tell("failed", f"{doing}: {plain(error, 2000) or type(error).__name__}")

        errands.do(safely)

    def tell(self, state: str, words: str) -> None:
        """A line about the job: "running", "done" or "failed"."""
        self._say({"kind": "job", "state": state, "words": words})

    def _verify(self, content: Message) -> None:
        self._act(content, "reading every byte of", lambda step: actions.verify(self._shelf, step))

    def _verify_all(self) -> None:
        def errand() -> None:
            try:
                told = actions.verify_all(self._shelf, lambda words: self.tell("running", words))
            finally:
                self._changed()
            self.tell("done", told)

        self.guarded(self._errands, "reading every byte", errand)

    def _export(self, content: Message) -> None:
        path, kind = str(content.get("path") or ""), str(content.get("format"))
        self._act(content, "exporting", lambda step: actions.export(self._shelf, step, path, kind))

    def _delete(self, content: Message) -> None:
        if content.get("sure") is True:
            self._act(content, "deleting", lambda step: actions.delete(self._shelf, step))

    def _resume(self, content: Message) -> None:
        if content.get("sure") is True:
            self._act(content, "going on from", lambda step: actions.resume(self._shelf, step))

    def _protect(self, content: Message) -> None:
        reason = plain(content.get("reason"), 200)
        self._act(content, "protecting", lambda step: actions.protect(self._shelf, step, reason))

    def _unprotect(self, content: Message) -> None:
        self._act(content, "leaving to the rules again", lambda step: actions.unprotect(self._shelf, step))

    def _act(self, content: Message, doing: str, action: Callable[[int], str]) -> None:
        step = whole(content.get("step"))
        if step is None:
            return

        def errand() -> None:
            self.tell("running", f"{doing} step {count(step)} …")
            try:
                self.tell("done", action(step))
            finally:
                self._changed()

        self.guarded(self._errands, doing, errand)
