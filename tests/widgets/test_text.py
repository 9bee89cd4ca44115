"""Text and static HTML: all that matters, never a flood, nothing of a run read as markup."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from typing import Any

from sgpu.contract import atomic
from sgpu.contract.heartbeat import Page
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.showing import html, picture
from sgpu.widgets.showing.text import TextView, render

BAD = "<img src=x onerror=alert(1)>\"'\x1b[2J"


def failed(run: Any) -> None:
    run.event("run_started", world_size=2)
    run.event("checkpoint_committed", after_seconds=3, step=20, blocked_seconds=0.02, save_seconds=1.1)
    run.event("failure", after_seconds=4, rank=1, step=31, cause="ValueError", message="boom")
    run.event("run_ended", after_seconds=5, state="FAILED", message="ValueError: boom")
    for step in range(1, 32):
        run.metrics(step, loss=1 / step)
    run.log(b"\r10%\r20%\nlast words\n", rank=1)
    page = Page.create(run.dir.heartbeat, 2)
    page.slot(0).start(0)
    facts = {
        "kind": "exception", "rank": 1, "step": 31, "cause": "ValueError", "message": "boom",
        "traceback": "Traceback:\n  x = 1", "reason": "ValueError would happen again",
    }  # fmt: skip
    run.status("FAILED", step=31, total_steps=100, failure=facts, ended=run.created + 5)


def test_the_whole_page_tells_the_root_cause_first(run: Any, clock: Any) -> None:
    failed(run)
    told = render(Feed(run.dir, clock=clock).snapshot()).splitlines()
    assert told[0] == "train: failed on 2 CPU workers after 5.0 s"
    assert told[1] == "step 31 / 100 (31.0 %), 1.0 steps/s on average"
    assert told[2] == "root cause: rank 1 raised ValueError after step 31: boom"
    assert told[3:5] == ["    Traceback:", "      x = 1"]
    resume = f'sgpu.attach("{run.dir.id}").resume() goes on from step 20'
    assert told[5] == f"tried: no restart before this (ValueError would happen again); {resume}"
    text = "\n".join(told)
    assert "metrics: loss 0.03226" in text
    assert "  0:00:03 checkpoint at step 20 (0.02 s blocked, 1.1 s to save)" in text
    assert f"log of rank 1 ({run.dir.log(0, 1)}):\n  20%\n  last words" in text
    assert text.endswith(f"folder: {run.dir.root}")


def test_lines_tell_events_at_once_and_progress_now_and_then(run: Any, clock: Any) -> None:
    stream = io.StringIO()
    feed, view = Feed(run.dir, clock=clock), TextView(stream, clock=clock)
    run.event("run_started", world_size=2)
    for tick in range(600):  # a minute, ten times a second
        run.status("RUNNING", step=tick, total_steps=600)
        if tick % 10 == 0:
            run.metrics(tick, loss=1.0 / (tick + 1))
            run.event(
                "checkpoint_committed", step=tick, blocked_seconds=0.02, save_seconds=1.1, after_seconds=tick / 10
            )
        if tick == 305:
            run.event("failure", rank=1, step=300, cause="signal 9", after_seconds=30)
        view.show(feed.snapshot())
        clock.now += 0.1
    run.status("SUCCEEDED", step=600, total_steps=600, ended=run.created + 60)
    view.finish(feed.snapshot())
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"train: running on 2 CPU workers for 0.00 s (folder: {run.dir.root})"
    assert "[0:00:00] started with 2 workers" in lines
    assert "[0:00:30] rank 1 lost (signal 9) after step 300" in lines
    progress = [line for line in lines if re.match(r"\[0:00:\d\d\] step \d+ / 600", line)]
    assert 10 <= len(progress) <= 13
    assert re.search(r"step \d+ / 600 \(\d+\.\d %\), 10\.0 steps/s, \d+ s left, loss 0\.0", progress[5])
    checkpoints = [line for line in lines if "checkpoint at step" in line]
    assert 10 <= len(checkpoints) <= 13
    assert all("more before it" in line for line in checkpoints[1:-1])
    assert lines[-1] == "train: finished on 2 CPU workers after 1 min"
    assert "\r" not in stream.getvalue()


def test_a_day_is_told_in_some_hundred_lines(run: Any, clock: Any) -> None:
    stream = io.StringIO()
    feed, view = Feed(run.dir, clock=clock), TextView(stream, clock=clock)
    for minute in range(24 * 60):
        run.status("RUNNING", step=minute, total_steps=24 * 60)
        view.show(feed.snapshot())
        clock.now += 60
    assert 50 < len(stream.getvalue().splitlines()) < 400


def test_a_flood_of_warnings_is_cut(run: Any, clock: Any) -> None:
    for number in range(400):
        run.event("warning", message=f"warning {number}")
    stream = io.StringIO()
    TextView(stream, clock=clock).show(Feed(run.dir, clock=clock).snapshot())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 14
    assert lines[-1] == "… and 388 more events, in events.jsonl"


def test_a_terminal_of_ascii_gets_every_line(run: Any, clock: Any) -> None:
    run.event("warning", message="2 × Größe …")
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding="ascii")
    TextView(stream, clock=clock).show(Feed(run.dir, clock=clock).snapshot())
    assert b"2 ? Gr??e ?" in content.getvalue()


def test_a_process_without_output_is_told_nothing(run: Any, clock: Any) -> None:
    TextView(None, clock=clock).finish(Feed(run.dir, clock=clock).snapshot())


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def test_html_escapes_everything_that_came_from_the_run(hostile: Any, clock: Any) -> None:
    run = hostile
    run.event("warning", message=BAD)
    run.metrics(1, **{BAD: 1.0, "$\\frac{x": 2.0})
    run.log(BAD.encode())
    atomic.write_json(run.dir.mlflow, {"run_id": BAD, "url": f"javascript:{BAD}", "open_command": BAD})
    facts = {"kind": BAD, "rank": 0, "step": 1, "message": BAD, "traceback": BAD}
    run.status("FAILED", failure=facts, ended=run.created + 5)
    snapshot = Feed(run.dir, clock=clock).snapshot()
    page = read(html.page(snapshot, b"png"))
    assert page.tags.count("img") == 1  # our own
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "href" not in dict(page.attributes)
    assert page.text.count("<img src=x onerror=alert(1)>\"'") >= 6
    assert "\x1b" not in page.text
    assert "\x1b" not in render(snapshot)


def test_the_bundle_has_a_picture_text_and_html(run: Any, clock: Any) -> None:
    failed(run)
    bundle = html.bundle(Feed(run.dir, clock=clock).snapshot())
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    png = base64.b64decode(bundle["image/png"])
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) < 100_000
    page = read(bundle["text/html"])
    assert ("src", f"data:image/png;base64,{bundle['image/png']}") in page.attributes
    assert not {"svg", "script", "style", "iframe"} & set(page.tags)
    assert "root cause: rank 1 raised ValueError" in page.text


def test_without_metrics_or_matplotlib_there_is_a_table_and_no_picture(run: Any, clock: Any, monkeypatch: Any) -> None:
    run.status("SUCCEEDED", ended=run.created + 5)
    assert set(html.bundle(Feed(run.dir, clock=clock).snapshot())) == {"text/plain", "text/html"}
    run.metrics(1, loss=0.25)
    monkeypatch.setattr(picture, "available", lambda: False)
    bundle = html.bundle(Feed(run.dir, clock=clock).snapshot())
    assert set(bundle) == {"text/plain", "text/html"}
    assert "loss" in read(bundle["text/html"]).text
    assert "<details open><summary>metrics" in bundle["text/html"]


def test_a_link_is_only_made_of_a_page(run: Any, clock: Any) -> None:
    atomic.write_json(run.dir.mlflow, {"run_id": "r", "url": "http://127.0.0.1:5000/#/r?a=1&b=2", "open_command": "x"})
    page = read(html.page(Feed(run.dir, clock=clock).snapshot()))
    assert dict(page.attributes)["href"] == "http://127.0.0.1:5000/#/r?a=1&b=2"
