"""The zygote's host with real processes: starts, signals, ends, strays, losses. One zygote serves most of it."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgpu.agent.hosting.zygote_host import ZygoteHost
from sgpu.agent.workers import Exit, WorkerHost, ZygoteLostError
from sgpu.contract import payload, process
from sgpu.contract.heartbeat import Page
from sgpu.contract.outcome import read_outcome
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    RunSpec(
        id="run", name="train", created=time.time(), backend="local", world_size=2, gpus_per_node=2, accelerator="cpu",
        seed=1, tracking=Tracking(uri="", experiment=""), python=sys.executable, working_dir=str(tmp_path),
        sys_path=tuple(sys.path),
    ).write(run)  # fmt: skip
    Page.create(run.heartbeat, 2).close()
    return run


@pytest.fixture
def host(run: RunDir) -> Iterator[ZygoteHost]:
    others = process.descendants(os.getpid())
    host = ZygoteHost(
        python=sys.executable, run=run.root, environment={**os.environ, "OMP_NUM_THREADS": "1"}, log=run.agent_log,
        spared=lambda: others,
    )  # fmt: skip
    host.open()
    yield host
    host.close()
    # This process became a subreaper for its strays; they are gone, and the rest of the session is as before.
    process._prctl(36, 0)


def _will_call(run: RunDir, function: Callable[..., Any], *args: Any) -> None:
    run.payload.write_bytes(payload.pack(function, args, {}, limit_bytes=10**7))


def _start(host: WorkerHost, run: RunDir, *ranks: int, generation: int = 0) -> None:
    for rank in ranks:
        run.attempt(generation, rank).mkdir(parents=True, exist_ok=True)
        host.start(
            f"r{rank}.g{generation}", rank=rank, generation=generation,
            environment={"RANK": str(rank), "WORLD_SIZE": "2", "SGPU_RUN_DIR": str(run.root)},
            log=run.log(generation, rank),
        )  # fmt: skip


def _exits(host: WorkerHost, count: int, seconds: float = 60.0) -> list[Exit]:
    found: list[Exit] = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found} ended"
        found += host.wait(0.1)
    return found


def test_what_a_zygote_does(host: ZygoteHost, run: RunDir, tmp_path: pathlib.Path) -> None:
    port = host.open_store("store0")
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass

    def here(folder: str) -> int:
        import os
        import pathlib
        import subprocess
        import sys
        import time

        rank = int(os.environ["RANK"])
        print("rank", rank, "on stdout", flush=True)
        print("rank", rank, "on stderr", file=sys.stderr)
        if rank == 1:
            in_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
            stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], start_new_session=True)
            text = f"{os.getpid()} {in_group.pid} {stray.pid}"
            (pathlib.Path(folder) / "pids.tmp").write_text(text)
            os.rename(os.path.join(folder, "pids.tmp"), os.path.join(folder, "pids"))
            time.sleep(10_000)
        return 7

    _will_call(run, here, str(tmp_path))
    _start(host, run, 0, 1)
    assert _exits(host, 1) == [Exit(name="r0.g0", status=0)]
    outcome = read_outcome(run, 0, 0)
    assert outcome is not None
    assert outcome.kind == "result"
    log = run.log(0, 0).read_text()
    assert "rank 0 on stdout" in log
    assert "rank 0 on stderr" in log
    assert "rank 1" not in log

    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        host.wait(0.05)
    worker, in_group, stray = [process.process_of(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert worker is not None
    assert in_group is not None
    assert stray is not None
    host.signal("r1.g0", signal.SIGSTOP)
    while not host.stopped("r1.g0"):
        assert time.monotonic() < deadline
    assert process.state_of(in_group.pid) in ("S", "R"), "a signal is for the worker alone"
    assert not host.stopped("nobody")
    host.signal("nobody", signal.SIGKILL)

    began = time.monotonic()
    host.stop_all(40.0)
    assert time.monotonic() - began < 30
    assert not any(each.alive() for each in (worker, in_group, stray))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    assert host.wait(0.0) == []

    # The same zygote starts the next generation, and tells how each ended.
    def leaves() -> None:
        import os
        import sys

        if os.environ["RANK"] == "0":
            sys.exit(5)
        os.kill(os.getpid(), 9)

    _will_call(run, leaves)
    _start(host, run, 0, 1, generation=1)
    ended = {each.name: each.status for each in _exits(host, 2)}
    assert os.WEXITSTATUS(ended["r0.g1"]) == 1  # the outcome tells the rest
    assert os.WTERMSIG(ended["r1.g1"]) == signal.SIGKILL
    exited = read_outcome(run, 1, 0)
    assert exited is not None
    assert (exited.kind, exited.exception_type, exited.message) == ("exit", "SystemExit", "5")
    assert read_outcome(run, 1, 1) is None

    # Killed, it is reported lost; workers go with it; reopened, it works again.
    def sleeps() -> None:
        import time

        time.sleep(10_000)

    _will_call(run, sleeps)
    _start(host, run, 0, generation=2)
    while not run.log(2, 0).exists():
        host.wait(0.05)
    zygote = host._zygote
    assert zygote is not None
    children = [process.process_of(pid) for pid in process.descendants(zygote.pid)]
    assert children
    zygote.kill()
    with pytest.raises(ZygoteLostError, match="the process that starts workers ended"):
        _exits(host, 1)
    for child in children:
        while child is not None and child.alive():
            assert time.monotonic() < deadline, "a worker outlived its zygote"
    host.stop_all(1.0)
    host.reopen()
    assert host.open_store("store3") > 0


def test_a_zygote_that_cannot_start_tells_why(run: RunDir, tmp_path: pathlib.Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    others = process.descendants(os.getpid())
    host = ZygoteHost(
        python=sys.executable, run=run.root, environment={**os.environ, "PYTHONPATH": str(tmp_path)},
        log=run.agent_log, spared=lambda: others,
    )  # fmt: skip
    host.open()
    try:
        with pytest.raises(ZygoteLostError, match=r"ended \(exit status 1\) with .*libcudart\.so\.12: cannot open"):
            host.open_store("store0")
    finally:
        host.close()
        process._prctl(36, 0)
