"""From exit statuses and outcomes to one failure, and which of several came first."""

from __future__ import annotations

import dataclasses

import pytest

from sgpu.agent.judging.failure import Failure, from_exit, from_outcome, root_cause
from sgpu.contract.outcome import Outcome


@pytest.mark.parametrize(
    ("status", "kind", "cause"),
    [
        (0, "exit", "exit code 0"),
        (3 << 8, "exit", "exit code 3"),
        (255 << 8, "exit", "exit code 255"),
        (9, "signal", "SIGKILL, signal 9"),
        (11, "signal", "SIGSEGV, signal 11"),
        (6 | 0x80, "signal", "SIGABRT, signal 6"),  # with a core dump
        (40, "signal", "signal 40, signal 40"),
    ],
)
def test_an_exit_without_an_outcome(status: int, kind: str, cause: str) -> None:
    failure = from_exit(status, rank=1, generation=2, step=7, time=5.0)
    assert (failure.kind, failure.rank, failure.generation, failure.step, failure.time) == (kind, 1, 2, 7, 5.0)
    assert failure.cause in (cause, "signal 40")
    assert failure.message.startswith("rank 1 ended without a result (")


def test_an_outcome() -> None:
    outcome = Outcome(
        kind="exception", rank=2, generation=1, step=4, time=9.0, exception_type="KeyError", message="'x'",
        traceback="t", collateral=True, unrecoverable=True,
    )  # fmt: skip
    failure = from_outcome(outcome)
    assert failure == Failure(
        kind="exception", rank=2, generation=1, step=4, cause="KeyError", message="'x'", time=9.0, traceback="t",
        collateral=True, unrecoverable=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message", "cause"), [("SystemExit", "0", "SystemExit: 0"), ("KeyboardInterrupt", "", "KeyboardInterrupt")]
)
def test_leaving_by_an_exception_that_is_none(kind: str, message: str, cause: str) -> None:
    failure = from_outcome(Outcome(kind="exit", rank=1, generation=0, exception_type=kind, message=message))
    assert (failure.kind, failure.cause) == ("exit", cause)
    assert failure.message == f"rank 1 ended without a result ({cause})"


def _failure(rank: int, time: float, *, collateral: bool = False) -> Failure:
    return Failure(
        kind="exception", rank=rank, generation=0, step=1, cause="E", message="m", time=time, collateral=collateral
    )


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([_failure(0, 1.0), _failure(1, 2.0)], 0),
        ([_failure(0, 2.0), _failure(1, 1.0)], 1),
        ([_failure(0, 1.0, collateral=True), _failure(1, 2.0)], 1),
        ([_failure(0, 1.0, collateral=True), _failure(1, 2.0, collateral=True)], 0),
        ([_failure(0, 1.0, collateral=True), _failure(1, 3.0), _failure(2, 2.0), _failure(3, 0.5, collateral=True)], 2),
    ],
)
def test_root_cause(failures: list[Failure], rank: int) -> None:
    assert root_cause(failures).rank == rank


def test_fingerprints_see_through_numbers_and_addresses() -> None:
    one = dataclasses.replace(_failure(0, 1.0), message="object at 0x7f12ab of rank 3, 17 bytes")
    other = dataclasses.replace(one, message="object at 0x55ff00 of rank 1, 99 bytes", time=2.0, rank=1, step=9)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != dataclasses.replace(one, message="another").fingerprint
    assert one.fingerprint != dataclasses.replace(one, cause="F").fingerprint
    assert one.fingerprint != dataclasses.replace(one, kind="exit").fingerprint
