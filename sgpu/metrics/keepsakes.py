"""Small files that are kept with the MLflow run: what happened, and the end of each rank's log."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from sgpu.contract.rundir import RunDir

_LOG_TAIL_BYTES = 64 * 1024
_EVENTS_TAIL_BYTES = 4 * 2**20
_MOST_LOGS = 64


def texts(run: RunDir) -> Iterator[tuple[str, str]]:
    """Name under the run's artifacts, and text."""
    if run.events.exists():
        yield "events.jsonl", _tail(run.events, _EVENTS_TAIL_BYTES)
    for path in _logs(run)[:_MOST_LOGS]:
        yield f"logs/{path.parent.name}.txt", _tail(path, _LOG_TAIL_BYTES)


def _logs(run: RunDir) -> list[pathlib.Path]:
    """Of the last generation, by rank."""
    generations = run.generations()
    if not generations:
        return []
    folders = (run.attempts / str(generations[-1])).glob("rank*")
    ranked = sorted((int(f.name[4:]), f) for f in folders if f.name[4:].isdecimal())
    return [f / "log" for _, f in ranked if (f / "log").is_file()]


def _tail(path: pathlib.Path, most_bytes: int) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most_bytes))
        text = file.read(most_bytes).decode(errors="replace")
    return text if size <= most_bytes else f"[the last {most_bytes} of {size} bytes]\n{text}"
