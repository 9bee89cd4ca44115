"""What the kernel tells of a process that no longer tells anything itself."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sgpu.contract.process import LISTENER

_FIELD = re.compile(r"^(\w+): (.*)$", re.MULTILINE)
_BUSY_SHARE = 0.2  # of a core: it may have to share it
_WORKED_SECONDS = 0.1  # of a core: with less, a thread may not have come to what it is asked for
_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "waits in the kernel, without answering signals",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True, kw_only=True)
class KernelView:
    """What is known of one process.

    Attributes:
        state: the kernel's letter: R, S, D, T, ...
        place: where in the kernel it waits; "": nowhere, or that is not told.
        busy_share: of a core, between the first and the last look; None: there was but one.
        cpu_seconds: that it used in between.
        runs: at the last look, a thread of it, other than the one that hears the agent, ran or waited for a core.
        turns: how often that one had its turn in between: each 5 ms where it waits for the interpreter's lock, once
            where it hears. None: there is no such thread, or the kernel does not count.
        main_turns: the same of the main thread.
    """

    state: str
    place: str = ""
    busy_share: float | None = None
    cpu_seconds: float = 0.0
    runs: bool = False
    turns: int | None = None
    main_turns: int = 0

    @property
    def busy(self) -> bool:
        """Whether it works: it runs or waits for a core, or has used one."""
        return self.state == "R" or (self.busy_share or 0.0) > _BUSY_SHARE

    @property
    def starved(self) -> bool:
        """Whether it waits for a core and has hardly had one: that it does not answer tells nothing."""
        return self.runs and self.cpu_seconds < _WORKED_SECONDS


def look(pid: int) -> str | None:
    """How the process stands now, a `name: value` a line; None where it is gone."""
    folder = pathlib.Path(f"/proc/{pid}")
    stat = _read(folder / "stat").rpartition(")")[2].split()
    if not stat:
        return None
    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    place = _read(folder / "wchan").strip("0\n")
    threads = list(_threads(folder))
    heard = [f"turns_of_listener: {one.turns}" for one in threads if one.name == LISTENER and one.turns is not None]
    lines = [
        f"time: {time.monotonic():.3f}", f"state: {stat[0]} ({_NAMES.get(stat[0], 'of another kind')})",
        f"cpu_seconds: {cpu:.2f}", f"place: {place}", *heard[:1],
        f"turns_of_main: {next((one.turns for one in threads if one.number == pid), None) or 0}",
        f"running_threads: {sum(one.state == 'R' and one.name != LISTENER for one in threads)}",
    ]  # fmt: skip
    kernel = _read(folder / "stack").strip()
    return "\n".join([*lines, *(["in the kernel:", kernel] if kernel else []), ""])


def parse(text: str) -> KernelView | None:
    """From one or several looks, one after the other; None where there is none."""
    looks = [dict(_FIELD.findall(part)) for part in text.split("time: ")[1:]]
    times = [float(part.split("\n", 1)[0]) for part in text.split("time: ")[1:]]
    looks = [one for one in looks if "state" in one]
    if not looks:
        return None
    first, last = looks[0], looks[-1]
    seconds, cpu = times[-1] - times[0], float(last["cpu_seconds"]) - float(first["cpu_seconds"])

    def more(name: str) -> int:
        return int(last.get(name, 0)) - int(first.get(name, 0))

    return KernelView(
        state=last["state"][:1], place=last.get("place", ""), busy_share=cpu / seconds if seconds > 0 else None,
        cpu_seconds=cpu, runs=last.get("running_threads", "0") != "0", main_turns=more("turns_of_main"),
        turns=more("turns_of_listener") if "turns_of_listener" in last else None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Thread:
    """`turns`: how often it gave its core back because it had to wait; None: the kernel does not count."""

    number: int
    name: str
    state: str
    turns: int | None


def _threads(folder: pathlib.Path) -> Iterator[_Thread]:
    for number in _listed(folder / "task"):
        fields = dict(line.split(":\t", 1) for line in _read(folder / "task" / number / "status").splitlines())
        if "State" in fields:
            turns = fields.get("voluntary_ctxt_switches")
            yield _Thread(
                number=int(number), name=fields["Name"], state=fields["State"][:1],
                turns=int(turns) if turns is not None else None,
            )  # fmt: skip


def examine(pid: int, into: pathlib.Path) -> subprocess.Popen[bytes] | None:
    """Adds a look to `into`. Of one that cannot write its Python stack, py-spy adds it, where it is installed.

    Returns:
        The process that is still writing, if there is one.
    """
    seen = look(pid)
    if seen is None:
        return None
    with into.open("ab") as file:
        first = file.tell() == 0
        file.write(seen.encode())
        file.flush()
        spy = _py_spy() if first and re.search(r"^state: [TtD]", seen, re.MULTILINE) else None
        if spy is None:
            return None
        return subprocess.Popen(
            [spy, "dump", "--nonblocking", "--pid", str(pid)], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def _py_spy() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(pathlib.Path(sys.executable).parent))


def _listed(folder: pathlib.Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
