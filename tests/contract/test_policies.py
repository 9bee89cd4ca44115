"""Policies refuse bad values when they are made, by the name of the field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from sgpu.contract.errors import InputError
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy

_BAD_CHECKPOINTS: list[tuple[str, Any]] = [
    ("every_steps", 0), ("every_steps", -1), ("every_steps", 1.5), ("every_steps", True), ("every_steps", "10"),
    ("every_seconds", 0), ("every_seconds", -1.0), ("every_seconds", math.inf), ("every_seconds", math.nan),
    ("every_seconds", True), ("every_seconds", "60"), ("keep_last", 0), ("keep_last", None), ("keep_last", 1.0),
    ("keep_every", 0), ("keep_every", False), ("overhead_budget", 0), ("overhead_budget", 1), ("overhead_budget", 2.0),
    ("overhead_budget", math.nan), ("overhead_budget", None), ("on_error", "ignore"), ("on_error", None),
    ("peer_memory", 1), ("peer_memory", None),
    ("root", ""), ("root", 5), ("root", "s3//bucket"), ("root", "gs:/bucket"), ("root", "dbfs:/x"),
    ("keep_best", "loss"), ("keep_best", {"mode": "min"}),
    ("keep_best", {"metric": "loss", "mode": "least"}), ("keep_best", {"metric": "loss", "count": 0}),
    ("keep_best", {"metric": "loss", "modus": "min"}),
]  # fmt: skip
_BAD_RESTARTS: list[tuple[str, Any]] = [
    ("max_restarts", -1), ("max_restarts", True), ("max_restarts", 1.5), ("max_restarts", "3"), ("max_restarts", None),
    ("backoff_seconds", -0.1), ("backoff_seconds", math.inf), ("backoff_seconds", "1"), ("backoff_seconds", None),
    ("start_seconds", 0), ("start_seconds", -1.0), ("start_seconds", "9"), ("start_seconds", True),
    ("hang_seconds", 0), ("hang_seconds", -5), ("hang_seconds", math.nan), ("hang_seconds", False),
    ("section_seconds", None), ("section_seconds", {"data": 0}), ("section_seconds", {"data": "9"}),
    ("section_seconds", {"step": 5}), ("section_seconds", {"init": 5}), ("section_seconds", {"": 5}),
    ("section_seconds", {7: 5}), ("section_seconds", {"export": math.inf}),
    ("in_process", 1), ("in_process", None), ("min_gpus", 0), ("min_gpus", True), ("min_gpus", 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), _BAD_CHECKPOINTS, ids=str)
def test_checkpoint_policy_refuses(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        CheckpointPolicy(**{name: value})
    told = str(caught.value)
    assert name in told
    assert "must be" in told
    assert repr(value) in told


@pytest.mark.parametrize(("name", "value"), _BAD_RESTARTS, ids=str)
def test_restart_policy_refuses(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        RestartPolicy(**{name: value})
    told = str(caught.value)
    assert ("restarts" if name == "max_restarts" else name) in told
    assert "must be" in told
    assert repr(value) in told


def test_good_values_survive_json() -> None:
    checkpoints = CheckpointPolicy(
        root="s3://b/c", every_steps=10, every_seconds=1.5, keep_last=1, keep_every=100,
        keep_best={"metric": "loss", "mode": "min", "count": 2}, overhead_budget=0.5, on_error="warn",
        peer_memory=True,
    )  # fmt: skip
    assert CheckpointPolicy(**json.loads(json.dumps(checkpoints.to_dict()))) == checkpoints
    restarts = RestartPolicy(max_restarts=0, backoff_seconds=0, hang_seconds=1, in_process=False, min_gpus=1,
                             section_seconds={"evaluation": 60, "export": 0.5})  # fmt: skip
    assert RestartPolicy(**json.loads(json.dumps(restarts.to_dict()))) == restarts
    assert CheckpointPolicy(keep_best={"metric": "loss"}).keep_best == {"metric": "loss"}
