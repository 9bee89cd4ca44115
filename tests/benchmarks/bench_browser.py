"""Checkpoint browser and planner: what a person waits for.

Wall time, and the CPU time of this process, which a busy machine does not change much. Goals: a thousand checkpoints,
and a checkpoint of 100,000 tensors, open in under a second each; a slider answers within a frame or two (33 ms).
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from sgpu.widgets.checkpoints.desk import Desk
from sgpu.widgets.checkpoints.place import find_place
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.planning.model import PlannerState
from sgpu.widgets.planning.planner import GoodputPlanner
from sgpu.widgets.planning.widget import message
from tests.benchmarks.table import show

_SHELVES = pathlib.Path(__file__).parent.parent / "widgets" / "shelves.py"
_IN_SIGHT = 20
Moment = tuple[float, float]


def _now() -> Moment:
    return time.perf_counter(), time.process_time()


def _since(began: Moment) -> Moment:
    wall, cpu = _now()
    return wall - began[0], cpu - began[1]


class _Queue:
    """Errands that are done when one says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def do(self, errand: Callable[[], None]) -> None:
        self.waiting.append(errand)

    def close(self) -> None:
        self.waiting.clear()

    def work_until(self, done: Callable[[], bool]) -> None:
        while self.waiting and not done():
            self.waiting.pop(0)()


class _Visit:
    """One person who opens a root. Seconds are since the constructor was called; messages are made JSON as for real."""

    def __init__(self, root: pathlib.Path) -> None:
        self.began = _now()
        self.at: dict[str, Moment] = {}
        self.checked: set[int] = set()
        self.queue = _Queue()
        shelf = Shelf(find_place(root))
        shelf.refresh()
        self.desk = Desk(shelf, self._take, quick=self.queue, slow=_Queue())

    def _take(self, told: dict[str, Any]) -> None:
        json.dumps(told)
        now = _since(self.began)
        self.at.setdefault(told["kind"], now)
        for row in told.get("rows", []):
            if row[1] != "unchecked":
                self.checked.add(row[0])
        if len(self.checked) >= _IN_SIGHT:
            self.at.setdefault("in sight", now)
        if told["kind"] == "detail" and not told["reading"]:
            self.at["shapes"] = now


def _many(root: pathlib.Path, count: int) -> dict[str, Moment]:
    visit = _Visit(root)
    visit.desk.start()
    visit.desk.hear({"kind": "hello"})
    visit.queue.work_until(lambda: False)
    if len(visit.checked) != count:
        raise RuntimeError(f"{len(visit.checked)} of {count} checkpoints were looked at")
    return {
        f"table of {count} checkpoints": visit.at["table"],
        "the first rows looked at": visit.at["in sight"],
        "all of them looked at": _since(visit.began),
    }


def _wide(root: pathlib.Path, count: int) -> dict[str, Moment]:
    visit = _Visit(root)
    visit.desk.hear({"kind": "hello"})
    visit.desk.hear({"kind": "choose", "step": 100})
    visit.queue.work_until(lambda: "shapes" in visit.at)
    return {f"tree of {count} tensors": visit.at["lines"], "with shapes, checked": visit.at["shapes"]}


def _slider() -> dict[str, Moment]:
    planner = GoodputPlanner(PlannerState())
    planner.past  # noqa: B018 - the past is read once, before the first slider moves
    began = _now()
    planner.set({"gpus": 2048})
    json.dumps(message(planner))
    return {"planner: a slider's answer": _since(began)}


def run(quick: bool) -> list[dict[str, Any]]:
    """One row a thing that is waited for, in seconds."""
    many, wide, rounds = (100, 10_000, 2) if quick else (1000, 100_000, 5)
    found: dict[str, list[Moment]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, amount in (("many", many), ("wide", wide)):
            place = str(pathlib.Path(folder, kind))
            subprocess.run([sys.executable, str(_SHELVES), kind, place, str(amount)], check=True)
        for _ in range(rounds):
            rows = {
                **_many(pathlib.Path(folder, "many"), many),
                **_wide(pathlib.Path(folder, "wide"), wide),
                **_slider(),
            }
            for name, value in rows.items():
                found.setdefault(name, []).append(value)
    return [
        {
            "what": name,
            "median": statistics.median(wall for wall, _ in moments),
            "min": min(wall for wall, _ in moments),
            "max": max(wall for wall, _ in moments),
            "cpu median": statistics.median(cpu for _, cpu in moments),
        }
        for name, moments in found.items()
    ]


if __name__ == "__main__":
    show(run(quick=False))
