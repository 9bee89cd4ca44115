"""Fault plans: what they ask for, and what is refused before anything runs."""

from __future__ import annotations

import pathlib
import re
from typing import Any, get_args

import pytest

import sgpu
from sgpu import distributed
from sgpu.contract import failpoint
from sgpu.contract.errors import InputError
from sgpu.testing import Fault, FaultPlan
from sgpu.testing.drill import recoveries
from sgpu.testing.plan import POINTS, FaultKind

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("fault", "setting"),
    [
        (Fault("kill", rank=1, step=7), "training.step@1%7!=kill"),
        (Fault("raise", step=3, error="KeyError"), "training.step%3!=raise:KeyError"),
        (Fault("exit", rank=0, code=0), "training.step@0!=exit:0"),
        (Fault("slow", rank=2, seconds=0.25, every_time=True), "training.step@2=sleep:0.250000"),
        (Fault("held GIL", step=2), "training.step%2!=hold"),
        (Fault("disk full", step=20), "checkpoint.write%20!=errno:ENOSPC"),
        (Fault("corrupt", rank=1), "checkpoint.shard_written@1!=flip"),
        (Fault("kill", rank=0, step=6, at="checkpoint.metadata"), "checkpoint.metadata@0%6!=kill"),
        (Fault("stop", rank=0, at="checkpoint.restore"), "checkpoint.restore@0!=stop"),
    ],
)
def test_a_fault_is_a_fail_point(fault: Fault, setting: str) -> None:
    assert fault.setting == setting
    assert len(failpoint.parse(FaultPlan(fault, fault).setting)) == 2


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_every_kind_can_be_planned(kind: Any) -> None:
    (point,) = failpoint.parse(Fault(kind).setting)
    assert point.once
    assert str(Fault(kind, rank=3, step=2)).startswith(f"{kind}: rank 3 in step 2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "explode"}, "expected one of"),
        ({"kind": "kill", "rank": -1}, r"rank=\.\.\.\): expected a whole number, 0 or more; found -1"),
        ({"kind": "kill", "rank": True}, "found True"),
        ({"kind": "kill", "step": 0}, "1 or more; found 0"),
        ({"kind": "kill", "at": "no point"}, "the name of a point"),
        ({"kind": "kill", "at": "training.stp"}, r"one of \[.*'training.step'.*\]; found 'training.stp'"),
        ({"kind": "kill", "step": 3, "at": "checkpoint.restore"}, "knows no step, so that it would never strike"),
        ({"kind": "kill", "rank": 0, "at": "data.copy"}, "knows no rank"),
        ({"kind": "slow", "seconds": float("nan")}, "seconds, 0 or more"),
        ({"kind": "raise", "error": "NoSuchError"}, "built-in exception.*found 'NoSuchError'"),
        ({"kind": "raise", "error": ValueError}, "built-in exception"),
        ({"kind": "exit", "code": -1}, "code"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Fault(**arguments)


@pytest.mark.parametrize("faults", [(), ("kill",), (None,)])
def test_a_plan_is_of_faults(faults: Any) -> None:
    with pytest.raises(InputError, match="FaultPlan: expected faults"):
        FaultPlan(*faults)


def test_a_drill_that_cannot_strike_is_refused_before_it_starts() -> None:
    train = distributed(gpus=2)(lambda steps: steps)
    with pytest.raises(InputError, match=r"expected a FaultPlan before the call's own arguments; found 3"):
        train.drill(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kill: rank 2 in step 7: the run has ranks 0 to 1"):
        train.drill(FaultPlan(Fault("kill", rank=1), Fault("kill", rank=2, step=7)), 3)
    assert sgpu.runs() == []


def event(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, **facts}


def test_recoveries_are_read_from_a_runs_events() -> None:
    failure = event("failure", message="rank 1 ended", cause="SIGKILL", rank=1, step=7)
    again = event("failure", message="", cause="no step for 2 s", rank=0, step=0)
    found = list(recoveries([
        event("run_started"), failure, event("restarting"), again,
        event("resumed", seconds=1.5, recomputed_steps=2), failure,
    ]))  # fmt: skip
    assert [(each.told, each.seconds, each.steps_again) for each in found] == [
        ("rank 1 ended", None, 0), ("no step for 2 s", 1.5, 2), ("rank 1 ended", None, 0),
    ]  # fmt: skip


def test_the_guide_lists_every_point() -> None:
    guide = (ROOT / "docs/guides/drills.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "sgpu").rglob("*.py") if path.name != "failpoint.py")
    points = set(re.findall(r'failpoint\(\s*"([\w.]+)"', code)) | {"worker.reboot"}
    listed = set(re.findall(r"^\| `([\w.]+)` \|", guide, re.M))
    assert listed == points | {"worker.boot"} == set(POINTS)
