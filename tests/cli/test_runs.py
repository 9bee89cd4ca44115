"""Lists, logs, cancel, resume, cleanup: over run folders made by hand, and one real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from sgpu.contract import process
from sgpu.contract.errors import InputError
from sgpu.contract.heartbeat import Page, Section
from sgpu.contract.outcome import read_outcome
from sgpu.contract.status import Status, read_status
from sgpu.run import Run

pytestmark = pytest.mark.usefixtures("without_mlflow")


def test_no_runs(sgpu: Any, home: Any) -> None:
    told = sgpu("runs")
    assert told.exit_code == 0
    assert told.stdout == f"no runs in {home}/runs\n"


def test_runs_newest_first_with_state_step_and_time(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa", state="FAILED")
    make_run("20260102-000000-train-bbbbbb", world=2)
    told = sgpu("runs")
    assert told.exit_code == 0, told.output
    _, first, second = told.stdout.splitlines()
    assert first.split()[:5] == ["20260102-000000-train-bbbbbb", "SUCCEEDED", "30", "2", "CPU"]
    assert first.rstrip().endswith("1.5 min")
    assert second.startswith("20260101-000000-train-aaaaaa")
    assert "FAILED" in second


def test_runs_can_be_limited(sgpu: Any, make_run: Any) -> None:
    for number in range(3):
        make_run(f"2026010{number + 1}-000000-train-aaaaaa")
    told = sgpu("runs", "--limit", 1)
    assert "20260103" in told.stdout
    assert "20260102" not in told.stdout
    assert "2 older" in told.stdout


def test_show_tells_nodes_and_cause(sgpu: Any, make_run: Any) -> None:
    run = make_run("20260102-000000-train-bbbbbb", state="FAILED", world=4)
    spec = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps({**spec, "gpus_per_node": 2, "spares": 1}))
    status = json.loads(run.status.read_text())
    nodes = [
        {"node": 0, "address": "127.0.0.2", "state": "ready"}, {"node": 1, "address": None, "state": "away"},
        {"node": 2, "address": "127.0.0.4", "state": "ready"},
    ]  # fmt: skip
    failure = {"message": "node 1 was lost: its connection was closed", "cause": "lost"}
    run.status.write_text(json.dumps({**status, "nodes": nodes, "failure": failure}))
    told = sgpu("show", "bbbbbb")
    assert told.exit_code == 0, told.output
    first, cause, _, *rows, folder, more = told.stdout.splitlines()
    assert first.startswith("20260102-000000-train-bbbbbb: FAILED at step 30, after 1.5 min")
    assert first.endswith("4 CPU workers on 2 nodes")
    assert cause == "cause: node 1 was lost: its connection was closed"
    assert [row.split() for row in rows] == [
        ["0", "127.0.0.2", "0", "to", "1"], ["1", "2", "to", "3"], ["2", "127.0.0.4", "spare"],
    ]  # fmt: skip
    assert folder == f"folder: {run.root}"
    assert more.startswith("next: `sgpu logs 20260102-000000-train-bbbbbb`")
    assert more.endswith("`sgpu resume 20260102-000000-train-bbbbbb` goes on")


def test_show_tells_the_process_of_each_rank_of_a_live_run_and_what_it_is_in(
    sgpu: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("20260102-000000-train-bbbbbb", world=3, state=None)
    process.this_process().write(run.agent)
    Status(state="RUNNING", updated=time.time()).write(run)
    assert sgpu("show", "bbbbbb").stdout.splitlines()[1] == f"folder: {run.root}", "there is no page yet"
    page = Page.create(run.heartbeat, 3)
    for rank in range(3):
        page.slot(rank).start(0, pid=4300 + rank)
    page.slot(1).enter(Section.USER, name="export")
    page.slot(2).finish()
    page.close()
    _, head, *rows, _ = sgpu("show", "bbbbbb").stdout.splitlines()
    assert head.split() == ["rank", "pid", "step", "state", "in", "for"]
    assert [row.split()[:5] for row in rows] == [
        ["0", "4300", "0", "starting", "init"], ["1", "4301", "0", "starting", "export"],
        ["2", "4302", "0", "finished"],
    ]  # fmt: skip
    monkeypatch.setattr("sgpu.cli.runs._MOST_RANKS", 2)
    _, _, *rows, more, _ = sgpu("show", "bbbbbb").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["0", "2"], "longest in what they do"
    assert more == "1 more ranks, for less long in what they do"


def test_show_of_a_run_whose_supervisor_was_killed_says_where_to_look(sgpu: Any, make_run: Any) -> None:
    run = make_run("20260102-000000-train-bbbbbb", state="LOST")
    told = sgpu("show", "bbbbbb").stdout
    assert f"cause: its supervisor vanished; see {run.agent_log}\n" in told
    assert "next: " in told
    make_run("20260102-000000-train-cccccc")
    assert "next: " not in sgpu("show", "cccccc").stdout


def test_the_cause_tells_type_and_rank_of_an_exception(sgpu: Any, make_run: Any) -> None:
    run = make_run("20260102-000000-train-bbbbbb", state="FAILED")
    status = json.loads(run.status.read_text())
    failure = {"kind": "exception", "message": "'x'", "cause": "KeyError", "rank": 1}
    run.status.write_text(json.dumps({**status, "failure": failure}))
    assert "cause: rank 1 raised KeyError: 'x'\n" in sgpu("show", "bbbbbb").stdout


@pytest.mark.parametrize("step", ["10", 10.0, True, -1])
def test_a_step_that_is_none_is_refused(make_run: Any, step: Any) -> None:
    make_run("20260102-000000-train-bbbbbb")
    with pytest.raises(InputError, match=r"resume\(step=\.\.\.\): expected a whole number, 0 or more, or None"):
        Run.open("bbbbbb").resume(step)


def test_logs_of_a_rank_that_there_is_not_are_refused(make_run: Any) -> None:
    make_run("20260102-000000-train-bbbbbb", world=2)
    with pytest.raises(InputError, match="rank must be 0 to 1 for run 20260102-000000-train-bbbbbb; found 2"):
        Run.open("bbbbbb").logs(2)


@pytest.mark.parametrize("content", ["", "{", '{"version": 99}', '{"version": 1}'])
def test_a_damaged_run_does_not_hide_the_others(sgpu: Any, make_run: Any, content: str) -> None:
    broken = make_run("20260103-000000-broken-cccccc")
    make_run("20260102-000000-train-bbbbbb")
    broken.spec.write_text(content)
    told = sgpu("runs")
    assert told.exit_code == 0, told.output
    assert "UNREADABLE" in told.stdout
    assert "20260102-000000-train-bbbbbb" in told.stdout


def test_logs_of_all_ranks_and_of_one(sgpu: Any, make_run: Any) -> None:
    run = make_run("20260101-000000-train-aaaaaa", world=2)
    for generation in (0, 1):
        for rank in (0, 1):
            log = run.log(generation, rank)
            log.parent.mkdir(parents=True)
            log.write_bytes(b"rank %d in %d \xff\n" % (rank, generation))
    every = sgpu("logs", "aaaaaa").stdout
    assert [every.count(f"rank {rank} in {generation}") for rank in (0, 1) for generation in (0, 1)] == [1, 1, 1, 1]
    one = sgpu("logs", "aaaaaa", "--rank", 1).stdout
    assert one.splitlines() == ["rank 1 in 0 \N{REPLACEMENT CHARACTER}", "rank 1 in 1 \N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there(sgpu: Any, make_run: Any, rank: int) -> None:
    make_run("20260101-000000-train-aaaaaa", world=2)
    told = sgpu("logs", "aaaaaa", "--rank", rank)
    assert told.exit_code == 2
    assert told.stderr == f"sgpu: --rank must be 0 to 1 for run 20260101-000000-train-aaaaaa; found {rank}\n"


@pytest.mark.parametrize("command", ["logs", "cancel", "resume"])
def test_an_unknown_run_is_one_clear_line(sgpu: Any, home: Any, command: str) -> None:
    told = sgpu(command, "nope")
    assert told.exit_code == 2
    assert told.stderr == f"sgpu: no run 'nope' in {home}/runs; `sgpu runs` lists them\n"
    assert told.stdout == ""


def test_an_ambiguous_run_names_the_candidates(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa")
    make_run("20260101-000001-train-bbbbbb")
    told = sgpu("logs", "20260101")
    assert told.exit_code == 2
    assert "aaaaaa" in told.stderr
    assert "bbbbbb" in told.stderr


def test_a_run_of_another_version_fails_with_one_line(sgpu: Any, make_run: Any) -> None:
    run = make_run("20260101-000000-train-aaaaaa")
    run.spec.write_text(json.dumps({**json.loads(run.spec.read_text()), "version": 99}))
    told = sgpu("logs", "aaaaaa")
    assert told.exit_code == 1
    assert "version 99" in told.stderr
    assert told.stderr.count("\n") == 1


def test_cancel_of_a_run_that_has_ended(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa", state="FAILED")
    told = sgpu("cancel", "aaaaaa")
    assert told.exit_code == 0
    assert told.stdout == "run 20260101-000000-train-aaaaaa had ended before: FAILED\n"


def test_resume_of_a_run_that_succeeded_is_refused(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa")
    told = sgpu("resume", "aaaaaa")
    assert told.exit_code == 2
    assert "has succeeded" in told.stderr


def test_cleanup_says_when_nothing_was_left(sgpu: Any) -> None:
    told = sgpu("cleanup")
    assert told.exit_code == 0
    assert told.stdout


def test_agent_then_cancel_from_another_process(sgpu: Any, make_run: Any) -> None:
    """`sgpu agent` on a folder made by hand starts its workers; `sgpu cancel` ends it: exit status 2, nothing left."""

    def sleep_long() -> None:
        import time

        print("asleep", flush=True)
        time.sleep(600)

    run = make_run("20260101-000000-train-aaaaaa", state=None, function=sleep_long)
    with run.agent_log.open("wb") as log:
        agent = subprocess.Popen([*_command(), "agent", str(run.root)], stdout=log, stderr=log)
    try:
        _until(lambda: "asleep" in sgpu("logs", "aaaaaa").stdout)
        assert Run(run).status.state in ("STARTING", "RUNNING")
        told = sgpu("cancel", "aaaaaa")
        assert told.exit_code == 0, told.output
        assert "CANCELLED" in told.stdout
        assert agent.wait(30) == 2
    finally:
        agent.kill()
        agent.wait()


def test_agent_runs_a_folder_to_success(make_run: Any) -> None:
    run = make_run("20260101-000000-train-aaaaaa", state=None, function=lambda: 42)
    done = subprocess.run(
        [*_command(), "agent", str(run.root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    status, outcome = read_status(run), read_outcome(run, 0, 0)
    assert status is not None
    assert status.state == "SUCCEEDED"
    assert outcome is not None
    assert Run(run).result() == [42]


def test_agent_starts_all_simulated_nodes(make_run: Any) -> None:
    """Also after such a run was preempted: nobody else would start the second one."""

    def where() -> tuple[int, str]:
        import os

        return int(os.environ["GROUP_RANK"]), os.environ["MASTER_ADDR"]

    run = make_run("20260101-000000-train-aaaaaa", state=None, function=where, world=2, nodes=2)
    Status(state="PREEMPTED", updated=time.time()).write(run)
    done = subprocess.run(
        [*_command(), "agent", str(run.root)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Run(run).result() == [(0, "127.0.0.2"), (1, "127.0.0.2")]
    again = subprocess.run(
        [*_command(), "agent", str(run.root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (again.returncode, "nothing is left to do" in again.stdout) == (0, True)


def test_resume_from_a_step_that_was_not_saved_is_bad_input(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa", state="FAILED")
    told = sgpu("resume", "aaaaaa", "--step", "7")
    assert told.exit_code == 2, told.output
    assert "step 7" in told.stderr
    assert told.stderr.count("\n") == 1


def test_resume_and_wait_for_the_end(sgpu: Any, make_run: Any) -> None:
    """Also where the run was to end with the notebook that had called it, which is gone."""
    gone = {"pid": 2**22 + 1, "started": 1}
    run = make_run(
        "20260101-000000-train-aaaaaa",
        state="CANCELLED",
        function=lambda: "done",
        launcher=gone,
        on_launcher_exit="stop",
    )
    run.attempt(0, 0).mkdir(parents=True)
    told = sgpu("resume", "aaaaaa", "--wait")
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines()[-1] == f"run {run.id}: SUCCEEDED at step 0"
    assert Run(run).result() == ["done"]
    assert run.generations() == [0, 1]


def test_demo_hands_on_its_exit_status(sgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgpu.demo.show.main", lambda: 3)
    assert sgpu("demo").exit_code == 3


def test_agent_refuses_a_folder_that_is_no_run(sgpu: Any, tmp_path: Any) -> None:
    told = sgpu("agent", tmp_path)
    assert told.exit_code == 2
    assert told.stderr == f"sgpu: no run at {tmp_path}: it has no spec.json; give the folder of a run\n"


def _command() -> list[str]:
    return [sys.executable, "-c", "from sgpu.cli import main; main()"]


def _until(holds: Any, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold in time"
        time.sleep(0.05)
