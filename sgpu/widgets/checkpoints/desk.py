"""What a browser asks of the checkpoints, and what it is answered. Plain data in, plain data out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sgpu.checkpoint import Catalog
from sgpu.checkpoint.format import names
from sgpu.checkpoint.format.manifest import tensor_bytes
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.contract.errors import SgpuError
from sgpu.widgets.checkpoints import actions, detail, wire
from sgpu.widgets.checkpoints.jobs import Jobs
from sgpu.widgets.checkpoints.rows import CheckpointRow, Shelf, curves_of
from sgpu.widgets.checkpoints.tensors import TensorTree, sizes_in
from sgpu.widgets.checkpoints.values import look_at
from sgpu.widgets.checkpoints.wire import Message
from sgpu.widgets.errands import Errands
from sgpu.widgets.words import plain, whole

MAX_LINES = 300
_CHECKED_AT_ONCE = 100
_LARGE_MANIFEST_BYTES = 500_000  # beyond, names and sizes are shown before shapes are known


class Desk:
    """Serves one shelf.

    Args:
        say: sends a message to the browsers; may be called from any thread.
        quick: for errands of a second at most.
        slow: for errands that read whole checkpoints.
    """

    def __init__(self, shelf: Shelf, say: Callable[[Message], None], *, quick: Errands, slow: Errands) -> None:
        self.shelf = shelf
        self._say = say
        self._quick, self._slow = quick, slow
        self._jobs = Jobs(shelf, say, errands=slow, changed=self._tell_changes)
        self._lock = threading.RLock()
        self._asked: list[int] = []  # steps that somebody looks at, to be checked first
        self._checking = False
        self._tree: TensorTree | None = None
        self._opened: Opened | None = None
        self.chosen: int | None = None
        self._told: dict[int, list[Any]] = {}
        self._handlers: dict[str, Callable[[Message], None]] = {
            "hello": lambda _: self._hello(), "refresh": lambda _: self._refresh(), "check": self._check,
            "choose": self._choose, "lines": self._lines, "toggle": self._toggle, "find": self._find,
            "values": self._values, "compare": self._compare, **self._jobs.handlers,
        }  # fmt: skip

    def hear(self, content: Any) -> None:
        """A message from a browser; whatever it is, it is data."""
        kind = content.get("kind") if isinstance(content, dict) else None
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is not None:
            handler(content)

    def start(self) -> None:
        """Begins to look inside: at the newest first, and at all of a folder on this machine."""
        self._keep_checking()
        if self.shelf.place.run is not None:
            self._slow.do(self._read_curves)

    # ---- the table

    def _hello(self) -> None:
        self.tell_table()
        if self.chosen is not None:
            self._quick.do(lambda: self._open(self.chosen))

    def _refresh(self) -> None:
        def again() -> None:
            self.shelf.refresh()
            self.tell_table()
            self._keep_checking()

        self._quick.do(again)

    def tell_table(self) -> None:
        """All rows, as they are known now."""
        with self._lock:
            rows = self.shelf.rows
            self._told = {row.step: wire.row(row) for row in rows}
            self._say(
                {
                    "kind": "table", "columns": list(detail.COLUMNS), "rows": list(self._told.values()),
                    **wire.head(self.shelf, rows), "note": wire.note(self.shelf), "chosen": self.chosen,
                    "formats": [list(pair) for pair in actions.FORMATS.items()],
                }
            )  # fmt: skip

    def _tell_changes(self) -> None:
        """Rows that are not as they were told."""
        with self._lock:
            now = {row.step: wire.row(row) for row in self.shelf.rows}
            if now.keys() != self._told.keys():
                self.tell_table()
                return
            changed = [row for step, row in now.items() if row != self._told[step]]
            self._told = now
            if changed:
                self._say({"kind": "rows", "rows": changed, **wire.head(self.shelf, self.shelf.rows)})

    def _check(self, content: Message) -> None:
        steps = content.get("steps")
        with self._lock:
            self._asked = [step for step in (steps if isinstance(steps, list) else []) if whole(step) is not None]
        self._keep_checking()

    def _keep_checking(self) -> None:
        with self._lock:
            if self._checking:
                return
            self._checking = True
        self._quick.do(self._check_some)

    def _check_some(self) -> None:
        """A few at a time, so that whoever asks for something else need not wait."""
        try:
            for step in self._next_steps():
                self.shelf.check(step)
        finally:
            self._checking = False
            self._tell_changes()
        if self._next_steps():
            self._keep_checking()

    def _next_steps(self) -> list[int]:
        with self._lock:
            unchecked = [row.step for row in self.shelf.rows if row.state == "unchecked"]
            asked = [step for step in self._asked if step in set(unchecked)]
            local = self.shelf.store.local_root is not None  # elsewhere each look costs a second: only where asked
            return (asked + unchecked if local else asked)[:_CHECKED_AT_ONCE]

    def _read_curves(self) -> None:
        self.shelf.take_curves(curves_of(self.shelf.place))
        self._tell_changes()

    # ---- one checkpoint

    def _choose(self, content: Message) -> None:
        step = whole(content.get("step"))
        if step is not None and self.shelf.row(step) is not None:
            self.chosen = step
            self._quick.do(lambda: self._open(step))

    def _open(self, step: int | None) -> None:
        if step is None or step != self.chosen:  # somebody has chosen another one meanwhile
            return
        with self._lock:
            self._opened = None
            self._tree = self._first_tree(step)
        if self._tree is not None:
            self._say({"kind": "detail", "step": step, "reading": True, **wire.tree_words(self._tree)})
            self._tell_lines(0, MAX_LINES)
        opened = self.shelf.check(step)
        self._tell_changes()
        row = self.shelf.row(step)
        if row is None:
            return
        if opened is None:
            self._tree = None
            self._say({"kind": "detail", "step": step, "reading": False, "why": row.why, **self._resumption(row)})
            return
        tree = TensorTree(sizes_in(opened.index), opened.index.tensors)
        with self._lock:
            if self._tree is not None:
                tree.adopt(self._tree)
            self._tree, self._opened = tree, opened
        told = [[fact.label, fact.value] for fact in detail.facts(row, opened)]
        self._say(
            {"kind": "detail", "step": step, "reading": False, "facts": told, "path": opened.path,
             **wire.tree_words(tree), **self._resumption(row)}
        )  # fmt: skip
        self._tell_lines(0, MAX_LINES)

    def _first_tree(self, step: int) -> TensorTree | None:
        """Of a large checkpoint: names and sizes, from the manifest alone."""
        store = self.shelf.store
        for folder in self.shelf.attempts(step):
            path = f"{folder}/{names.MANIFEST}"
            if (store.size(path) or 0) >= _LARGE_MANIFEST_BYTES:
                try:
                    return TensorTree(tensor_bytes(store.read(path), folder))
                except (SgpuError, OSError):  # the check that follows says what is wrong
                    return None
        return None

    def _resumption(self, row: CheckpointRow) -> Message:
        told = detail.resumption(self.shelf.place, row, actions.newest_whole(self.shelf))
        return {"resume": {"words": told.words, "code": told.code, "button": told.button}}

    def _lines(self, content: Message) -> None:
        first, amount = whole(content.get("from")), whole(content.get("count"))
        if first is not None and amount is not None:
            self._quick.do(lambda: self._tell_lines(first, amount))

    def _toggle(self, content: Message) -> None:
        self._change_tree(lambda tree: tree.toggle(str(content.get("name"))))

    def _find(self, content: Message) -> None:
        self._change_tree(lambda tree: tree.find(str(content.get("text"))))

    def _change_tree(self, change: Callable[[TensorTree], None]) -> None:
        def errand() -> None:
            with self._lock:
                if self._tree is None:
                    return
                change(self._tree)
            self._tell_lines(0, MAX_LINES)

        self._quick.do(errand)

    def _tell_lines(self, first: int, amount: int) -> None:
        with self._lock:
            if self._tree is None:
                return
            lines = self._tree.lines()
            first = max(0, min(first, len(lines)))
            shown = [wire.line_wire(line) for line in lines[first : first + max(0, min(amount, MAX_LINES))]]
            self._say({"kind": "lines", "step": self.chosen, "from": first, "total": len(lines), "lines": shown})

    def _values(self, content: Message) -> None:
        name = str(content.get("name"))

        def errand() -> None:
            opened = self._opened
            if opened is not None:
                told = wire.values_wire(look_at(self.shelf.store, opened, name))
                self._say({"kind": "values", "step": self.chosen, **told})

        self._jobs.guarded(self._quick, f"values of {plain(name, 80)}", errand)

    def _compare(self, content: Message) -> None:
        first, second = whole(content.get("first")), whole(content.get("second"))
        if first is None or second is None:
            return

        def errand() -> None:
            told = Catalog(self.shelf.place.root).diff(first, second)
            rows = [self.shelf.row(step) for step in (first, second)]
            if rows[0] is not None and rows[1] is not None:
                self._say({"kind": "difference", **wire.difference_wire(detail.compare(rows[0], rows[1], told))})

        self._jobs.guarded(self._quick, "comparing", errand)

    def tell_trouble(self, error: Exception) -> None:
        """Something that nobody expected; whatever else was asked for goes on."""
        self._jobs.tell("failed", f"{type(error).__name__}: {plain(error, 2000)}")
