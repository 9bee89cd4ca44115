"""Names inside a checkpoint root, and which step a folder's name stands for. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

METADATA = ".metadata"
MANIFEST = "manifest.json"
NEWEST = ".newest"
SHARD_SUFFIX = ".distcp"
_STEP = re.compile(r"step-([0-9]+)(?:\.a([0-9]+))?|step_([0-9]+)|checkpoint-([0-9]+)", re.ASCII)
_CLAIM = re.compile(r"\.attempt-([0-9]+)", re.ASCII)
_PROTECTED = re.compile(r"\.protected-(.+)")
_DONE = re.compile(r"\.(done|failed)-([0-9]+)\.json", re.ASCII)


@dataclass(frozen=True, order=True)
class StepFolder:
    """A folder that stands for a step. Orders by step, then attempt, as numbers."""

    step: int
    attempt: int
    name: str


def parse_step(name: str) -> StepFolder | None:
    """The step of a folder name; None unless the whole name matches."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = next(group for group in (match[1], match[3], match[4]) if group is not None)
    return StepFolder(step=int(step), attempt=int(match[2] or 0), name=name)


def step_folders(names: list[str]) -> list[StepFolder]:
    """Those that stand for a step, newest first."""
    return sorted(filter(None, map(parse_step, names)), reverse=True)


def folder_name(step: int, attempt: int) -> str:
    return f"step-{step:08d}" + (f".a{attempt}" if attempt else "")


def claim_name(attempt: int) -> str:
    return f".attempt-{attempt}"


def claims(names: list[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_CLAIM.fullmatch, names) if match)


def protected_name(folder: str) -> str:
    return f".protected-{folder}"


def protected(names: list[str]) -> set[str]:
    """Folders that are not to be pruned."""
    return {match[1] for match in map(_PROTECTED.fullmatch, names) if match}


def shard_name(rank: int, index: int = 0) -> str:
    return f"__{rank}_{index}{SHARD_SUFFIX}"


def index_file(rank: int) -> str:
    return f"__{rank}.index"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def done_name(rank: int) -> str:
    return f".done-{rank}.json"


def failed_name(rank: int) -> str:
    return f".failed-{rank}.json"


def told_ranks(names: list[str], kind: str) -> list[int]:
    """Ranks that left a `done` or `failed` file."""
    return sorted(int(match[2]) for match in map(_DONE.fullmatch, names) if match and match[1] == kind)


def is_control(name: str) -> bool:
    return _DONE.fullmatch(name) is not None
