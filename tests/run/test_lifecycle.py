"""Runs outlive their notebook, end when they are told to, and leave nothing."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import sgpu
from sgpu import RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.contract.errors import AgentLostError, InputError, RunCancelledError, RunError
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.launch.local import Local

pytestmark = pytest.mark.slow

Until = Callable[..., Any]
Members = Callable[[Run], list[int]]

_KERNEL = """
import sys, time
from sgpu import distributed

@distributed(gpus=2)
def waits(folder):
    import pathlib, time, sgpu
    rank = sgpu.runtime.rank()
    (pathlib.Path(folder) / f"started{rank}").touch()
    while not (pathlib.Path(folder) / "go").exists():
        time.sleep(0.02)
    return rank * 10

"""


def _both_started(folder: pathlib.Path) -> bool:
    return (folder / "started0").exists() and (folder / "started1").exists()


def test_a_run_survives_its_kernel_and_is_attached_to(
    script: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, until: Until, left: Members
) -> None:
    kernel = script(
        _KERNEL + "print(waits.submit(sys.argv[1]).id, flush=True)\ntime.sleep(600)\n", str(tmp_path),
        SGPU_ON_KERNEL_EXIT="leave",
    )  # fmt: skip
    assert kernel.stdout is not None
    run_id = [kernel.stdout.readline(), kernel.stdout.readline()][1].strip()
    until(lambda: _both_started(tmp_path), "both ranks started")
    kernel.kill()
    assert kernel.wait(10) == -signal.SIGKILL
    run = sgpu.attach(run_id)
    assert run.state == "RUNNING"
    with pytest.raises(InputError, match="is RUNNING; there is nothing to resume"):
        run.resume()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s .*it goes on"):
        run.result(0.1)
    (tmp_path / "go").touch()
    assert run.result(60) == [0, 10]
    assert left(run) == []


def test_the_kernel_takes_the_run_with_it_where_that_is_asked_for(
    script: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, until: Until, left: Members
) -> None:
    kernel = script(
        _KERNEL + "print(waits.submit(sys.argv[1]).id, flush=True)\ntime.sleep(600)\n", str(tmp_path),
        SGPU_ON_KERNEL_EXIT="stop",
    )  # fmt: skip
    assert kernel.stdout is not None
    run_id = [kernel.stdout.readline(), kernel.stdout.readline()][1].strip()
    until(lambda: _both_started(tmp_path), "both ranks started")
    kernel.kill()
    kernel.wait(10)
    run = sgpu.attach(run_id)
    assert run.wait(60) == "CANCELLED"
    assert left(run) == []


_INTERRUPTED = (
    _KERNEL
    + """
import pathlib
try:
    waits.distributed(sys.argv[1])
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
pathlib.Path(sys.argv[1], "go").touch()
print("SECOND", waits.distributed(sys.argv[1]), flush=True)
"""
)


def _eventually(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_an_interrupt_ends_the_blocking_call_and_the_run(
    script: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, home: pathlib.Path, until: Until,
    left: Members,
) -> None:  # fmt: skip
    kernel = script(_INTERRUPTED, str(tmp_path))
    until(lambda: _both_started(tmp_path), "both ranks started")
    kernel.send_signal(signal.SIGINT)
    sent = time.time()
    if not _eventually(lambda: [*home.glob("runs/*/cancel")], seconds=10):
        # Python drops one that strikes while it collects garbage or calls back from a weak reference: press again.
        kernel.send_signal(signal.SIGINT)
        sent = time.time()
    output, _ = kernel.communicate(timeout=100)
    assert "INTERRUPTED" in output
    assert "SECOND [0, 10]" in output
    second, first = sgpu.runs()
    assert (first.state, second.state) == ("CANCELLED", "SUCCEEDED")
    assert first.events()[-1]["time"] - sent < 30
    assert second.spec.created - sent < 40
    assert left(first) == left(second) == []


def test_a_cancel_reaches_ranks_that_sleep_spin_or_stand_still(
    script: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path, until: Until, left: Members
) -> None:
    """From another process than the one that started the run."""

    @distributed(gpus=3)
    def stuck(folder: str) -> None:
        import os
        import pathlib
        import signal
        import time

        import sgpu

        rank = sgpu.runtime.rank()
        (pathlib.Path(folder) / f"started{rank}").write_text(str(os.getpid()))
        if rank == 0:
            time.sleep(10_000)
        elif rank == 1:
            while True:
                pass
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    run = stuck.submit(str(tmp_path))
    until(lambda: all((tmp_path / f"started{rank}").exists() for rank in range(3)), "all ranks started")
    pid = int((tmp_path / "started2").read_text())
    until(lambda: pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "rank 2 stopped")
    asked = time.time()
    done = script(f"import sgpu\nrun = sgpu.attach({run.id!r})\nrun.cancel()\nprint(run.state, flush=True)\n")
    output, _ = done.communicate(timeout=60)
    assert "CANCELLED" in output
    assert run.state == "CANCELLED"
    assert run.events()[-1]["time"] - asked < 10
    with pytest.raises(RunCancelledError, match="was cancelled after step 0"):
        run.result(10)
    assert left(run) == []


def test_a_run_has_its_own_time_limit(left: Members) -> None:
    @distributed(gpus=1, timeout_seconds=1)
    def sleeps() -> None:
        import time

        time.sleep(10_000)

    run = sleeps.submit()
    with pytest.raises(RunError, match="the run did not end within timeout_seconds=1"):
        run.result(60)
    assert run.state == "FAILED"
    assert left(run) == []


def test_strays_end_with_their_run(tmp_path: pathlib.Path, until: Until, left: Members) -> None:
    """Rank 0 leaves a daemon in a session of its own, without the run's environment; it ends with the run too."""

    @distributed(gpus=1)
    def sleeps(folder: str) -> None:
        import os
        import pathlib
        import subprocess
        import sys
        import time

        import sgpu

        if sgpu.runtime.rank() == 0:
            code = (
                "import os, pathlib, sys, time\n"
                "if os.fork(): os._exit(0)\n"
                "os.setsid()\n"
                "if os.fork(): os._exit(0)\n"
                "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
                "time.sleep(10_000)\n"
            )
            subprocess.run([sys.executable, "-c", code, os.path.join(folder, "stray.tmp")], env={}, check=True)
            made = pathlib.Path(folder, "stray.tmp")
            while not made.exists() or not made.read_text():
                time.sleep(0.01)
            os.rename(os.path.join(folder, "stray.tmp"), os.path.join(folder, "stray"))
        time.sleep(10_000)

    run = sleeps.submit(str(tmp_path))
    until((tmp_path / "stray").exists, "the stray is there")
    stray = process.process_of(int((tmp_path / "stray").read_text()))
    assert stray is not None, "the fault did not fire"
    assert stray.alive()
    assert pathlib.Path(f"/proc/{stray.pid}/environ").read_bytes().find(b"SGPU_RUN_DIR") < 0
    run.cancel()
    assert not stray.alive()
    assert run.state == "CANCELLED"
    assert left(run) == []


def test_the_supervisor_killed_is_a_lost_run_that_can_be_resumed(
    tmp_path: pathlib.Path, until: Until, members: Members, left: Members
) -> None:
    @distributed(gpus=2)
    def waits(folder: str) -> int:
        import pathlib
        import subprocess
        import sys
        import time

        import sgpu
        from sgpu import settings

        here = pathlib.Path(folder)
        rank = sgpu.runtime.rank()
        if settings.generation() == 0 and rank == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], start_new_session=True)
            (here / "stray").write_text(str(child.pid))
        (here / f"started{rank}").touch()
        while not (here / "go").exists():
            time.sleep(0.02)
        return rank + 100 * settings.generation()

    run = waits.submit(str(tmp_path))
    until(lambda: _both_started(tmp_path), "both ranks started")
    stray = process.process_of(int((tmp_path / "stray").read_text()))
    assert stray is not None
    agent = process.read_process(pathlib.Path(run.path) / "agent.json")
    assert agent is not None
    assert agent.signal(signal.SIGKILL), "the fault did not fire"
    until(lambda: run.state == "LOST", "the run is lost", seconds=10)
    with pytest.raises(AgentLostError, match=r"the supervisor of run .* vanished .*run\.resume\(\)"):
        run.result(10)
    until(lambda: set(members(run)) == {stray.pid}, "the workers ended with their supervisor", seconds=10)
    told = sgpu.cleanup()
    assert [line for line in told if f"process {stray.pid} of run {run.id}" in line]
    until(lambda: not stray.alive(), "the stray is gone", seconds=10)
    assert sgpu.cleanup() == []
    (tmp_path / "go").touch()
    run.resume()
    assert run.state in ("STARTING", "RUNNING")
    assert run.result(90) == [100, 101]
    assert [event["kind"] for event in run.events()].count("run_started") == 2
    assert left(run) == []


@pytest.mark.parametrize("helper", ["zygote", "store"])
def test_a_helper_process_killed_is_survived(helper: str, tmp_path: pathlib.Path, until: Until, left: Members) -> None:
    @distributed(gpus=2, restarts=RestartPolicy(backoff_seconds=0.1))
    def waits(folder: str) -> int:
        import pathlib
        import time

        import torch
        import torch.distributed as dist

        import sgpu
        from sgpu import settings

        sgpu.runtime.init()
        here = pathlib.Path(folder)
        (here / f"started{sgpu.runtime.rank()}").touch()
        while settings.generation() == 0:
            time.sleep(0.02)
        total = torch.tensor([sgpu.runtime.rank() + 1])
        dist.all_reduce(total)
        return int(total)

    run = waits.submit(str(tmp_path))
    until(lambda: _both_started(tmp_path), "both ranks started")
    agent = process.read_process(pathlib.Path(run.path) / "agent.json")
    assert agent is not None
    zygote = _zygote_of(agent.pid)
    victim = zygote if helper == "zygote" else _store_of(zygote)
    os.kill(victim, signal.SIGKILL)
    assert run.result(100) == [3, 3]
    assert run.status.restarts == 1
    failure = next(event for event in run.events() if event["kind"] == "failure")
    assert failure["rank"] is None
    assert ("store ended" if helper == "store" else "process that starts workers ended") in failure["message"]
    assert left(run) == []


def _zygote_of(agent: int) -> int:
    for pid in process.descendants(agent):
        if (
            b"sgpu.worker.zygote" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            and process.parent_of(pid) == agent
        ):
            return pid
    raise AssertionError("the agent has no zygote")


def _store_of(zygote: int) -> int:
    """The child of the zygote that is no worker: it was forked first."""
    return min(pid for pid in process.descendants(zygote) if process.parent_of(pid) == zygote)


def test_an_interrupt_in_the_middle_of_a_start_leaves_nothing(left: Members) -> None:
    class Interrupted(Local):
        def start(self, spec: RunSpec, run: RunDir) -> None:
            super().start(spec, run)
            raise KeyboardInterrupt

    @distributed(gpus=2, on=Interrupted())
    def sleeps() -> None:
        import time

        time.sleep(10_000)

    with pytest.raises(KeyboardInterrupt):
        sleeps.submit()
    (run,) = sgpu.runs()
    assert run.wait(60) == "CANCELLED"
    assert left(run) == []
    assert "generation_started" not in [event["kind"] for event in run.events()], "no worker was started for it"


def test_import_is_light() -> None:
    """`import sgpu` and decorating load nothing heavy."""
    code = (
        "import sys, sgpu\n"
        "sgpu.distributed(gpus=2)(lambda: 1)\n"
        "print(sorted({'torch', 'mlflow', 'IPython', 'ipywidgets', 'anywidget', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
