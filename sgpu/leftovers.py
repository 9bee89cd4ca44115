"""What a run whose supervisor was killed may leave: processes, shared memory. Found and removed."""

from __future__ import annotations

import os
import pathlib
import signal

from sgpu.contract import process
from sgpu.contract.rundir import RunDir, runs_folder

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_PREFIX = "sgpu-"


def remove(home: pathlib.Path) -> list[str]:
    """Ends processes of runs in `home` whose supervisor is gone, and removes their shared memory."""
    told: list[str] = []
    for pid, root in _workers(runs_folder(home)).items():
        agent = process.read_process(RunDir(root).agent)
        if agent is not None and agent.alive():
            continue
        found = process.process_of(pid)
        if found is not None and found.signal(signal.SIGKILL):
            told.append(f"process {pid} of run {root.name}, whose supervisor is gone: ended")
    told.extend(_remove_segments())
    return told


def _workers(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Processes of this user that carry the run folder in their environment."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            variables = pathlib.Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # another user's, or gone
        for variable in variables:
            if variable.startswith(b"SGPU_RUN_DIR="):
                root = pathlib.Path(os.fsdecode(variable.partition(b"=")[2]))
                if root.parent == folder:
                    found[int(name)] = root
    return found


def _remove_segments() -> list[str]:
    """Shared memory named sgpu-<pid>-<start>-... whose process is gone."""
    told: list[str] = []
    if not _SHARED_MEMORY.is_dir():
        return told
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        parts = path.name[len(_PREFIX) :].split("-")
        if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            continue
        if process.ProcessId(pid=int(parts[0]), started=int(parts[1])).alive():
            continue
        size_bytes = path.stat().st_size
        path.unlink()
        told.append(f"shared memory {path} ({size_bytes} bytes) of a process that is gone: removed")
    return told
