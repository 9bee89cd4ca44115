"""What the kernel tells of a process that no longer tells anything itself."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

_FIELD = re.compile(r"^(\w+): (.*)$", re.MULTILINE)
_BUSY_SHARE = 0.2  # of a core: it may have to share it
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
    """

    state: str
    place: str = ""
    busy_share: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it works: it runs or waits for a core, or has used one."""
        return self.state == "R" or (self.busy_share or 0.0) > _BUSY_SHARE


def look(pid: int) -> str | None:
    """How the process stands now, a `name: value` a line; None where it is gone."""
    folder = pathlib.Path(f"/proc/{pid}")
    stat = _read(folder / "stat").rpartition(")")[2].split()
    if not stat:
        return None
    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    place = _read(folder / "wchan").strip("0\n")
    lines = [
        f"time: {time.monotonic():.3f}", f"state: {stat[0]} ({_NAMES.get(stat[0], 'of another kind')})",
        f"cpu_seconds: {cpu:.2f}", f"place: {place}",
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
    seconds, busy = times[-1] - times[0], float(looks[-1]["cpu_seconds"]) - float(looks[0]["cpu_seconds"])
    return KernelView(
        state=looks[-1]["state"][:1], place=looks[-1].get("place", ""),
        busy_share=busy / seconds if seconds > 0 else None,
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


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
