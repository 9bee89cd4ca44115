"""The live view of a run as a widget. Its JavaScript lies beside it and asks nobody for anything."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from sgpu import resuming, settings, standing
from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir, find_run
from sgpu.widgets.channel import ChannelWidget, script, style
from sgpu.widgets.follow import Follower
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.snapshot import Snapshot
from sgpu.widgets.showing import html
from sgpu.widgets.showing.messages import Messages, resumable
from sgpu.widgets.words import whole

_FULL_SECONDS = 1.0  # how often everything is told, as long as no browser has answered


class RunView(ChannelWidget):
    """Shows one run, live, until it is final; stays usable afterwards as long as the kernel lives.

    The browser answers with `hello` when it is up or has missed a message, through a channel that it opens itself if it
    can (see static/src/channel.js). Where it cannot answer while a cell keeps the kernel busy, it is told everything
    each second until it does.

    Args:
        run: a run, its id, or its folder.
        on_stop: called in some thread when the user has asked, and confirmed, that the run be stopped; None: the run is
            cancelled.

    Raises:
        SgpuError: there is no such run.
    """

    _esm = script("run_view")
    _css = style("run_view")

    def __init__(
        self,
        run: str | os.PathLike[str] | RunDir,
        *,
        on_stop: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        found = run if isinstance(run, RunDir) else find_run(settings.home(), os.fspath(run))
        self.feed = Feed(found, clock=clock)
        self._on_stop = on_stop or functools.partial(standing.cancel, found)
        self._clock = clock or SystemClock()
        self._messages = Messages()
        self._lock = threading.RLock()  # messages come and go in different threads
        self._snapshot = self.feed.snapshot()
        self._heard = False
        self._last_full: float | None = None
        self._view_facts = {"stopping": False, "resuming": False, "notice": "", "blocking": False}
        self._follower: Follower | None = None
        super().__init__()  # from here on messages may come

    def push(self, snapshot: Snapshot) -> None:
        """Sends what is new in `snapshot`."""
        with self._lock:
            self._snapshot = snapshot
            blocking = threading.current_thread() is threading.main_thread()
            self._view_facts = {**self._view_facts, "blocking": blocking}
            now = self._clock.monotonic()
            if self._heard:
                self._tell(full=False)
            elif self._last_full is None or snapshot.final or now - self._last_full >= _FULL_SECONDS:
                self._last_full = now
                self._tell(full=True)

    def live_bundle(self) -> dict[str, Any]:
        """The display of the widget, with text for front ends that have none."""
        return {**self.widget_bundle(), **html.bundle(self._snapshot, charts=False)}

    def _repr_mimebundle_(self, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Displayed by itself, the widget follows the run on its own and is not replaced at the end."""
        if self._follower is None:
            self._start_following()
        return self.live_bundle(), {}

    def _start_following(self) -> None:
        self._follower = Follower(self._follow)
        self._follower.start()

    def close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        super().close()

    def _follow(self) -> bool:
        snapshot = self.feed.snapshot()
        self.push(snapshot)
        return snapshot.final

    def _tell(self, *, full: bool) -> None:
        message = self._messages.message(self._snapshot, full=full, view=self._view_facts)
        if message is not None:
            self.send(message)

    def take(self, content: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "stop":
            self._stop()
            return
        if kind == "resume":
            self._resume()
            return
        with self._lock:
            if kind == "hello":
                self._heard = True
                self._tell(full=True)
            elif kind == "watch":
                self._watch(content)

    def _watch(self, content: dict[str, Any]) -> None:
        ranks = range(self._snapshot.world_size)
        chart, log = whole(content.get("chart_rank")), whole(content.get("log_rank"))
        if chart is not None and chart in ranks:
            self._messages.chart_rank = chart
        if log in ranks:
            self._messages.log_rank = log
        node = whole(content.get("usage_node"))
        if node is not None and node >= 0:
            self._messages.usage_node = node
        self._tell(full=True)

    def _stop(self) -> None:
        """Asks for the end. Not under the lock: whoever ends the run may wait for a thread that shows it."""
        if self._snapshot.final:
            return
        self._set(stopping=True, notice="")
        try:
            self._on_stop()
        except (SgpuError, OSError) as error:
            self._set(stopping=False, notice=f"could not be stopped: {error}")

    def _resume(self) -> None:
        """Starts the run again, and follows it again."""
        with self._lock:
            if not resumable(self._snapshot) or self._view_facts["resuming"]:
                return
            self._set(resuming=True, notice="")
        try:
            resuming.resume(self.feed.run, standing.status_of(self.feed.run))
        except (SgpuError, OSError) as error:
            self._set(resuming=False, notice=f"could not be resumed: {error}")
            return
        if self._follower is not None:
            self._follower.stop()
        self.push(self.feed.snapshot())
        self._set(resuming=False, stopping=False)
        self._start_following()

    def _set(self, **facts: object) -> None:
        with self._lock:
            self._view_facts = {**self._view_facts, **facts}
            self._tell(full=False)
