"""What travels to the browser, without a browser."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest

from sgpu import resuming
from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status
from sgpu.run import Run
from sgpu.widgets.channel import open_channel
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.showing.messages import Messages
from sgpu.widgets.showing.run_view import RunView


class Browser:
    """Puts messages together as static/src/store.js does."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.series: dict[str, tuple[list[int], list[float | None]]] = {}
        self.events: list[int] = []
        self.lines: list[str] = []
        self.first = 0
        self.number: int | None = None

    def take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        json.dumps(message, allow_nan=False)
        if message["full"]:
            self.__init__()  # type: ignore[misc]
        else:
            assert message["number"] == self.number + 1
        self.number = message["number"]
        self.head = message.get("head", self.head)
        for one in message.get("series", []):
            steps, values = self.series.get(one["name"], ([], []))
            keep = one["keep"]
            self.series[one["name"]] = (steps[:keep] + one["steps"], values[:keep] + one["values"])
        self.events += [event["number"] for event in message.get("events", [])]
        if log := message.get("log"):
            self.lines = self.lines[log["first"] - self.first : log["from"] - self.first] + log["lines"]
            self.first = log["first"]


def check(browser: Browser, feed: Feed) -> None:
    snapshot = feed.snapshot()
    for name, series in snapshot.series.items():
        if series.rank == 0:
            assert browser.series[name][0] == list(series.steps)
            shown = [None if value is None else float(f"{value:.6g}") for value in series.values]
            assert browser.series[name][1] == shown
    assert browser.events == [happening.number for happening in snapshot.happenings]
    if snapshot.logs:
        assert browser.lines == list(snapshot.logs[0].lines)


def test_deltas_add_up_to_what_the_feed_knows(run: Any, clock: Any) -> None:
    feed, messages, browser = Feed(run.dir, clock=clock), Messages(), Browser()
    browser.take(messages.message(feed.snapshot(), full=True))
    for tick in range(1500):
        run.metrics(tick if tick < 1200 else tick - 30, loss=math.nan if tick == 40 else 1.0 / (tick + 1), lr=tick / 3)
        run.metrics(tick, rank=1, loss=5.0)
        run.log(f"\r{tick}%".encode() + (b"\n" + b"z" * 300 + b"\n" if tick % 3 == 0 else b""))
        if tick % 50 == 0:
            run.event("checkpoint_committed", step=tick)
        if tick % 7 == 0:
            clock.now += 1
            browser.take(messages.message(feed.snapshot()))
    browser.take(messages.message(feed.snapshot()))
    check(browser, feed)
    assert sorted(browser.series) == ["loss", "lr"]
    assert browser.first > 0  # the log was long enough to lose its front


def test_nothing_new_is_no_message_and_a_full_one_tells_all(run: Any, clock: Any) -> None:
    run.metrics(1, loss=1.0)
    run.event("run_started", world_size=2)
    feed, messages = Feed(run.dir, clock=clock), Messages()
    assert messages.message(feed.snapshot()) is not None
    assert messages.message(feed.snapshot()) is None
    browser = Browser()
    browser.take(messages.message(feed.snapshot(), full=True))
    check(browser, feed)


def test_one_more_step_is_a_small_message(run: Any, clock: Any) -> None:
    feed, messages = Feed(run.dir, clock=clock), Messages()
    for step in range(900):
        run.metrics(step, loss=1.0, accuracy=0.5)
        run.log(b"a line of the log\n")
    messages.message(feed.snapshot())
    run.metrics(900, loss=0.5, accuracy=0.6)
    run.log(b"one more\n")
    message = messages.message(feed.snapshot())
    assert message is not None
    assert [(one["keep"], one["steps"]) for one in message["series"]] == [(900, [900]), (900, [900])]
    assert message["log"]["lines"] == ["one more"]
    assert len(json.dumps(message)) < 1000


def test_another_rank_can_be_looked_at(run: Any, clock: Any) -> None:
    run.metrics(1, loss=1.0)
    run.metrics(1, rank=1, loss=2.0)
    run.log(b"zero\n")
    run.log(b"one\n", rank=1)
    feed, messages = Feed(run.dir, clock=clock), Messages()
    messages.chart_rank, messages.log_rank = 1, 1
    message = messages.message(feed.snapshot(), full=True)
    assert message is not None
    assert [one["name"] for one in message["series"]] == ["rank1/loss"]
    assert message["log"]["lines"] == ["one"]


@pytest.fixture
def view(run: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A widget whose messages are kept in `sent`, and whose stops in `stops`."""
    sent: list[dict[str, Any]] = []
    stops: list[str] = []
    monkeypatch.setattr(RunView, "send", lambda self, content, buffers=None: sent.append(content))
    widget = RunView(run.dir, on_stop=lambda: stops.append("stop"), clock=clock)
    widget.sent, widget.stops = sent, stops
    yield widget
    widget.close()


def test_a_browser_that_cannot_answer_is_told_everything_each_second(view: Any, clock: Any) -> None:
    for _ in range(50):
        view.push(view.feed.snapshot())
        clock.now += 0.1
    assert 4 <= len(view.sent) <= 6
    assert all(message["full"] for message in view.sent)


def test_a_browser_that_said_hello_gets_deltas(view: Any, run: Any) -> None:
    view.take({"kind": "hello"})
    run.metrics(1, loss=1.0)
    view.push(view.feed.snapshot())
    assert [message["full"] for message in view.sent] == [True, False]
    view.take({"kind": "hello"})
    assert view.sent[-1]["full"]


def test_stop_calls_back_once_a_request_and_shows_it(view: Any) -> None:
    view.take({"kind": "stop"})
    assert view.stops == ["stop"]
    assert view.sent[-1]["head"]["stopping"]


def test_a_stop_that_fails_is_told_and_can_be_tried_again(view: Any) -> None:
    def fail() -> None:
        raise SgpuError("the folder is read-only")

    view._on_stop = fail
    view.take({"kind": "stop"})
    head = view.sent[-1]["head"]
    assert head["notice"] == "could not be stopped: the folder is read-only"
    assert not head["stopping"]


def test_an_ended_run_is_not_stopped(view: Any, run: Any) -> None:
    run.status("SUCCEEDED", ended=run.created + 1)
    view.push(view.feed.snapshot())
    view.take({"kind": "stop"})
    assert view.stops == []


def test_a_failed_run_is_resumed_and_followed_again(view: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = []

    def resume(again: RunDir, status: Status) -> RunDir:
        resumed.append(again.id)
        run.status("RUNNING", step=3)
        return again

    monkeypatch.setattr(resuming, "resume", resume)
    view.take({"kind": "resume"})
    assert resumed == [], "a run that goes on was started again"
    run.status("FAILED", step=2, ended=run.created + 1)
    view._repr_mimebundle_()
    view._follower._thread.join(10)
    view.take({"kind": "hello"})
    assert view.sent[-1]["head"]["resumable"]
    view.take({"kind": "resume"})
    view.take({"kind": "resume"})
    assert resumed == [run.dir.id]
    run.status("SUCCEEDED", step=5, ended=run.created + 2)
    view._follower._thread.join(10)
    head = [message["head"] for message in view.sent if "head" in message][-1]
    assert (head["state"], head["resumable"]) == ("SUCCEEDED", False)


def test_a_resume_that_fails_is_told(view: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def resume(again: RunDir, status: Status) -> RunDir:
        raise SgpuError("no room")

    monkeypatch.setattr(resuming, "resume", resume)
    run.status("CANCELLED", ended=run.created + 1)
    view.push(view.feed.snapshot())
    view.take({"kind": "hello"})
    view.take({"kind": "resume"})
    head = view.sent[-1]["head"]
    assert (head["notice"], head["resuming"]) == ("could not be resumed: no room", False)


def test_a_view_is_made_from_what_people_have(run: Any, home: pathlib.Path) -> None:
    (home / "runs").mkdir(parents=True)
    (home / "runs" / run.dir.id).symlink_to(run.dir.root)
    for given in (run.dir, Run(run.dir), str(run.dir.root), run.dir.id):
        widget = RunView(given)
        assert widget.feed.snapshot().id == run.dir.id
        widget.close()


@pytest.mark.parametrize(
    "content",
    [None, [], "stop", {}, {"kind": None}, {"kind": "watch"}, {"kind": "watch", "log_rank": "0"},
     {"kind": "watch", "log_rank": 99, "chart_rank": -1}, {"kind": "watch", "chart_rank": True},
     {"kind": ["hello"]}, {"kind": "resume"}],
)  # fmt: skip
def test_whatever_a_browser_sends_is_data(view: Any, content: Any) -> None:
    view.take(content)
    assert view.stops == []
    assert view._messages.chart_rank == 0
    assert view._messages.log_rank is None


class Channel:
    def __init__(self) -> None:
        self.closed = False
        self.callback: Any = None

    def close(self) -> None:
        self.closed = True

    def on_msg(self, callback: Any) -> None:
        self.callback = callback


def test_the_second_channel_belongs_to_the_view_whose_key_it_names(view: Any) -> None:
    channel = Channel()
    open_channel(channel, {"content": {"data": {"key": view.key}}})
    channel.callback({"content": {"data": {"kind": "stop"}}})
    assert view.stops == ["stop"]
    for facts in ({"key": "guess"}, {}, None):
        stranger = Channel()
        open_channel(stranger, {"content": {"data": facts}})
        assert stranger.closed
        assert stranger.callback is None


def test_the_display_reads_well_where_there_are_no_widgets(view: Any) -> None:
    bundle = view.live_bundle()
    assert bundle["text/plain"].startswith("train: starting on 2 CPU workers")
    assert "<script" not in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_displayed_by_itself_it_follows_the_run_to_its_end(view: Any, run: Any) -> None:
    view._repr_mimebundle_()
    view.take({"kind": "hello"})
    run.status("SUCCEEDED", step=5, ended=run.created + 1)
    followers = [thread for thread in threading.enumerate() if thread.name == "sgpu-view"]
    for thread in followers:
        thread.join(10)
        assert not thread.is_alive()
    assert view.sent[-1]["head"]["final"]


def test_whoever_stops_a_run_may_wait_for_the_thread_that_shows_it(view: Any) -> None:
    def wait_for_a_refresh() -> None:
        other = threading.Thread(target=lambda: view.push(view.feed.snapshot()))
        other.start()
        other.join(10)
        assert not other.is_alive()
        view.stops.append("stop")

    view._on_stop = wait_for_a_refresh
    view.take({"kind": "stop"})
    assert view.stops == ["stop"]


def test_naming_the_package_loads_no_ui_and_no_torch() -> None:
    code = (
        "import sys, sgpu.widgets as w; w.show; w.Feed; w.GoodputPlanner; w.PlannerState; w.TextView; w.render; "
        "print([m for m in ('IPython', 'anywidget', 'ipywidgets', 'mlflow', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
