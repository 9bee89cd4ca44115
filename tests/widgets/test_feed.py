"""From run folders made by hand to snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.contract.heartbeat import Category, Page
from sgpu.contract.process import ProcessId, process_of, this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.contract.status import NodeStatus
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.machines import machine_line
from sgpu.widgets.showing import html
from sgpu.widgets.showing.messages import head_of


def test_a_folder_without_a_run_is_refused(tmp_path: Any) -> None:
    with pytest.raises(SgpuError, match=r"no run at .*: it has no spec\.json"):
        Feed(RunDir(tmp_path))


def test_a_run_that_was_just_started(run: Any, clock: Any) -> None:
    clock.now += 3
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert (snapshot.state, snapshot.final, snapshot.name) == ("STARTING", False, "train")
    assert snapshot.elapsed_seconds == pytest.approx(3)
    assert (snapshot.step, snapshot.total_steps, snapshot.eta_seconds) == (0, None, None)
    assert (snapshot.goodput, snapshot.failure, snapshot.tracking) == (None, None, None)
    assert (snapshot.series, snapshot.happenings, snapshot.logs, snapshot.marks) == ({}, (), (), ())


def test_a_snapshot_writes_nothing(run: Any, clock: Any) -> None:
    run.event("run_started", world_size=2)
    run.metrics(1, loss=1.0)
    run.log(b"hello\n")
    Page.create(run.dir.heartbeat, 2)
    before = {path: path.stat().st_mtime_ns for path in run.dir.root.rglob("*")}
    Feed(run.dir, clock=clock).snapshot()
    assert {path: path.stat().st_mtime_ns for path in run.dir.root.rglob("*")} == before


def test_steps_rate_and_time_left_come_from_the_slowest_rank(run: Any, clock: Any) -> None:
    run.status("RUNNING", step=0)
    page = Page.create(run.dir.heartbeat, 2)
    slots = [page.slot(rank) for rank in range(2)]
    feed = Feed(run.dir, clock=clock)
    for slot in slots:
        slot.start(0)
    for _ in range(10):  # a slow start
        feed.snapshot()
        clock.now += 1
    for step in range(0, 101, 10):
        slots[0].beat(step + 5, total_steps=1000)
        slots[1].beat(step, total_steps=1000)
        snapshot = feed.snapshot()
        clock.now += 1
    assert snapshot.step == 100
    assert snapshot.total_steps == 1000
    assert snapshot.steps_per_second == pytest.approx(10)
    assert snapshot.eta_seconds == pytest.approx(90)


def test_a_restart_shows_the_step_it_goes_on_from(run: Any, clock: Any) -> None:
    page = Page.create(run.dir.heartbeat, 2)
    slots = [page.slot(rank) for rank in range(2)]
    feed = Feed(run.dir, clock=clock)
    for slot in slots:
        slot.start(0)
        slot.beat(50)
    assert feed.snapshot().step == 50
    run.status("RESTARTING", step=50, generation=1, restarts=1)
    slots[1].start(1)
    assert feed.snapshot().step == 50  # rank 1 has not said yet where it is
    for slot in slots:
        slot.start(1)
        slot.beat(40)
    snapshot = feed.snapshot()
    assert (snapshot.step, snapshot.restarts, snapshot.generation) == (40, 1, 1)


def test_rate_of_a_run_without_heartbeat_comes_from_its_metrics(run: Any, clock: Any) -> None:
    run.status("RUNNING", step=30, total_steps=60)
    for step in range(1, 31):
        run.metrics(step, loss=1.0)  # one a second
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert snapshot.steps_per_second == pytest.approx(1)
    assert snapshot.eta_seconds == pytest.approx(30)


def test_the_average_of_an_ended_run_leaves_its_start_out(run: Any, clock: Any) -> None:
    for step in range(1, 31):
        run.metrics(step, loss=1.0)  # one a second
    run.status("SUCCEEDED", step=30, ended=run.created + 300)
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert snapshot.steps_per_second == pytest.approx(1)
    assert snapshot.eta_seconds is None


def test_the_end_of_an_epoch_is_told_once(run: Any) -> None:
    for rank in range(2):
        run.event("epoch_ended", epoch=0, rank=rank)
    assert [happening.sentence for happening in Feed(run.dir).snapshot().happenings] == ["epoch 0 ended"]


def test_the_ledger_sums_to_all_and_names_a_slow_data_pipeline(run: Any, clock: Any) -> None:
    page = Page.create(run.dir.heartbeat, 2)
    slots = [page.slot(rank) for rank in range(2)]
    for slot in slots:
        slot.start(0)
        slot.account(Category.DATA)
    clock.now = (slots[0].read().ledger_since_ns / 1e9) + 10  # ten seconds of waiting that are not over
    goodput = Feed(run.dir, clock=clock).snapshot().goodput
    assert goodput is not None
    assert sum(part.share for part in goodput.parts) == pytest.approx(1)
    parts = {part.name: part for part in goodput.parts}
    assert parts["data"].seconds == pytest.approx(20, abs=0.5)
    assert goodput.share == 0
    assert goodput.sentence == "0.0 % of 2 CPU workers × 10 s productive"
    assert goodput.advice == "", "nothing is said of the first steps, which wait for workers to start"
    slots[0].beat(20, 0, -1)
    later = Feed(run.dir, clock=clock).snapshot().goodput
    assert later is not None
    assert "the data pipeline is the bottleneck" in later.advice
    run.event("bottleneck", step=20, bottleneck="latency", message="Latency-bound: many small files")
    told = Feed(run.dir, clock=clock).snapshot().goodput
    assert told is not None
    assert told.advice == "Latency-bound: many small files"


def test_an_ended_run_of_an_earlier_boot_counts_up_to_its_last_sign(run: Any, clock: Any) -> None:
    page = Page.create(run.dir.heartbeat, 2)
    slot = page.slot(0)
    slot.start(0)
    slot.beat(7)
    run.status("FAILED", step=9, ended=run.created + 12)
    clock.now = 0.0  # the machine's monotonic clock has started again
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert snapshot.final
    assert snapshot.elapsed_seconds == pytest.approx(12)
    assert snapshot.step == 9
    assert snapshot.goodput is not None
    assert 0 <= snapshot.goodput.rank_seconds < 5


def test_nodes_are_told_with_ranks_and_steps(run: Any, clock: Any) -> None:
    spec = replace(read_spec(run.dir), world_size=4, gpus_per_node=2, spares=1)
    spec.write(run.dir)
    page = Page.create(run.dir.heartbeat, 4)
    for rank, step in enumerate((7, 9, 5, 8)):
        page.slot(rank).start(0)
        page.slot(rank).beat(step)
    nodes = (
        NodeStatus(node=0, address="10.0.0.1", state="ready"), NodeStatus(node=1, address="10.0.0.2", state="here"),
        NodeStatus(node=2, address=None, state="away"),
    )  # fmt: skip
    run.status("RUNNING", nodes=nodes, world_size=2)
    feed = Feed(run.dir, clock=clock)
    snapshot = feed.snapshot()
    assert [machine_line(machine) for machine in snapshot.machines] == [
        "node 0 (10.0.0.1): ranks 0 to 1, at step 7, ready", "node 1 (10.0.0.2): ranks 2 to 3, at step 5, here",
        "node 2: spare, away",
    ]  # fmt: skip
    head = head_of(snapshot)
    assert head["workers"] == "2 CPU workers on 2 nodes"
    assert head["machines"][2] == [2, "away", "✕ away: being started", "", "spare", ""]
    kept = html.bundle(snapshot, charts=False)
    for content in kept.values():
        assert "node 1 (10.0.0.2): ranks 2 to 3" in content
    run.status("SUCCEEDED", nodes=nodes, ended=run.created + 1)
    assert [machine.state for machine in feed.snapshot().machines] == ["", "", ""]


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"SGPUHB01" + b"\xff" * 5000])
def test_a_broken_heartbeat_page_is_as_good_as_none(run: Any, content: bytes) -> None:
    run.dir.heartbeat.write_bytes(content)
    assert Feed(run.dir).snapshot().goodput is None


def test_events_become_happenings_and_marks(run: Any, clock: Any) -> None:
    run.event("run_started", world_size=2)
    feed = Feed(run.dir, clock=clock)
    assert [happening.sentence for happening in feed.snapshot().happenings] == ["started with 2 workers"]
    run.event("checkpoint_committed", after_seconds=20, step=1200, blocked_seconds=0.02, save_seconds=1.1)
    run.event("failure", after_seconds=30, rank=1, step=1214, cause="signal 9")
    run.event("restarting", after_seconds=30, from_step=1200)
    run.event("resumed", after_seconds=31, from_step=1200, seconds=0.9, recomputed_steps=14)
    with run.dir.events.open("a") as file:
        file.write('{"torn": ')
    snapshot = feed.snapshot()
    assert [happening.number for happening in snapshot.happenings] == [0, 1, 2, 3, 4]
    assert [(mark.kind, mark.step) for mark in snapshot.marks] == [
        ("checkpoint", 1200), ("restart", 1200), ("failure", 1214)
    ]  # fmt: skip
    assert snapshot.restarts == 1


def test_many_events_are_counted_and_the_newest_kept(run: Any, clock: Any) -> None:
    line = '{"time": %d, "kind": "checkpoint_committed", "step": %d, "generation": 0}\n'
    run.dir.events.write_text("".join(line % (number, number) for number in range(3000)))
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert len(snapshot.happenings) == 500
    assert snapshot.earlier_happenings == 2500
    assert snapshot.happenings[-1].number == 2999
    assert len(snapshot.marks) == 200


def test_a_failure_names_what_was_tried_and_where_it_goes_on(run: Any, clock: Any) -> None:
    run.event("checkpoint_committed", step=20)
    run.event("restarting", from_step=20)
    run.log(b"rank 0\n", rank=0)
    run.log(b"rank 1\n", rank=1)
    facts = {"kind": "exception", "rank": 1, "step": 31, "message": "boom", "traceback": "Traceback\n  boom"}
    run.status("FAILED", step=31, restarts=1, failure=facts, ended=run.created + 5)
    snapshot = Feed(run.dir, clock=clock).snapshot()
    failure = snapshot.failure
    assert failure is not None
    assert (failure.rank, failure.step, failure.resume_step) == (1, 31, 20)
    assert failure.summary == "rank 1 raised an error after step 31: boom"
    assert failure.tried == "1 restart before this"
    assert [log.rank for log in snapshot.logs] == [1, 0]


@pytest.mark.parametrize("failure", [{}, {"rank": "x", "step": None, "message": None}, {"kind": 7, "traceback": 3}])
def test_a_failure_of_unknown_form_is_still_shown(run: Any, failure: dict[str, Any]) -> None:
    run.status("FAILED", failure=failure)
    found = Feed(run.dir).snapshot().failure
    assert found is not None
    assert found.rank is None


def test_the_tracking_link_appears(run: Any) -> None:
    feed = Feed(run.dir)
    assert feed.snapshot().tracking is None
    atomic.write_json(run.dir.mlflow, {"run_id": "r", "url": None, "open_command": "mlflow ui --port 1"})
    tracking = feed.snapshot().tracking
    assert tracking is not None
    assert (tracking.run_id, tracking.url, tracking.command) == ("r", "", "mlflow ui --port 1")


def test_a_run_whose_supervisor_vanished_is_lost_after_a_while(run: Any, clock: Any) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.status("RUNNING", step=3)
    ProcessId(pid=gone.pid, started=1).write(run.dir.agent)
    feed = Feed(run.dir, clock=clock)
    assert feed.snapshot().state == "RUNNING"
    clock.now += 11
    snapshot = feed.snapshot()
    assert (snapshot.state, snapshot.final) == ("LOST", True)
    this_process().write(run.dir.agent)
    assert feed.snapshot().state == "RUNNING"


def test_a_run_that_never_got_a_supervisor_is_lost(run: Any, clock: Any) -> None:
    run.dir.agent.unlink()
    feed = Feed(run.dir, clock=clock)
    clock.now += 9
    assert feed.snapshot().state == "STARTING"
    clock.now += 2
    assert feed.snapshot().state == "STARTING"
    clock.now += 2
    assert feed.snapshot().state == "LOST"


def test_a_supervisor_that_nobody_has_waited_for_is_gone_too(run: Any, clock: Any) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    agent = process_of(zombie.pid)
    assert agent is not None
    assert zombie.stdout.read() == b""
    zombie.stdout.close()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    run.status("RUNNING", step=3)
    agent.write(run.dir.agent)
    feed = Feed(run.dir, clock=clock)
    feed.snapshot()
    clock.now += 11
    assert feed.snapshot().state == "LOST"
    zombie.wait()


def test_a_removed_folder_ends_the_view(run: Any) -> None:
    feed = Feed(run.dir)
    run.dir.root.rename(run.dir.root.with_name("elsewhere"))
    snapshot = feed.snapshot()
    assert snapshot.final
    assert snapshot.note == "the run's folder was removed"
