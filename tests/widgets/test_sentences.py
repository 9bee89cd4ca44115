"""Every kind of event in plain words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpu.contract.events import KINDS
from sgpu.widgets import words
from sgpu.widgets.reading.sentences import level, sentence

TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("run_started", {"world_size": 1}, "info", "started with 1 worker"),
    ("run_started", {"world_size": 4, "nodes": 1}, "info", "started with 4 workers"),
    ("run_started", {"world_size": 4, "nodes": 2}, "info", "started with 4 workers on 2 nodes"),
    ("resized", {"from_world_size": 4, "to_world_size": 2}, "warning",
     "goes on with 2 workers instead of 4: nodes are missing"),
    ("resized", {"from_world_size": 2, "to_world_size": 4}, "warning",
     "goes on with 4 workers instead of 2: nodes are back"),
    ("node_joined", {"node": 1, "address": "10.0.0.2"}, "detail", "node 1 is here (10.0.0.2)"),
    ("node_lost", {"node": 1, "message": "node 1 was lost: silence"}, "warning", "node 1 was lost: silence"),
    ("node_lost", {"node": 3}, "warning", "node 3 was lost"),
    ("generation_started", {"cause": None}, "detail", "workers are starting"),
    ("generation_started", {"cause": "rank 3 lost", "generation": 2}, "detail",
     "workers are starting again (restart 2)"),
    ("first_step", {"step": 1, "seconds": 3.21}, "info", "step 1 done, 3.2 s after the workers' start"),
    ("restored", {"step": 1200, "seconds": 0.4, "source": "memory"}, "info",
     "restored step 1,200 in 0.4 s from memory"),
    ("restored", {"step": 1200, "seconds": 75, "source": "volume"}, "info", "restored step 1,200 in 1 min 15 s"),
    ("checkpoint_started", {"step": 1200}, "detail", "checkpoint of step 1,200 begun"),
    ("checkpoint_committed", {"step": 1200, "blocked_seconds": 0.02, "save_seconds": 1.13}, "good",
     "checkpoint at step 1,200 (0.02 s blocked, 1.1 s to save)"),
    ("checkpoint_failed", {"step": 5, "message": "no space left"}, "error",
     "checkpoint of step 5 failed: no space left"),
    ("checkpoint_copied", {"step": 5, "rank": 3, "node": 1}, "detail",
     "rank 3's share of the checkpoint of step 5 is in the memory of node 1 too"),
    ("checkpoint_not_copied", {"step": 5, "rank": 3, "node": 1, "message": "it is gone"}, "warning",
     "rank 3's share of the checkpoint of step 5 is not in the memory of node 1: it is gone"),
    ("restored", {"step": 1200, "seconds": 0.4, "source": "peer memory"}, "info",
     "restored step 1,200 in 0.4 s from other nodes' memory"),
    ("checkpoint_removed", {"step": 5}, "detail", "checkpoint of step 5 removed"),
    ("restored", {"step": 8, "seconds": 0.4, "again_steps": 14}, "info",
     "restored step 8 in 0.4 s; 14 steps to do again"),
    ("failure", {"rank": 3, "cause": "signal 9"}, "error", "rank 3 lost (signal 9)"),
    ("failure", {"rank": 3, "step": 1214, "cause": "SIGKILL, signal 9", "message": "rank 3 ended without a result"},
     "error", "rank 3 lost (SIGKILL, signal 9) after step 1,214"),
    ("failure", {"rank": 3, "step": 0, "cause": "exit code 3"}, "error", "rank 3 lost (exit code 3)"),
    ("failure", {"rank": 0, "step": 7, "cause": "ValueError", "message": "x\ny"}, "error",
     "rank 0 raised ValueError after step 7: x y"),
    ("failure", {"rank": 0, "cause": "exception", "message": "boom"}, "error", "rank 0 raised an error: boom"),
    ("failure", {"rank": 1, "step": 9, "cause": "no step for 600 s"}, "error",
     "rank 1 stopped making steps after step 9 (no step for 600 s)"),
    ("failure", {"rank": None, "step": 9, "cause": "out of time", "message": "it took too long"}, "error",
     "the run failed after step 9: it took too long"),
    ("failure", {}, "error", "the run failed, cause unknown"),
    ("restarting", {"from_step": 1200, "attempt": 2, "backoff_seconds": 1.0}, "warning",
     "restarting from step 1,200 (attempt 2) after a wait of 1.0 s"),
    ("restarting", {"from_step": 0}, "warning", "restarting from the beginning"),
    ("resumed", {"from_step": 1200, "seconds": 0.9, "recomputed_steps": 14}, "good",
     "restarted from step 1,200 in 0.9 s; 14 steps done again"),
    ("resumed", {"from_step": 8, "seconds": 0.9, "recomputed_steps": 0}, "good",
     "restarted from step 8 in 0.9 s; no step done again"),
    ("diverged", {"rank": 1, "step": 1200, "value": "nan", "action": "skip"}, "warning",
     "rank 1's loss in step 1,200 is nan: the batch is passed over"),
    ("bottleneck", {"step": 9, "bottleneck": "latency", "message": "Latency-bound: files"}, "info",
     "Latency-bound: files"),
    ("straggler", {"rank": 1, "step": 90, "section": "data", "seconds": 0.2, "ratio": 2.04}, "warning",
     "rank 1 holds the others up: it waits longer for data, 2.0 times as long as most"),
    ("straggler", {"rank": 0, "step": 90, "section": "compute", "seconds": 0.2, "ratio": 1.52}, "warning",
     "rank 0 holds the others up: it computes longer, 1.5 times as long as most"),
    ("epoch_ended", {"epoch": 2}, "info", "epoch 2 ended"),
    ("preempted", {"signal": 15}, "warning", "asked to stop (signal 15): saves a checkpoint, then ends"),
    ("preempted", {"signal": "SIGTERM"}, "warning", "asked to stop (SIGTERM): saves a checkpoint, then ends"),
    ("preempted", {}, "warning", "asked to stop: saves a checkpoint, then ends"),
    ("metrics_lost", {"count": 1, "cause": "disk full"}, "warning", "1 metric value was lost: disk full"),
    ("metrics_lost", {"count": 1234, "cause": "MLflow down"}, "warning", "1,234 metric values were lost: MLflow down"),
    ("warning", {"message": "slow", "rank": 2}, "warning", "rank 2: slow"),
    ("run_ended", {"state": "SUCCEEDED"}, "good", "the run finished"),
    ("run_ended", {"state": "FAILED", "message": "boom"}, "error", "the run failed: boom"),
    ("run_ended", {"state": "CANCELLED"}, "warning", "the run was cancelled"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "facts", "expected_level", "expected"), TABLE)
def test_table(kind: str, facts: dict[str, Any], expected_level: str, expected: str) -> None:
    record = {"time": 0.0, "kind": kind, "generation": 0, "rank": None, **facts}
    assert sentence(record) == expected
    assert level(record) == expected_level


def test_every_kind_of_the_contract_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} == set(KINDS)


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), facts=st.dictionaries(st.sampled_from(
    ["rank", "step", "seconds", "cause", "message", "state", "generation", "from_step", "attempt", "backoff_seconds",
     "recomputed_steps", "world_size", "blocked_seconds", "save_seconds", "signal", "count", "epoch", "source"]
), anything))  # fmt: skip
def test_whatever_a_record_holds_it_is_one_line_of_text(kind: str, facts: dict[str, Any]) -> None:
    told = sentence({"kind": kind, **facts})
    assert told
    assert "\n" not in told
    assert "\x1b" not in told
    assert level({"kind": kind, **facts}) in ("detail", "info", "good", "warning", "error")


def test_an_unknown_kind_is_told_with_its_facts() -> None:
    assert sentence({"time": 1.0, "kind": "gpu_hot", "celsius": 91, "generation": 0}) == "gpu_hot: celsius 91"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0.00 s"), (0.001, "under 0.01 s"), (0.02, "0.02 s"), (1.13, "1.1 s"), (9.94, "9.9 s"), (9.96, "10 s"),
     (59.6, "1 min"), (106, "1 min 46 s"), (3600, "1 h"), (7300, "2 h 1 min"), (3 * 86400 + 3600, "3 d 1 h"),
     (math.nan, "?"), (math.inf, "?"), (-1, "?"), ("3", "?"), (True, "?")],
)  # fmt: skip
def test_seconds(value: Any, expected: str) -> None:
    assert words.seconds(value) == expected


def test_numbers_are_never_rounded_to_all() -> None:
    assert words.percent(0.99999) == "99.9 %"
    assert words.percent(1.0) == "100.0 %"
    assert words.percent(0.972) == "97.2 %"


@pytest.mark.parametrize(
    ("rate", "expected"), [(37.93, "37.9 steps/s"), (0.5, "0.50 steps/s"), (0.05, "20 s a step"), (0, "no steps")]
)
def test_rate(rate: float, expected: str) -> None:
    assert words.rate(rate) == expected


@pytest.mark.parametrize(
    ("amount", "expected"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (5_242_880, "5.2 MB"), (2e15, "2000 TB")]
)
def test_size(amount: float, expected: str) -> None:
    assert words.size(amount) == expected


def test_visible_takes_away_escapes_and_direction_overrides() -> None:
    assert words.visible("\x1b[1;31mred\x1b[0m \x1b]0;title\x07ok\x08\u202egnp") == "red okgnp"
