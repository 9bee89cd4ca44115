"""The heartbeat page: one slot a rank in shared memory, written by the worker, read by the supervisor.

No thread, no socket, about two microseconds a beat. It outlives its writer, so it tells where a killed, frozen or
GIL-holding rank stood; and it carries the time ledger, so not a second is lost with a worker. Slots are per run, not
per generation: what a rank had reached before a restart is how it knows which steps it does again.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

_MAGIC = b"SGPUHB01"
_HEADER_BYTES = 64
_SLOT_BYTES = 256
_PROGRESS = struct.Struct("<QqqqqIIIIQd")  # beat_ns step high epoch total generation pid state section since_ns limit
_PROGRESS_AT = 8
_SEQUENCE = struct.Struct("<Q")
_REQUEST = struct.Struct("<IIqQ")  # code pad stop_step deadline_ns
_REQUEST_AT = 88
_LEDGER = struct.Struct("<IIQQ8d")  # category pad since_ns started_ns seconds[8]
_LEDGER_AT = 112
_SPINS = 20
_READ_ATTEMPTS = 70
_READ_PAUSE_SECONDS = 0.0005


class Section(IntEnum):
    """What a rank is in. Each may have a time limit of its own."""

    INIT = 0
    FIRST_STEP = 1
    STEP = 2
    DATA = 3
    COLLECTIVE = 4
    CHECKPOINT = 5
    EVALUATION = 6
    USER = 7


class WorkerState(IntEnum):
    ABSENT = 0
    STARTING = 1
    TRAINING = 2
    FINISHED = 3


class Category(IntEnum):
    """Where a second of a rank went. The parts sum to its wall time."""

    STARTING = 0
    PRODUCTIVE = 1
    DATA = 2
    CHECKPOINT = 3
    RESTORING = 4
    RESTARTING = 5
    RECOMPUTING = 6
    IDLE = 7


class Request(IntEnum):
    """What the supervisor asks of a worker; seen at its next beat."""

    NONE = 0
    SAVE_AND_STOP = 1


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One slot as it was read. Times are monotonic nanoseconds of this machine."""

    beat_ns: int
    step: int
    high_step: int
    epoch: int
    total_steps: int
    generation: int
    pid: int
    state: WorkerState
    section: Section
    section_since_ns: int
    section_limit_seconds: float
    category: Category
    ledger_since_ns: int
    started_ns: int
    seconds: tuple[float, ...]

    def ledger_seconds(self, until_ns: int | None = None) -> dict[str, float]:
        """Seconds by category name (lower case), the open interval counted up to `until_ns`."""
        parts = {category.name.lower(): self.seconds[category] for category in Category}
        if until_ns is not None and self.state is not WorkerState.FINISHED:
            parts[self.category.name.lower()] += max(0.0, (until_ns - self.ledger_since_ns) / 1e9)
        return parts


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of the supervisor.

    Attributes:
        stop_step: the step after which to stop, the same for every rank (ranks see a request at different steps).
        deadline_ns: monotonic nanoseconds; 0: none.
    """

    what: Request
    stop_step: int
    deadline_ns: int


class Slot:
    """One rank's part of the page. One writer: the worker (the request field: the supervisor)."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._at = offset
        self._load(self.read())

    def _load(self, beat: Beat) -> None:
        self._step, self._high, self._epoch, self._total = beat.step, beat.high_step, beat.epoch, beat.total_steps
        self._generation, self._pid, self._state = beat.generation, beat.pid, int(beat.state)
        self._section, self._since, self._limit = int(beat.section), beat.section_since_ns, beat.section_limit_seconds
        self._category, self._ledger_since, self._started = int(beat.category), beat.ledger_since_ns, beat.started_ns
        self._seconds = list(beat.seconds)

    # ---- the worker's side

    def start(self, generation: int, pid: int | None = None) -> None:
        """Takes the slot for a new process of this rank; time since the last beat of the old one was a restart's."""
        before, now = self.read(), time.monotonic_ns()
        self._load(before)
        if before.state in (WorkerState.TRAINING, WorkerState.STARTING) and before.pid:
            last = max(before.beat_ns, before.ledger_since_ns)
            self._seconds[before.category] += (last - before.ledger_since_ns) / 1e9
            self._seconds[Category.RESTARTING] += (now - last) / 1e9
            self._category = int(Category.RESTARTING)
        else:
            self._seconds[before.category] += (now - before.ledger_since_ns) / 1e9
        self._ledger_since = now
        self._generation, self._pid, self._state = generation, pid or os.getpid(), int(WorkerState.STARTING)
        self._step, self._section, self._since, self._limit = 0, int(Section.INIT), now, 0.0
        self._write(now)

    @property
    def high_step(self) -> int:
        """The highest step that this rank ever completed, in any generation."""
        return self._high

    @property
    def generation(self) -> int:
        return self._generation

    def beat(self, step: int, epoch: int = 0, total_steps: int = -1) -> None:
        """A step was completed (or restored)."""
        self._step, self._epoch, self._total, self._state = step, epoch, total_steps, int(WorkerState.TRAINING)
        self._high = max(self._high, step)
        self._write(time.monotonic_ns())

    def enter(self, section: Section, limit_seconds: float = 0.0) -> None:
        """Declares what comes next. `limit_seconds` 0: the supervisor's own limit for that section."""
        now = time.monotonic_ns()
        self._section, self._since, self._limit = int(section), now, limit_seconds
        self._write(now)

    def account(self, category: Category) -> None:
        """From now on, seconds go to `category`."""
        if category == self._category:
            return
        now = time.monotonic_ns()
        self._seconds[self._category] += (now - self._ledger_since) / 1e9
        self._category, self._ledger_since = int(category), now
        self._write(now)

    def finish(self) -> None:
        """The function has returned: the ledger is closed, also where another Slot of this process wrote since."""
        self._load(self.read())
        now = time.monotonic_ns()
        self._seconds[self._category] += (now - self._ledger_since) / 1e9
        self._ledger_since, self._state = now, int(WorkerState.FINISHED)
        self._write(now)

    def requested(self) -> Asked:
        code, _, stop_step, deadline_ns = _REQUEST.unpack_from(self._memory, self._at + _REQUEST_AT)
        return Asked(what=Request(code), stop_step=stop_step, deadline_ns=deadline_ns)

    # ---- the supervisor's side

    def request(self, what: Request, *, stop_step: int = 0, deadline_ns: int = 0) -> None:
        at = self._at + _REQUEST_AT
        self._memory[at : at + _REQUEST.size] = _REQUEST.pack(int(what), 0, stop_step, deadline_ns)

    def resume(self) -> None:
        """A run that had ended is started again: the pause after its last beat was nobody's time."""
        before, now = self.read(), time.monotonic_ns()
        self._load(before)
        if before.state is not WorkerState.FINISHED:
            self._seconds[before.category] += max(0, before.beat_ns - before.ledger_since_ns) / 1e9
        self._category, self._ledger_since, self._state = int(Category.STARTING), now, int(WorkerState.ABSENT)
        self._pid = 0
        self._write(now)
        self.request(Request.NONE)

    def mirror(self, beat: Beat) -> None:
        """Shows what a rank wrote into the page of another machine; its times are to be of this one's clock."""
        self._load(beat)
        self._write(beat.beat_ns)

    def read(self) -> Beat:
        """A consistent copy; tries again while the worker is writing, and takes what there is if it died writing."""
        memory, at = self._memory, self._at
        for attempt in range(_READ_ATTEMPTS):
            if attempt >= _SPINS:
                time.sleep(_READ_PAUSE_SECONDS)  # the writer was put aside in the middle; the core may be this one
            before = memory[at : at + _SEQUENCE.size]
            content = memory[at : at + _SLOT_BYTES]
            if before == memory[at : at + _SEQUENCE.size] and before[0] % 2 == 0:
                break
        progress = _PROGRESS.unpack_from(content, _PROGRESS_AT)
        ledger = _LEDGER.unpack_from(content, _LEDGER_AT)
        beat_ns, step, high, epoch, total, generation, pid, state, section, since, limit = progress
        category, _, ledger_since, started, *seconds = ledger
        return Beat(
            beat_ns=beat_ns,
            step=step,
            high_step=high,
            epoch=epoch,
            total_steps=total,
            generation=generation,
            pid=pid,
            state=WorkerState(state),
            section=Section(section),
            section_since_ns=since,
            section_limit_seconds=limit,
            category=Category(category),
            ledger_since_ns=ledger_since,
            started_ns=started,
            seconds=tuple(seconds),
        )

    def _write(self, now: int) -> None:
        memory, at = self._memory, self._at
        (sequence,) = _SEQUENCE.unpack_from(memory, at)
        sequence += sequence % 2  # a writer that died in the middle left it odd
        progress = _PROGRESS.pack(
            now, self._step, self._high, self._epoch, self._total, self._generation, self._pid, self._state,
            self._section, self._since, self._limit,
        )  # fmt: skip
        ledger = _LEDGER.pack(self._category, 0, self._ledger_since, self._started, *self._seconds)
        # Whole copies, close together: pack_into blanks the fields first, and a writer that dies there leaves zeros.
        memory[at : at + _SEQUENCE.size] = _SEQUENCE.pack(sequence + 1)
        memory[at + _PROGRESS_AT : at + _PROGRESS_AT + _PROGRESS.size] = progress
        memory[at + _LEDGER_AT : at + _LEDGER_AT + _LEDGER.size] = ledger
        memory[at : at + _SEQUENCE.size] = _SEQUENCE.pack(sequence + 2)


class Page:
    """The file of all slots. Create it once a run (agent), open it anywhere."""

    def __init__(self, path: pathlib.Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        magic, self.world_size = struct.unpack_from("<8sQ", self._memory, 0)
        if magic != _MAGIC:
            raise ValueError(f"{path} is not a heartbeat page of this version (starts with {magic!r})")

    @classmethod
    def create(cls, path: pathlib.Path, world_size: int) -> Page:
        content = bytearray(_HEADER_BYTES + world_size * _SLOT_BYTES)
        struct.pack_into("<8sQ", content, 0, _MAGIC, world_size)
        now = time.monotonic_ns()
        for rank in range(world_size):
            at = _HEADER_BYTES + rank * _SLOT_BYTES
            _PROGRESS.pack_into(content, at + _PROGRESS_AT, now, 0, 0, 0, -1, 0, 0, 0, 0, now, 0.0)
            _LEDGER.pack_into(content, at + _LEDGER_AT, int(Category.STARTING), 0, now, now, *([0.0] * len(Category)))
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        aside.write_bytes(content)
        aside.chmod(0o600)
        aside.replace(path)
        return cls(path)

    def slot(self, rank: int) -> Slot:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} has no slot; the page holds {self.world_size}")
        return Slot(self._memory, _HEADER_BYTES + rank * _SLOT_BYTES)

    def beats(self) -> list[Beat]:
        return [self.slot(rank).read() for rank in range(self.world_size)]

    def close(self) -> None:
        self._memory.close()
