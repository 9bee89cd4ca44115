"""What happens when a moment is reached: actions of failpoints beyond those that the product has itself."""

from __future__ import annotations

import os
import pathlib
import signal
import time

from sgpu import settings
from sgpu.contract import process
from sgpu.contract.failpoint import Action, Failpoint, register
from sgpu.contract.heartbeat import Page
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from tests.faults.rig import remote
from tests.faults.rig.disk import Disk

HOUR_SECONDS = 3600.0
SLOW_SECONDS = 0.1


def install(disk: Disk) -> None:
    """In the process that all others of a cell are forked from."""

    remote.install(disk)

    def kind(name: str, *, times: int = -1, seconds: float = 0.0) -> Action:
        return Action(act=lambda *_: disk.fail(name, times=times, seconds=seconds))

    register("disk_full", kind("full"))
    register("io_once", kind("error", times=1))
    register("io_for_good", kind("error"))
    register("io_slow", kind("slow", times=20, seconds=SLOW_SECONDS))
    register("corrupt", Action(act=_flip_newest) if disk.reading else kind("flip", times=1))
    register("remote", kind("remote", times=3))
    register("clock", Action(act=lambda point, _: disk.jump(-HOUR_SECONDS if point.rank else HOUR_SECONDS)))
    register("touch", Action(act=_touch_oldest))
    register("launcher", Action(act=_kill_launcher))
    register("several", Action(act=_kill_several))


def _run() -> RunDir:
    root = settings.run_dir()
    assert root is not None, "no run is known here"
    return RunDir(root)


def _kill_launcher(_point: Failpoint, _: pathlib.Path | None) -> None:
    """The notebook's process and the supervisor, which all others end with."""
    run = _run()
    spec = read_spec(run)
    agent = process.read_process(run.agent)
    assert agent is not None
    if spec.launcher is not None:
        ProcessId(**spec.launcher).signal(signal.SIGKILL)
    agent.signal(signal.SIGKILL)
    signal.pause()  # this process goes with them


def _touch_oldest(_point: Failpoint, _: pathlib.Path | None) -> None:
    """The oldest checkpoint becomes the one that was changed last."""
    oldest = min(_run().checkpoints.glob("step-*"), key=lambda folder: int(folder.name.split("-")[1].split(".")[0]))
    later = time.time() + HOUR_SECONDS
    os.utime(oldest, (later, later))


def _flip_newest(_point: Failpoint, _: pathlib.Path | None) -> None:
    """A bit of the newest checkpoint on the volume."""
    newest = max(_run().checkpoints.glob("step-*"), key=lambda folder: int(folder.name.split("-")[1].split(".")[0]))
    shard = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _kill_several(_point: Failpoint, _: pathlib.Path | None) -> None:
    """All ranks, and the process at the moment."""
    page = Page(_run().heartbeat)
    me = os.getpid()
    for pid in [beat.pid for beat in page.beats()]:
        if pid not in (0, me):
            os.kill(pid, signal.SIGKILL)
    os.kill(me, signal.SIGKILL)
