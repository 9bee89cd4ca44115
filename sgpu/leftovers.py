"""What a run whose supervisor was killed may leave: processes, shared memory, parts of files. Found and removed."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator

from sgpu.contract import process
from sgpu.contract.rundir import RunDir, all_runs, runs_folder

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_PREFIX = "sgpu-"


def remove(home: pathlib.Path) -> list[str]:
    """Ends processes of runs in `home` whose supervisor is gone; removes their shared memory and parts of files."""
    told = _end_agents(home)
    for pid, root in _workers(runs_folder(home)).items():
        agent = process.read_process(RunDir(root).agent)
        if agent is not None and agent.alive():
            continue
        found = process.process_of(pid)
        if found is not None and found.signal(signal.SIGKILL):
            told.append(f"process {pid} of run {root.name}, whose supervisor is gone: ended")
    told.extend(_remove_segments())
    told.extend(_remove_parts(home))
    return told


def _remove_parts(home: pathlib.Path) -> list[str]:
    """Files that a process was writing when it was killed; of a run that nobody works on, they are nobody's."""
    told = []
    for run in all_runs(home):
        agent = process.read_process(run.agent)
        if agent is not None and agent.alive():
            continue
        for part in sorted(run.root.rglob(".*.tmp")):
            part.unlink(missing_ok=True)
            told.append(f"{part}, which was being written when its process was killed: removed")
    return told


def _end_agents(home: pathlib.Path) -> list[str]:
    """Agents of nodes whose controller is gone: they end by themselves, unless they stand still."""
    told = []
    for run in all_runs(home):
        controller = process.read_process(run.agent)
        if controller is not None and controller.alive():
            continue
        for node in run.other_nodes():
            agent = process.read_process(run.node(node).agent)
            if agent is not None and agent.signal(signal.SIGKILL):
                told.append(f"the agent of node {node} of run {run.id}, whose controller is gone: ended")
    return told


def end_node(run: RunDir, node: int) -> None:
    """Ends what is left of a node of a run: its agent, with which its workers end, and what they had started."""
    agent = process.read_process(run.node(node).agent)
    if agent is not None:
        agent.signal(signal.SIGKILL)
    for pid, variables in _environments():
        if variables.get("SGPU_RUN_DIR") == str(run.root) and variables.get("GROUP_RANK") == str(node):
            found = process.process_of(pid)
            if found is not None:
                found.signal(signal.SIGKILL)


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Of the other processes of this user, as they were started."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            content = pathlib.Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue  # another user's, or gone
        pairs = (os.fsdecode(variable).partition("=") for variable in content.split(b"\0"))
        yield int(name), {key: value for key, _, value in pairs}


def _workers(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Processes of this user that carry the run folder in their environment."""
    found = {}
    for pid, variables in _environments():
        root = pathlib.Path(variables.get("SGPU_RUN_DIR", ""))
        if root.parent == folder:
            found[pid] = root
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
