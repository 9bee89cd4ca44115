"""The seven questions that each cell has to answer."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgpu import Run
from sgpu.checkpoint import Catalog
from sgpu.contract import process
from sgpu.contract.errors import SgpuError
from tests.faults.rig import job
from tests.faults.rig.cells import Cell

FIXED_SECONDS, TIMES_UNDISTURBED = 30.0, 10  # limits of hangs, and the machine's own speed
LEAVING_SECONDS = 45.0  # a helper without its agent waits for shares that may still come


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a cell went."""

    folder: pathlib.Path
    run: Run | None
    states: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float
    disk_struck: int

    @property
    def fired(self) -> list[str]:
        log = self.folder / "fired"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.run.events() if self.run is not None else []

    @property
    def failures(self) -> list[str]:
        return [f"rank {event['rank']}: {event['cause']}: {event['message']}" for event in self._of("failure")]

    @property
    def warnings(self) -> list[str]:
        kinds = ("warning", "metrics_lost", "checkpoint_failed")
        return [json.dumps(event) for event in self.events if event["kind"] in kinds]

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def told(self) -> dict[str, Any]:
        return {
            "states": self.states, "errors": self.errors, "failures": self.failures, "warnings": self.warnings,
            "fired": self.fired, "seconds": round(self.seconds, 2), "disk_struck": self.disk_struck,
        }  # fmt: skip


def plain(ledger: Mapping[int, Mapping[int, Any]]) -> dict[str, Any]:
    return {str(rank): {str(step): facts for step, facts in done.items()} for rank, done in ledger.items()}


def judge(cell: Cell, seen: Seen, expected: Mapping[str, Any]) -> list[str]:
    """What is wrong; nothing, if all is as it should be."""
    wrong = [*_fired(cell, seen), *_told(cell, seen)]
    most = FIXED_SECONDS + TIMES_UNDISTURBED * expected["seconds"]
    if seen.seconds > most:
        wrong.append(f"bounded time: {seen.seconds:.1f} s, more than {most:.1f} s")
    if seen.run is None or seen.states[-1:] != ("SUCCEEDED",):
        return wrong
    damaged = cell.kind.name == "corrupt bytes"
    try:
        results = seen.run.result(0)
    except SgpuError as error:
        return [*wrong, f"final weights: {error}"]
    if results != expected["results"]:
        wrong.append(f"final weights: {results}, expected {expected['results']}")
    wrong += _ledger(seen.folder / "notes", expected["ledger"])
    wrong += nothing_committed_is_lost(seen.events, damaged)
    try:
        found = fingerprint(seen.run, seen.folder, damaged)
        if found != expected["fingerprint"]:
            wrong.append(f"checkpoint: its fingerprint is {found}, expected {expected['fingerprint']}")
    except AssertionError as error:
        wrong.append(f"checkpoint: {error}")
    return wrong


def _fired(cell: Cell, seen: Seen) -> list[str]:
    if sum(f"action={cell.action}" in line for line in seen.fired) < 1:
        return [f"the fault did not fire: {seen.fired}"]
    if cell.strikes_disk and not cell.flips and seen.disk_struck == 0:
        return ["the disk was not touched after it had begun to fail"]
    return []


def _told(cell: Cell, seen: Seen) -> list[str]:
    """States, the number of failures, and what was said of them."""
    end, wrong = cell.end, []
    if seen.states not in end.states:
        wrong.append(f"status: {seen.states}, expected {' or '.join(map(str, end.states))}; {seen.errors}")
    if len(seen.failures) not in end.failures:
        wrong.append(f"message: {len(seen.failures)} failures, expected {end.failures}: {seen.failures}")
    said = [*seen.errors, *seen.failures, *seen.warnings]
    if end.told and not any(re.search(end.told, text) for text in said):
        wrong.append(f"message: nothing told {end.told!r}: {said}")
    return wrong


def _ledger(notes: pathlib.Path, expected: Mapping[str, Any]) -> list[str]:
    try:
        found = plain(job.read_ledger(notes))
    except AssertionError as error:
        return [f"ledger: {error}"]
    if found != json.loads(json.dumps(expected)):
        return [f"ledger: {found}, expected {expected}"]
    for epoch in range(job.EPOCHS):
        samples = [n for done in found.values() for facts in done.values() if facts[0] == epoch for n in facts[1]]
        if sorted(samples) != list(range(job.FILES)):
            return [f"ledger: epoch {epoch} trained {sorted(samples)}"]
    return []


def nothing_committed_is_lost(events: list[dict[str, Any]], damaged: bool) -> list[str]:
    """Each start goes on from the newest checkpoint that was told to be there, or a newer one."""
    committed, restored = 0, True
    for event in events:
        if event["kind"] == "checkpoint_committed":
            committed = max(committed, event["step"])
        elif event["kind"] == "generation_started":
            restored = committed == 0
        elif event["kind"] == "restored":
            restored = True
            if event["step"] < committed and not damaged:
                return [f"checkpoint: step {committed} was committed, and step {event['step']} was restored"]
        elif event["kind"] == "first_step" and not restored:
            return [f"checkpoint: step {committed} was committed, and nothing was restored"]
    return []


def fingerprint(run: Run, folder: pathlib.Path, damaged: bool = False) -> str:
    """Of every byte of every tensor of the last checkpoint, read back with its checksums.

    Args:
        damaged: whether one of those that are kept may be known as damaged.
    """
    catalog: Catalog = run.checkpoints()
    known = [entry for entry in catalog.quarantine(deep=True) if entry.step != job.steps()]
    assert damaged or not known, f"damaged: {known}"
    last = catalog.latest()
    assert last == job.steps(), f"the newest valid checkpoint is of step {last}; there are {catalog.steps()}"
    verified = catalog.verify(last, deep=True)
    assert verified.ok, verified.problems
    path = folder / f"exported{time.monotonic_ns()}"
    tensors = torch.load(catalog.export(last, path, format="torch"), weights_only=True)
    path.unlink()
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def second_life(run: Run, expected: Mapping[str, Any]) -> list[str]:
    """A fresh run in the same home does what it does anywhere."""
    state = run.wait(60)
    if state != "SUCCEEDED":
        return [f"second life: {state}: {run.status.failure}"]
    results = run.result(0)
    return [] if results == expected["short"] else [f"second life: {results}, expected {expected['short']}"]


def left(folder: pathlib.Path) -> list[str]:
    """Processes, shared memory, sockets and temporary files of the cell that outlive it."""
    pids = frozenset((folder / "pids").read_text().split())
    deadline = time.monotonic() + LEAVING_SECONDS
    while (found := _left(folder, pids)) and time.monotonic() < deadline:
        list(process.ended_children())  # reaped
        time.sleep(0.05)
    return found


def _left(folder: pathlib.Path, pids: frozenset[str]) -> list[str]:
    found = [f"left: process {pid}" for pid in _living()]
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("sgpu-")]
    with open("/proc/net/unix") as table:
        sockets = [line.split()[-1] for line in table if "@sgpu-" in line]
    found += [f"left: {name}" for name in [*shared, *sockets] if name.split("-")[1] in pids]
    return found + [f"left: {path}" for path in folder.rglob("*") if _is_litter(path, folder)]


def _is_litter(path: pathlib.Path, folder: pathlib.Path) -> bool:
    """A part of a file, or a temporary one. In a step that was never committed it is the next run's to remove."""
    if path.parent.name.startswith("step-") and not (path.parent / ".metadata").exists():
        return False
    return path.name.endswith(".tmp") or path.parent == folder / "tmp"


def _living() -> list[int]:
    return [pid for pid in process.descendants(os.getpid()) if process.state_of(pid) not in ("Z", None)]
