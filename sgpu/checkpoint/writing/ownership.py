"""Whose a root is: one run's at a time, by the claim of its newest attempt. Without torch.

Rank 0 of a run that saves into a root claims an attempt number there: a file that says which run, process and machine
it is, and when it was last seen. A second run is refused while the first is alive, since two runs in one root would
prune and resume each other's checkpoints. A run is over when it has closed its claim, when its process (and its
agent's) is gone, or, where that cannot be seen from here, when it was quiet for `QUIET_SECONDS`. One that was taken
over by mistake notices at its next commit, which fails; what both had committed stays.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import socket
import time
from dataclasses import asdict, dataclass, replace

from sgpu import settings
from sgpu.checkpoint.format import names
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import newest
from sgpu.contract.errors import CheckpointError, CheckpointSaveError
from sgpu.contract.process import ProcessId, read_process, this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import read_status

QUIET_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a claim.

    Attributes:
        run_id: None for a process that belongs to no run.
        machine: the host's name, this boot of it, and the name space of its process numbers.
        agent: the process that would restart this one, for as long as the run in `run_dir` goes on.
        seen_unix_seconds: of the last commit, or of the claim.
        ended: it has closed the claim itself.
    """

    run_id: str | None
    generation: int
    machine: str
    process: ProcessId
    agent: ProcessId | None
    run_dir: str | None
    seen_unix_seconds: float
    ended: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def here(cls, generation: int) -> Owner:
        run = settings.run_dir()
        return cls(
            run_id=run.name if run is not None else None, generation=generation, machine=_machine(),
            process=this_process(), agent=read_process(RunDir(run).agent) if run is not None else None,
            run_dir=str(run) if run is not None else None, seen_unix_seconds=time.time(),
        )  # fmt: skip

    def same_as(self, other: Owner) -> bool:
        """The same run, in whatever process of it, or the same process."""
        if self.run_id is not None and self.run_id == other.run_id:
            return True
        return (self.machine, self.process) == (other.machine, other.process)

    def alive(self, now: float) -> bool:
        if self.ended:
            return False
        if self.machine == _machine():
            return self.process.alive() or self._may_be_restarted()
        return now - self.seen_unix_seconds < QUIET_SECONDS

    def _may_be_restarted(self) -> bool:
        if self.agent is None or self.run_dir is None or not self.agent.alive():
            return False
        status = read_status(RunDir(pathlib.Path(self.run_dir)))
        return status is None or not status.final

    def words(self, now: float) -> str:
        run = f"run {self.run_id}, " if self.run_id else ""
        quiet = max(0.0, now - self.seen_unix_seconds)
        return f"{run}process {self.process.pid} on {self.machine.partition('/')[0]}, last seen {quiet:.0f} s ago"


@functools.cache
def _machine() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def read_owner(store: Store, attempt: int) -> Owner | None:
    """None where there is no claim, or an unreadable one: it was torn, or is being written just now."""
    try:
        value = json.loads(store.read(names.claim_name(attempt)))
        agent = value["agent"]
        return Owner(
            **{**value, "process": ProcessId(**value["process"]), "agent": ProcessId(**agent) if agent else None}
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def claim(store: Store, generation: int) -> int:
    """An attempt number that was never used in this root, now this run's.

    Raises:
        CheckpointError: another run that is alive has the root.
        OSError: the store failed.
    """
    me = Owner.here(generation)
    while True:
        found = newest.root_names(store)
        others = _refuse_others(store, me, names.claims(found))
        attempt = max([*names.claims(found), *(folder.attempt for folder in names.step_folders(found))], default=-1) + 1
        if not store.create(names.claim_name(attempt), me.to_bytes()):
            continue
        try:  # of two that began at the same moment, the later number gives way
            _refuse_others(store, me, [number for number in names.claims(store.names("")) if number < attempt])
        except CheckpointError:
            store.delete(names.claim_name(attempt))
            raise
        for over in others:
            store.delete(names.claim_name(over))
        return attempt


def _refuse_others(store: Store, me: Owner, claims: list[int]) -> list[int]:
    """Claims of others, all of them over."""
    now, others = time.time(), []
    for attempt in claims:
        owner = read_owner(store, attempt)
        if owner is not None and owner.same_as(me):
            continue
        if owner is not None and owner.alive(now):
            raise _in_use(store, owner, attempt, now)
        others.append(attempt)
    return others


def _in_use(store: Store, owner: Owner, attempt: int, now: float) -> CheckpointError:
    return CheckpointError(
        f"{store.url} is in use: {owner.words(now)}, saves checkpoints there, and two runs in one folder would prune "
        "and resume each other's. Give this run a root of its own (checkpoints=...), or end the other first. If it is "
        f"dead, remove {store.url}/{names.claim_name(attempt)}. To read only, use Catalog or VolumeReader.",
        path=store.url,
        owner=owner.run_id,
        unrecoverable=True,
    )


def check_free(root: str | os.PathLike[str]) -> None:
    """Before a new run is started.

    Raises:
        CheckpointError: a run that is alive saves into `root`.
    """
    store, now = open_store(root), time.time()
    for attempt in names.claims(store.names("")):
        owner = read_owner(store, attempt)
        if owner is not None and owner.alive(now):
            raise _in_use(store, owner, attempt, now)


def claim_next(store: Store, attempt: int, generation: int) -> None:
    """For a step that is saved once more: the next number, if it is nobody else's.

    Raises:
        CheckpointSaveError: it is.
    """
    if not store.create(names.claim_name(attempt), Owner.here(generation).to_bytes()):
        raise _taken_over(store, read_owner(store, attempt))


def require(store: Store, attempt: int) -> None:
    """Before a commit: the root is still that of the run that claimed the attempt.

    Raises:
        CheckpointSaveError: another run has taken it over.
    """
    claims = names.claims(store.names(""))
    mine = read_owner(store, attempt)
    if mine is not None:
        claims = sorted({*claims, attempt})  # a listing may be late
    if attempt not in claims:
        raise _taken_over(store, read_owner(store, claims[-1]) if claims else None)
    if mine is None or claims[-1] == attempt:
        return
    newest = read_owner(store, claims[-1])
    if newest is not None and not newest.same_as(mine):
        raise _taken_over(store, newest)


def _taken_over(store: Store, owner: Owner | None) -> CheckpointSaveError:
    who = f" ({owner.words(time.time())})" if owner is not None else ""
    return CheckpointSaveError(
        f"another run{who} has taken over {store.url} since. What was committed is there; nothing more is saved to it "
        "from here. Give each run a root of its own.",
        path=store.url,
        unrecoverable=True,
    )


def note_seen(store: Store, attempt: int, *, ended: bool = False) -> None:
    """After a commit, and at the end: a sign of life, or that none will come."""
    owner = read_owner(store, attempt)
    if owner is not None:
        content = replace(owner, seen_unix_seconds=time.time(), ended=ended).to_bytes()
        store.put(names.claim_name(attempt), [memoryview(content)])


def clear_old(store: Store, found: list[str], attempt: int) -> set[int]:
    """Removes older claims that are over. Gives the attempts of runs that are alive, this one's besides."""
    mine, alive, now = read_owner(store, attempt), {attempt}, time.time()
    for number in names.claims(found):
        if number >= attempt:
            alive.add(number)
            continue
        owner = read_owner(store, number)
        former = owner is None or mine is None or owner.process != mine.process or owner.generation < mine.generation
        ours = owner is not None and mine is not None and owner.same_as(mine)
        if owner is not None and owner.alive(now) and not (ours and former):
            alive.add(number)
        else:
            store.delete(names.claim_name(number))
    return alive
