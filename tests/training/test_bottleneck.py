"""The run's events say where the time goes, once for each change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgpu.training import bottleneck
from sgpu.training.bottleneck import BottleneckWatch


class Said:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __str__(self) -> str:
        return f"it is {self.kind}"


def test_each_change_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    session: Any = SimpleNamespace(rank=0, emit=lambda kind, **facts: events.append({"kind": kind, **facts}))
    now = [0.0]
    monkeypatch.setattr(bottleneck.time, "monotonic", lambda: now[0])
    kinds = iter(["unknown", "latency", "latency", "compute"])
    watch = BottleneckWatch(SimpleNamespace(report=lambda: Said(next(kinds))), session)
    for step in range(40):
        now[0] += 1.0
        watch.look(step)
    assert [(event["step"], event["bottleneck"], event["message"]) for event in events] == [
        (19, "latency", "it is latency"), (39, "compute", "it is compute"),
    ]  # fmt: skip
    other: Any = SimpleNamespace(rank=1, emit=session.emit)
    BottleneckWatch(SimpleNamespace(report=lambda: Said("latency")), other).look(1, at_once=True)
    BottleneckWatch([1, 2], session).look(1, at_once=True)
    assert len(events) == 2
