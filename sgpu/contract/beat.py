"""What a rank says of itself, and what the supervisor asks of it: the values in a slot of the heartbeat page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from sgpu.contract.ledger import Category, parts

__all__ = ["Asked", "Beat", "Category", "Request", "Section", "WorkerState"]


EPOCH_START = "epoch_start"  # the name of the first wait for data in an epoch


class Section(IntEnum):
    """What a rank is in. Each has a time limit of its own."""

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
    FAILED = 4  # the outcome is written, and the process clears up after its call
    PARKED = 5  # the call is over without a result; the process waits to begin anew


class Request(IntEnum):
    """What the supervisor asks of a worker; seen at its next beat."""

    NONE = 0
    SAVE_AND_STOP = 1


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One slot as it was read. Times are monotonic nanoseconds of this machine.

    Attributes:
        section_limit_seconds: what the worker itself has said of its section; 0: nothing.
        section_name: of a section that the user's code has named.
        step_seconds: of the newest step, its wait for data counted and declared sections not; 0: not known.
        timed_steps: how many of those there were since this worker's start; longest_step_seconds: of them.
        work_seconds: of all steps since then: what was the rank's own, and not a wait for data or for other ranks.
        heard: the newest generation of which it was told that it is given up, and has heard that.
        answers: how often it has answered the agent's question whether it hears at all.
    """

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
    section_name: str = ""
    step_seconds: float = 0.0
    longest_step_seconds: float = 0.0
    timed_steps: int = 0
    work_seconds: float = 0.0
    ledger_closed: bool = False
    heard: int = -1
    answers: int = 0

    def ledger_seconds(self, until_ns: int | None = None) -> dict[str, float]:
        """Seconds by category name (lower case), the open interval counted up to `until_ns`."""
        return parts(
            self.seconds, self.category, since_ns=self.ledger_since_ns, until_ns=until_ns, closed=self.ledger_closed
        )

    @property
    def sign_ns(self) -> int:
        """When its writer last wrote."""
        return max(self.beat_ns, self.ledger_since_ns)

    @property
    def known_seconds(self) -> float:
        """How much of the rank's time this tells of, by any clock."""
        return sum(self.ledger_seconds(self.sign_ns).values())


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
