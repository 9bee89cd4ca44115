"""The loop and the delivery with a tracking server that fails as told: every call, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from sgpu.contract.clock import SystemClock
from sgpu.contract.errors import SgpuError
from sgpu.metrics import gpus, machine, names
from sgpu.metrics.delivery import Delivery
from sgpu.metrics.forwarding import Forwarder
from sgpu.metrics.progress import Point
from sgpu.metrics.spool import series
from sgpu.metrics.supervisor import DeadlinePassed, Parent
from sgpu.metrics.writer import Link, TrackingDownError, TrackingRefusedError

from .conftest import HandMadeRun, MakeRun


class ScriptedServer:
    """Keeps what it is given, as a server that does not look for doubles. `faults`: call number -> what goes wrong."""

    def __init__(self, faults: Mapping[int, str] | None = None) -> None:
        self.faults, self.calls, self.fired = dict(faults or {}), 0, 0
        self.entries: list[tuple[str, int, float]] = []
        self.status: str | None = None
        self.tags: dict[str, str] = {}
        self.texts: dict[str, str] = {}

    def _meet(self) -> str | None:
        self.calls += 1
        fault = self.faults.get(self.calls)
        self.fired += fault is not None
        if fault == "down":
            raise TrackingDownError("no route to it")
        if fault == "gone":
            raise TrackingRefusedError("the run was deleted", code="x", gone=True)
        return fault

    def _answer(self, fault: str | None) -> None:
        if fault == "answer lost":
            raise TrackingDownError("the answer was lost")

    def open(self) -> Link:
        self._answer(self._meet())
        return Link(run_id="r", experiment_id="1", tracking_uri="t", url=None, open_command=None)

    def marks(self) -> dict[str, int]:
        self._answer(self._meet())
        marks: dict[str, int] = {}
        for key, step, _ in self.entries:
            marks[key] = max(step, marks.get(key, step))
        return marks

    def log(self, points: Sequence[Point]) -> None:
        assert 0 < len(points) <= 1000
        fault = self._meet()
        if any(p.key == "bad" for p in points):
            raise TrackingRefusedError("bad is no name", code="INVALID_PARAMETER_VALUE", gone=False)
        kept = points[: len(points) // 2] if fault == "half" else points
        self.entries += [(p.key, p.step, p.value) for p in kept]
        if fault == "half":
            raise TrackingDownError("it died in the middle")
        self._answer(fault)

    def finish(self, status: str, *, ended_seconds: float, tags: Mapping[str, str]) -> None:
        fault = self._meet()
        self.status, self.tags = status, dict(tags)
        self._answer(fault)

    def save_text(self, name: str, text: str) -> None:
        self._answer(self._meet())
        self.texts[name] = text


class ScriptedSignals:
    """Nobody waits; the deadline passes after so many waits past it."""

    def __init__(self, waits: int = 50) -> None:
        self.asked_to_end = False
        self._left, self._armed = waits, False

    def wait(self, seconds: float, parent: Parent) -> None:
        self._left -= 1
        if self._left < 0:
            assert self._armed, "it waits for ever"
            raise DeadlinePassed

    def set_deadline(self, seconds: float) -> None:
        self._armed = True

    def clear_deadline(self) -> None:
        self._armed = False


def forwarder_of(
    run: HandMadeRun, server: ScriptedServer, *, waits: int = 50, parent: Parent | None = None
) -> Forwarder:
    sampler = machine.Sampler(lambda: [], ranks=range(1), created_seconds=0, period_seconds=3600, open_gpus=gpus.NoGpus)
    return Forwarder(
        run.dir, world_size=run.world_size, writer=server, sampler=sampler, parent=parent or Parent(None),
        signals=ScriptedSignals(waits), clock=SystemClock(), drain_seconds=30,
    )  # type: ignore[arg-type]  # fmt: skip


def finished_run(make_run: MakeRun, state: str = "SUCCEEDED") -> HandMadeRun:
    run = make_run("http://nowhere")
    run.generation(0, range(1, 701))
    run.generation(1, range(501, 1001), sign=-1)
    run.finish(state)  # type: ignore[arg-type]
    return run


def steps_of(server: ScriptedServer, key: str) -> list[int]:
    return [step for name, step, _ in server.entries if name == key]


STEPS = list(range(1, 1001))


@pytest.mark.parametrize("fault", ["down", "answer lost", "half"])
def test_any_call_may_fail_and_each_step_still_comes_once_and_in_order(make_run: MakeRun, fault: str) -> None:
    run = finished_run(make_run)
    clean = ScriptedServer()
    assert forwarder_of(run, clean).serve() == 0
    assert steps_of(clean, "loss") == STEPS
    for number in range(1, clean.calls + 1):
        run.dir.forwarder.unlink()
        server = ScriptedServer({number: fault})
        assert forwarder_of(run, server).serve() == 0
        assert server.fired == 1
        for key in ("loss", "rank1/loss", "step_seconds", "rank1/step_seconds"):
            assert steps_of(server, key) == STEPS, f"{fault} at call {number}"
        assert steps_of(server, "goodput") == [1000]
        assert steps_of(server, "restarts") == [0, 1]
        assert server.status == "FINISHED"
    assert not run.events("metrics_lost")


def test_the_run_folder_alone_tells_the_same(make_run: MakeRun) -> None:
    run, server = finished_run(make_run), ScriptedServer()
    assert forwarder_of(run, server).serve() == 0
    found = series(run.dir)
    for key in ("loss", "rank1/loss", "restarts"):
        assert found[key] == [(step, value) for name, step, value in server.entries if name == key]
    assert set(found) == {name for name, _, _ in server.entries} - {
        name for name in names.BUILT_IN if name == "goodput" or name.startswith("ledger/")
    }


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("SUCCEEDED", "FINISHED"),
        ("FAILED", "FAILED"),
        ("LOST", "FAILED"),
        ("CANCELLED", "KILLED"),
        ("PREEMPTED", "KILLED"),
    ],
)
def test_final_status(make_run: MakeRun, state: str, shown: str) -> None:
    run, server = finished_run(make_run, state), ScriptedServer()
    assert forwarder_of(run, server).serve() == 0
    assert server.status == shown
    assert server.tags["sgpu.state"] == state
    assert "hello of generation 1" in server.texts["logs/rank0.txt"]
    assert "generation_started" in server.texts["events.jsonl"]


def test_a_parent_that_ends_while_the_agent_lives_leaves_the_run_running(make_run: MakeRun) -> None:
    run, server, parent = make_run("http://nowhere"), ScriptedServer(), Parent(None)
    run.supervised()
    run.status("RUNNING")
    run.generation(0, range(1, 21))
    parent.gone = True
    assert forwarder_of(run, server, parent=parent).serve() == 0
    assert server.status is None
    assert steps_of(server, "loss") == list(range(1, 21))


def test_without_an_agent_the_parents_end_is_the_runs(make_run: MakeRun) -> None:
    run, server, parent = make_run("http://nowhere"), ScriptedServer(), Parent(None)
    run.generation(0, range(1, 21))
    parent.gone = True
    assert forwarder_of(run, server, parent=parent).serve() == 0
    assert server.status == "FAILED"
    assert "supervisor vanished" in server.tags["sgpu.failure"]


def test_what_never_gets_there_is_counted(make_run: MakeRun) -> None:
    run = finished_run(make_run)
    server = ScriptedServer(dict.fromkeys(range(4, 1000), "down"))
    assert forwarder_of(run, server).serve() == 1
    total = 4 * 1000 + 2 + 9  # goodput and the ledger
    (lost,) = run.events("metrics_lost")
    assert lost["count"] == total - len(server.entries)
    assert len(server.entries) > 0
    assert "no route to it" in lost["cause"]


def test_a_run_that_is_gone_is_told_at_once_and_counted_at_the_end(make_run: MakeRun) -> None:
    run = make_run("http://nowhere")
    run.supervised()
    run.status("RUNNING")
    run.generation(0, range(1, 21))
    server = ScriptedServer({3: "gone"})
    forwarder = forwarder_of(run, server)
    forwarder._run_turn()  # one turn while the run is on
    (warning,) = run.events("warning")
    assert "deleted" in warning["message"]
    run.generation(1, range(21, 41))
    run.finish()
    assert forwarder.serve() == 1
    (lost,) = run.events("metrics_lost")
    assert lost["count"] >= 4 * 40 + 2


def test_one_refused_point_is_dropped_alone_and_told(make_run: MakeRun) -> None:
    run, server = make_run("http://nowhere"), ScriptedServer()
    with run.dir.spool(0).open("a") as spool:
        for step in range(1, 100):
            name = "bad" if step in (50, 51) else "good"
            spool.write(f'{{"time": 1, "step": {step}, "generation": 0, "values": {{"{name}": 1.0}}}}\n')
    run.finish()
    assert forwarder_of(run, server).serve() == 0
    assert steps_of(server, "good") == [step for step in range(1, 100) if step not in (50, 51)]
    (lost,) = run.events("metrics_lost")
    assert (lost["count"], "bad" in lost["cause"]) == (2, True)


def test_artifacts_that_cannot_be_kept_do_not_fail_the_run(make_run: MakeRun) -> None:
    run, server = finished_run(make_run), ScriptedServer()

    def refuse(name: str, text: str) -> None:
        raise TrackingRefusedError("no room", code="x", gone=False)

    server.save_text = refuse  # type: ignore[method-assign]
    assert forwarder_of(run, server).serve() == 0
    assert server.status == "FINISHED"
    assert "no room" in run.events("warning")[0]["message"]


def test_a_page_that_is_none_is_told_and_metrics_go_on(make_run: MakeRun) -> None:
    run, server = finished_run(make_run), ScriptedServer()
    run.dir.heartbeat.write_bytes(b"not a page" * 100)
    assert forwarder_of(run, server).serve() == 0
    assert steps_of(server, "loss") == STEPS
    assert "no goodput" in run.events("warning")[0]["message"]


def test_samples_wait_while_the_server_is_down(make_run: MakeRun) -> None:
    run, server = make_run("http://nowhere"), ScriptedServer({3: "down", 4: "down"})
    samples = [
        [Point(key="cpu", value=1.0, step=1, time_seconds=1)],
        [Point(key="cpu", value=2.0, step=2, time_seconds=2)],
    ]
    delivery = Delivery(
        run.dir,
        world_size=1,
        writer=server,
        sampled=lambda most: samples.pop(0) if samples else [],  # type: ignore[arg-type]
    )
    for _ in range(2):
        with pytest.raises(SgpuError):
            delivery.turn()
    while not delivery.idle:
        delivery.turn()
    assert steps_of(server, "cpu") == [1, 2]
