"""How one rank ended, as it says itself: its result, or the exception. One file, written last, whole or absent."""

from __future__ import annotations

import pickle
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sgpu.contract import atomic
from sgpu.contract.rundir import RunDir

Kind = Literal["result", "exception", "exit", "preempted"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank left.

    Attributes:
        result: the pickled return value, where `kind` is "result".
        result_problem: why the return value could not be pickled.
        exception: the pickled exception, where it could be.
        collateral: the exception looks like the effect of another rank's end (a lost connection).
        step: optimizer steps completed.
        unrecoverable: the same would happen again (an import error, a wrong name).
    """

    kind: Kind
    rank: int
    generation: int
    step: int = 0
    time: float = field(default_factory=time.time)
    result: bytes | None = None
    result_problem: str | None = None
    exception: bytes | None = None
    exception_type: str | None = None
    message: str | None = None
    traceback: str | None = None
    collateral: bool = False
    unrecoverable: bool = False

    def write(self, run: RunDir) -> None:
        atomic.write_bytes(
            run.outcome(self.generation, self.rank), pickle.dumps(asdict(self), protocol=pickle.HIGHEST_PROTOCOL)
        )


def read_outcome(run: RunDir, generation: int, rank: int) -> Outcome | None:
    """None where the rank left none."""
    try:
        content = run.outcome(generation, rank).read_bytes()
    except FileNotFoundError:
        return None
    value: dict[str, Any] = pickle.loads(content)
    return Outcome(**value)


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception as it was, without its constructor, which may want other arguments than `args`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
