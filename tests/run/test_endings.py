"""A rank that fails or leaves ends the run with the cause, in seconds, and nothing stays."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from sgpu import RestartPolicy, Run, distributed
from sgpu.contract.errors import CrashLoopError, RunError, UserCodeError, WorkerLostError

pytestmark = pytest.mark.slow


def test_the_first_failure_is_the_one_that_is_raised(
    left: Callable[[Run], list[int]], seconds_to_end: Callable[[Run], float]
) -> None:
    """Rank 2 raises an exception of the notebook's own, while three others wait in an all-reduce."""

    class OutOfCatsError(Exception):
        def __init__(self, count: int, *, kind: str) -> None:
            super().__init__(f"{count} {kind} left")
            self.count = count

        def __reduce__(self) -> tuple[object, ...]:
            return type(self)._make, (self.count,)

        @classmethod
        def _make(cls, count: int) -> OutOfCatsError:
            return cls(count, kind="cats")

    @distributed(gpus=4)
    def train() -> None:
        import torch
        import torch.distributed as dist

        import sgpu

        sgpu.runtime.init()
        if sgpu.runtime.rank() == 2:
            raise OutOfCatsError(9, kind="cats")  # the line that the notebook must see
        dist.all_reduce(torch.ones(1))

    run = train.submit()
    with pytest.raises(OutOfCatsError, match="9 cats left") as caught:
        run.result(100)
    assert caught.value.count == 9
    told = "".join(traceback.format_exception(caught.value))
    assert "rank 2, step 0:" in told
    assert 'raise OutOfCatsError(9, kind="cats")  # the line that the notebook must see' in told
    assert "bootstrap.py" not in told
    assert seconds_to_end(run) < 30
    assert run.state == "FAILED"
    assert left(run) == []
    failure = next(event for event in run.events() if event["kind"] == "failure")
    assert (failure["rank"], failure["cause"].rpartition(".")[2]) == (2, "OutOfCatsError")
    assert "OutOfCatsError" in run.logs(2)


def test_an_exception_that_cannot_be_rebuilt_comes_as_text() -> None:
    @distributed(gpus=1)
    def train() -> None:
        import threading

        raise ValueError("held by", threading.Lock())

    with pytest.raises(UserCodeError, match=r"ValueError: \('held by', <unlocked _thread.lock") as caught:
        train.submit().result(100)
    assert 'raise ValueError("held by", threading.Lock())' in str(caught.value.__cause__)


_ENDINGS = [
    ("sys.exit(0)", "SystemExit: 0"),
    ("os._exit(0)", "exit code 0"),
    ("sys.exit(3)", "SystemExit: 3"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("os.kill(os.getpid(), 9)", "SIGKILL, signal 9"),
    ("os.kill(os.getpid(), 15)", "SIGTERM, signal 15"),
    ("os.kill(os.getpid(), 11)", "SIGSEGV, signal 11"),
    ("os.abort()", "SIGABRT, signal 6"),
]


@pytest.mark.parametrize(("statement", "cause"), _ENDINGS, ids=[row[0] for row in _ENDINGS])
def test_a_rank_that_leaves_without_a_result(
    statement: str, cause: str, left: Callable[[Run], list[int]], seconds_to_end: Callable[[Run], float]
) -> None:
    @distributed(gpus=2, restarts=RestartPolicy(max_restarts=1, backoff_seconds=0.0))
    def train() -> None:
        import os
        import sys

        import torch
        import torch.distributed as dist

        import sgpu

        sgpu.runtime.init()
        if sgpu.runtime.rank() == 1:
            print("about to leave", flush=True)
            exec(statement, {"os": os, "sys": sys})
        dist.all_reduce(torch.ones(1))

    run = train.submit()
    with pytest.raises(RunError) as caught:
        run.result(100)
    assert f"rank 1 ended without a result ({cause})" in str(caught.value)
    lost = caught.value
    if "SIGKILL" in cause:  # may come from outside: tried once more
        assert isinstance(lost, CrashLoopError)
        assert lost.attempts == 2
        assert isinstance(lost.__cause__, WorkerLostError)
        lost = lost.__cause__
    assert isinstance(lost, WorkerLostError)
    assert (lost.rank, lost.cause, lost.run_id) == (1, cause, run.id)
    assert "its log: " in str(lost)
    assert seconds_to_end(run) < 30
    assert "about to leave" in run.logs(1), "the fault did not fire"
    assert run.state == "FAILED"
    assert left(run) == []
