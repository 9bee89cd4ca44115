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
from collections.abc import Iterable
from dataclasses import replace

from sgpu.contract.beat import Asked, Beat, Category, Request, Section, WorkerState
from sgpu.contract.ledger import Ledger

__all__ = ["NAME_BYTES", "Asked", "Beat", "Category", "Page", "Request", "Section", "Slot", "WorkerState"]

_MAGIC = b"SGPUHB01"
_HEADER_BYTES = 64
_SLOT_BYTES = 256
_PROGRESS = struct.Struct("<QqqqqIIIIQd")  # beat_ns step high epoch total generation pid state section since_ns limit
_PROGRESS_AT = 8
_SEQUENCE = struct.Struct("<Q")
_HEARD = struct.Struct("<iI")  # the generation that was given up, plus one; answers
_HEARD_AT = 80
_REQUEST = struct.Struct("<IIqQ")  # code pad stop_step deadline_ns
_REQUEST_AT = 88
_LEDGER = struct.Struct("<IIQQ8d")  # category closed since_ns started_ns seconds[8]
_LEDGER_AT = 112
NAME_BYTES = 24  # of a section's name
_MEASURED = struct.Struct(f"<dddQ{NAME_BYTES}s")  # step_seconds longest work_seconds timed_steps section_name
_MEASURED_AT = 200
_SPINS = 20
_READ_ATTEMPTS = 70
_READ_PAUSE_SECONDS = 0.0005
_revoked = 0


class Slot:
    """One rank's part of the page. One writer: the worker (the request field: the supervisor)."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._at, self._of_call = memory, offset, _revoked
        self._load(self.read())

    def _load(self, beat: Beat) -> None:
        self._step, self._high, self._epoch, self._total = beat.step, beat.high_step, beat.epoch, beat.total_steps
        self._generation, self._pid, self._state = beat.generation, beat.pid, int(beat.state)
        self._section, self._since, self._limit = int(beat.section), beat.section_since_ns, beat.section_limit_seconds
        self._ledger = Ledger(
            beat.category, beat.ledger_since_ns, beat.started_ns, beat.seconds, closed=beat.ledger_closed
        )
        self._name = beat.section_name
        self._step_seconds, self._longest, self._work = beat.step_seconds, beat.longest_step_seconds, beat.work_seconds
        self._timed = beat.timed_steps

    # ---- the worker's side

    def start(self, generation: int, pid: int | None = None) -> None:
        """Takes the slot for a new process of this rank; time since the last beat of the old one was a restart's."""
        before, now = self.read(), time.monotonic_ns()
        self._load(before)
        self._of_call = _revoked
        if before.state in (WorkerState.TRAINING, WorkerState.STARTING) and before.pid:
            self._ledger.lapse(now, heard_ns=before.beat_ns, rest=Category.RESTARTING)
        else:
            first = before.category is Category.STARTING
            self._ledger.turn(Category.STARTING if first else Category.RESTARTING, now)
        self._generation, self._pid, self._state = generation, pid or os.getpid(), int(WorkerState.STARTING)
        self._step, self._section, self._since, self._limit, self._name = 0, int(Section.INIT), now, 0.0, ""
        self._step_seconds = self._longest = self._work = 0.0
        self._timed = 0
        self._write(now)

    @property
    def high_step(self) -> int:
        """The highest step that this rank ever completed, in any generation."""
        return self._high

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def revoked(self) -> bool:
        """Whether the call that it was made for was given up: then it writes no more."""
        return self._of_call != _revoked

    def beat(
        self, step: int, epoch: int = 0, total_steps: int = -1, *, step_seconds: float = 0.0, work_seconds: float = 0.0
    ) -> None:
        """A step was completed (or restored). What it took: see `Beat`."""
        self._step_seconds, self._longest = step_seconds, max(self._longest, step_seconds)
        self._work, self._timed = self._work + work_seconds, self._timed + (step_seconds > 0)
        self._step, self._epoch, self._total, self._state = step, epoch, total_steps, int(WorkerState.TRAINING)
        self._high = max(self._high, step)
        self._write(time.monotonic_ns())

    def enter(self, section: Section, limit_seconds: float = 0.0, name: str = "") -> None:
        """Declares what comes next. `limit_seconds` 0: the supervisor's own limit for that section."""
        now = time.monotonic_ns()
        self._section, self._since, self._limit, self._name = int(section), now, limit_seconds, name
        self._write(now)

    def account(self, category: Category) -> None:
        """From now on, seconds go to `category`."""
        if category is self._ledger.category and not self._ledger.closed:
            return
        now = time.monotonic_ns()
        self._ledger.turn(category, now)
        self._write(now)

    def finish(self) -> None:
        """The function has returned: the rank is idle, also where another Slot of this process wrote since."""
        self._load(self.read())
        now = time.monotonic_ns()
        self._ledger.turn(Category.IDLE, now)
        self._state = int(WorkerState.FINISHED)
        self._write(now)

    def fail(self, *, parked: bool) -> None:
        """The call is over without a result; `parked`: all is cleared up. Time since the last sign is a restart's.

        Other Slots that this process has made by now write no more: what the call left may still be closing.
        """
        global _revoked
        self._of_call = _revoked = _revoked + 1
        before, now = self.read(), time.monotonic_ns()
        self._load(before)
        self._state = int(WorkerState.PARKED if parked else WorkerState.FAILED)
        self._ledger.lapse(now, heard_ns=before.beat_ns, rest=Category.RESTARTING)
        self._write(now)

    def hear(self, generation: int) -> None:
        """The agent's word that this generation is given up has come. From any one thread: no other writes this."""
        self._tell(generation, self.read().answers)

    def answer(self) -> None:
        """The agent's question whether this process hears anything has come. From the same thread."""
        beat = self.read()
        self._tell(beat.heard, beat.answers + 1)

    def _tell(self, heard: int, answers: int) -> None:
        self._memory[self._at + _HEARD_AT : self._at + _REQUEST_AT] = _HEARD.pack(heard + 1, answers)

    def close_ledger(self, until_ns: int | None = None) -> None:
        """Nobody works any more, `until_ns` (None: now) at the latest: since its last sign, the rank was idle."""
        before = self.read()
        self._load(before)
        until = until_ns if until_ns is not None else time.monotonic_ns()
        if not before.ledger_closed:
            absent = before.state is WorkerState.ABSENT  # it was about to start, or is done without
            self._ledger.lapse(until, heard_ns=before.beat_ns, rest=before.category if absent else Category.IDLE)
            self._ledger.close(until)
        self._write(before.beat_ns)

    def requested(self) -> Asked:
        code, _, stop_step, deadline_ns = _REQUEST.unpack_from(self._memory, self._at + _REQUEST_AT)
        return Asked(what=Request(code), stop_step=stop_step, deadline_ns=deadline_ns)

    # ---- the supervisor's side

    def request(self, what: Request, *, stop_step: int = 0, deadline_ns: int = 0) -> None:
        at = self._at + _REQUEST_AT
        self._memory[at : at + _REQUEST.size] = _REQUEST.pack(int(what), 0, stop_step, deadline_ns)

    def resume(self) -> None:
        """A run that had ended is started again: the pause after its last sign was nobody's time."""
        before, now = self.read(), time.monotonic_ns()
        self.close_ledger(before.sign_ns)
        self._ledger.turn(Category.STARTING, now)
        self._state, self._pid = int(WorkerState.ABSENT), 0
        self._write(now)
        self.request(Request.NONE)

    def leave(self) -> None:
        """The rank is lost and done without, until it is started again."""
        before, now = self.read(), time.monotonic_ns()
        self._load(before)
        if before.state is not WorkerState.ABSENT:
            self._ledger.lapse(now, heard_ns=before.beat_ns, rest=Category.RESTARTING)
        self._ledger.turn(Category.IDLE, now)
        self._state, self._pid = int(WorkerState.ABSENT), 0
        self._write(now)

    def mirror(self, beat: Beat) -> None:
        """Shows what a rank wrote into the page of another machine; its times are to be of this one's clock."""
        self._load(beat)
        self._write(beat.beat_ns)
        self._tell(beat.heard, beat.answers)

    def adopt(self, beat: Beat) -> None:
        """Goes on from what another page knows of the rank, if that is more; its times are to be of our clock."""
        here = self.read()
        most = beat if beat.known_seconds >= here.known_seconds else here
        self.mirror(replace(most, high_step=max(beat.high_step, here.high_step)))

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
        category, closed, ledger_since, started, *seconds = ledger
        step_seconds, longest, work, timed, name = _MEASURED.unpack_from(content, _MEASURED_AT)
        heard, answers = _HEARD.unpack_from(content, _HEARD_AT)
        return Beat(
            beat_ns=beat_ns, step=step, high_step=high, epoch=epoch, total_steps=total, generation=generation, pid=pid,
            state=WorkerState(state), section=Section(section), section_since_ns=since, section_limit_seconds=limit,
            category=Category(category), ledger_since_ns=ledger_since, started_ns=started, seconds=tuple(seconds),
            section_name=name.rstrip(b"\0").decode(errors="ignore"), step_seconds=step_seconds,
            longest_step_seconds=longest, timed_steps=timed, work_seconds=work, ledger_closed=bool(closed),
            heard=heard - 1, answers=answers,
        )  # fmt: skip

    def _write(self, now: int) -> None:
        if self.revoked:
            return
        memory, at = self._memory, self._at
        (sequence,) = _SEQUENCE.unpack_from(memory, at)
        sequence += sequence % 2  # a writer that died in the middle left it odd
        progress = _PROGRESS.pack(
            now, self._step, self._high, self._epoch, self._total, self._generation, self._pid, self._state,
            self._section, self._since, self._limit,
        )  # fmt: skip
        kept = self._ledger
        ledger = _LEDGER.pack(int(kept.category), kept.closed, kept.since_ns, kept.started_ns, *kept.seconds)
        name = self._name.encode()[:NAME_BYTES]
        measured = _MEASURED.pack(self._step_seconds, self._longest, self._work, self._timed, name)
        # Whole copies, close together: pack_into blanks the fields first, and a writer that dies there leaves zeros.
        memory[at : at + _SEQUENCE.size] = _SEQUENCE.pack(sequence + 1)
        memory[at + _PROGRESS_AT : at + _PROGRESS_AT + _PROGRESS.size] = progress
        memory[at + _LEDGER_AT : at + _LEDGER_AT + _LEDGER.size] = ledger
        memory[at + _MEASURED_AT : at + _MEASURED_AT + _MEASURED.size] = measured
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

    def close_ledgers(self, until_ns: int | None = None) -> None:
        """The run has ended, `until_ns` (None: now) at the latest."""
        for rank in range(self.world_size):
            self.slot(rank).close_ledger(until_ns)

    def resume(self) -> None:
        """The run is started again. A life whose end nobody wrote down ended with the newest sign of any rank."""
        self.close_ledgers(last_sign_ns(self.beats()))
        for rank in range(self.world_size):
            self.slot(rank).resume()

    def close(self) -> None:
        self._memory.close()


def last_sign_ns(beats: Iterable[Beat]) -> int:
    """The newest moment at which any rank has written."""
    return max(beat.sign_ns for beat in beats)
