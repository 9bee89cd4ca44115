"""A process that the kernel killed for want of memory: for real where control groups can be made, else from records."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sgpu.agent.hosting.oom import AnyOf, CgroupCounter, KernelLog

_MEMORY = pathlib.Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[pathlib.Path]:
    """A control group with little memory."""
    folder = _MEMORY / f"sgpu-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text("80000000")
    except OSError:
        if folder.exists():
            folder.rmdir()
        pytest.skip("needs a control group of version 1, which cannot be made here")
    yield folder
    folder.rmdir()


def _eats_memory(group: pathlib.Path) -> int:
    """A process in the group asks for more than there is; its number, once it is gone."""
    program = (
        "import pathlib, os, sys\n"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "b'x' * 300_000_000\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(group)])
    assert child.wait(60) == -signal.SIGKILL, "the fault did not fire"
    return child.pid


def test_the_groups_counter_and_the_kernels_log_tell_it(group: pathlib.Path, tmp_path: pathlib.Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text(f"7:cpu:/\n4:memory:/{group.name}\n0::/\n")
    counter, log = CgroupCounter(membership=membership), KernelLog()
    assert not counter.killed(1)
    pid = _eats_memory(group)
    assert counter.killed(pid)
    assert not counter.killed(pid), "once"
    if log._descriptor >= 0:
        deadline = time.monotonic() + 10
        while not log.killed(pid):
            assert time.monotonic() < deadline, "the kernel's log does not tell it"
        assert not log.killed(os.getpid())


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/user.slice/job\n", "user.slice/job/memory.events"),  # version 2
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),  # version 1
        ("5:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("1:name=systemd:/\n0::/job\n", "unified/job/memory.events"),  # both, mounted side by side
        ("0::/docker/abc\n", "memory.events"),  # in a container: the group's folder is the root
        ("4:memory:/docker/abc\n", "memory/memory.oom_control"),
    ],
)
def test_where_the_counter_is(membership: str, file: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "self").write_text(membership)
    path = tmp_path / "mounts" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\n")
    counter = CgroupCounter(tmp_path / "mounts", tmp_path / "self")
    assert not counter.killed(5)
    path.write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert counter.killed(5)
    assert not counter.killed(6)


def test_without_control_groups_and_logs_nothing_is_claimed(tmp_path: pathlib.Path) -> None:
    sources = CgroupCounter(tmp_path, tmp_path / "none"), KernelLog(tmp_path / "none")
    assert not AnyOf(*sources).killed(os.getpid())


def test_records_of_the_kernel(tmp_path: pathlib.Path) -> None:
    """As Linux 4 to 6 write them."""
    log_file = tmp_path / "kmsg"
    log_file.write_bytes(b"6,1,0,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=11,uid=0\n")
    log = KernelLog(log_file)
    assert not log.killed(11), "what was before is not told"
    with log_file.open("ab") as file:
        file.write(b"6,2,9,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=4242,uid=0\n")
        file.write(b"3,3,9,-;Out of memory: Killed process 99 (python) total-vm:1kB, anon-rss:1kB\n")
    assert log.killed(4242)
    assert log.killed(99)
    assert not log.killed(42)
