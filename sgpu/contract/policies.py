"""The two policies that users write. They check themselves when made."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sgpu.contract.errors import InputError
from sgpu.contract.places import check_place


def _require(ok: bool, name: str, expected: str, found: object) -> None:
    if not ok:
        raise InputError(f"{name} must be {expected}; found {found!r} ({type(found).__name__})")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_best(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("metric"), str)
        and value.get("mode", "min") in ("min", "max")
        and _is_count(value.get("count", 1), 1)
        and not value.keys() - {"metric", "mode", "count"}
    )


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints go, how often, and which stay.

    Attributes:
        root: folder or URL; None means the run folder's own `checkpoints/`.
        every_steps: a checkpoint each so many optimizer steps. None with `every_seconds=None` means automatic:
            from the measured overhead and failure rate.
        every_seconds: a checkpoint when so many seconds have passed since the last.
        keep_last: how many of the newest valid ones stay (at least 1). One that was resumed from counts as any other,
            but stays until so many newer ones are there.
        keep_every: besides, each step divisible by this stays.
        keep_best: besides, the best by a metric: `{"metric": "loss", "mode": "min", "count": 2}`.
        overhead_budget: the share of wall time that automatic checkpoints may cost.
        peer_memory: whether each node's share is also copied into the memory of a neighbour node, in the background, so
            that a lost node is restored without the volume. Needs several nodes, and memory for a second share.
        on_error: "raise" stops training when a save failed; "warn" counts and tells it, and goes on.
    """

    root: str | None = None
    every_steps: int | None = None
    every_seconds: float | None = None
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: dict[str, Any] | None = None
    overhead_budget: float = 0.01
    on_error: Literal["raise", "warn"] = "raise"
    peer_memory: bool = False

    def __post_init__(self) -> None:
        _require(
            self.root is None or (self.root != "" and isinstance(self.root, (str, os.PathLike))),
            "checkpoints root",
            'a path or URL ("s3://bucket/run")',
            self.root,
        )
        if self.root is not None:
            check_place("checkpoints root", os.fspath(self.root))
        for name in ("every_steps", "keep_every"):
            value = getattr(self, name)
            _require(value is None or _is_count(value, 1), name, "a whole number of steps, 1 or more, or None", value)
        _require(
            self.every_seconds is None or (_is_seconds(self.every_seconds) and self.every_seconds > 0),
            "every_seconds",
            "seconds above 0, or None",
            self.every_seconds,
        )
        _require(
            self.keep_best is None or _is_best(self.keep_best),
            "keep_best",
            '{"metric": name, "mode": "min" or "max", "count": 1 or more}, or None',
            self.keep_best,
        )
        _require(_is_count(self.keep_last, 1), "keep_last", "a whole number, 1 or more", self.keep_last)
        _require(
            _is_seconds(self.overhead_budget) and 0 < self.overhead_budget < 1,
            "overhead_budget",
            "a share between 0 and 1",
            self.overhead_budget,
        )
        _require(isinstance(self.peer_memory, bool), "peer_memory", "True or False", self.peer_memory)
        _require(self.on_error in ("raise", "warn"), "on_error", '"raise" or "warn"', self.on_error)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RestartPolicy:
    """What happens after a failure.

    Attributes:
        max_restarts: restarts without a newly committed checkpoint in between; progress refills the budget.
        backoff_seconds: wait before the second restart in a row (the first is immediate); then doubled, with jitter.
        hang_seconds: a rank that completes no step for so long is taken for hung. None: learned from the run's steps
            (ten times their 99th percentile, a minute at least; ten minutes while there are fewer than 20).
        start_seconds: so is one that has not begun its loop so long after its start. None: as a first step, for a run
            that has trained before; a function that never did may do without a loop, and is not watched.
        section_seconds: other limits by section: "first_step", "epoch_start", "checkpoint", "evaluation" (without:
            three times `hang_seconds`, and with None half an hour or more), "data", "collective" (without: as a
            step), and the names that code gives to `sgpu.runtime.section`.
        in_process: whether a worker that is still healthy may restart inside its own process.
        min_gpus: the run may go on with so many when nodes are lost, or GPUs of the only node turn out bad; None: it
            never shrinks.
    """

    max_restarts: int = 3
    backoff_seconds: float = 1.0
    hang_seconds: float | None = None
    start_seconds: float | None = None
    in_process: bool = True
    min_gpus: int | None = None
    section_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(_is_count(self.max_restarts, 0), "restarts", "a whole number, 0 or more", self.max_restarts)
        _require(_is_seconds(self.backoff_seconds), "backoff_seconds", "seconds, 0 or more", self.backoff_seconds)
        _require(
            self.hang_seconds is None or (_is_seconds(self.hang_seconds) and self.hang_seconds > 0),
            "hang_seconds",
            "seconds above 0, or None",
            self.hang_seconds,
        )
        _require(
            self.start_seconds is None or (_is_seconds(self.start_seconds) and self.start_seconds > 0),
            "start_seconds",
            "seconds above 0, or None",
            self.start_seconds,
        )
        _require(isinstance(self.in_process, bool), "in_process", "True or False", self.in_process)
        _require(
            self.min_gpus is None or _is_count(self.min_gpus, 1),
            "min_gpus",
            "a whole number, 1 or more, or None",
            self.min_gpus,
        )
        _require(
            isinstance(self.section_seconds, dict)
            and not {"init", "step"} & self.section_seconds.keys()
            and all(isinstance(name, str) and name for name in self.section_seconds)
            and all(_is_seconds(value) and value > 0 for value in self.section_seconds.values()),
            "section_seconds",
            '{name: seconds above 0}, without "step" (hang_seconds) and "init" (start_seconds)',
            self.section_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
