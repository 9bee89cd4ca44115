"""Whom the stacks of silent ranks blame."""

from __future__ import annotations

from typing import Any

import pytest

from sgpu.agent.judging.kernel_view import KernelView
from sgpu.agent.judging.stacks import Evidence, deed, lock_held, to_blame

_SLEEPS = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/elastic/x.py", line 1 in watch

Current thread 0x00007f02 (most recent call first):
  File "/tmp/ipykernel_1/1.py", line 4 in train
  File "/lib/python3.11/site-packages/sgpu/worker/bootstrap.py", line 64 in _call
"""
_COLLECTIVE = """Current thread 0x00007f02 (most recent call first):
  File "/x/torch/distributed/c10d.py", line 2810 in all_reduce
  File "/tmp/ipykernel_1/1.py", line 5 in train
"""
_BACKWARD = """Current thread 0x00007f02 (most recent call first):
  File "/lib/python3.11/site-packages/torch/autograd/graph.py", line 824 in _engine_run_backward
  File "/tmp/ipykernel_1/1.py", line 5 in train
"""


_SYNCS_BUFFERS = """Current thread 0x00007f02 (most recent call first):
  File "/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 2131 in _sync_module_buffers
  File "/tmp/ipykernel_1/1.py", line 5 in train
"""
_STOPPED = KernelView(state="T")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(_SLEEPS, False), (_COLLECTIVE, True), (_BACKWARD, True), (_SYNCS_BUFFERS, True), ("", False)],
)
def test_waits(text: str, expected: bool) -> None:
    assert Evidence(stack=text).waits is expected


@pytest.mark.parametrize(
    ("stacks", "blamed"),
    [
        ({0: _COLLECTIVE, 1: _SLEEPS}, 1),
        ({1: _SLEEPS, 0: _COLLECTIVE}, 1),
        ({0: _BACKWARD, 1: ""}, 1),
        ({0: _SLEEPS, 1: ""}, 1),
        ({2: _COLLECTIVE, 0: _BACKWARD}, None),  # each waits for the other
        ({3: _SLEEPS, 1: _SLEEPS}, 3),
        ({1: ""}, 1),
        ({1: _COLLECTIVE}, 1),  # there is nobody else
    ],
)
def test_to_blame(stacks: dict[int, str], blamed: int | None) -> None:
    assert to_blame(list(stacks), {rank: Evidence(stack=text) for rank, text in stacks.items()}) == blamed


def test_one_that_is_stopped_is_to_blame_wherever_it_is() -> None:
    evidence = {0: Evidence(stack=_SLEEPS), 1: Evidence(stack=_COLLECTIVE), 2: Evidence(kernel=_STOPPED)}
    assert to_blame([0, 1], evidence) == 2


def _holds(stack: str = _SLEEPS, *, answered: bool = False, **seen: Any) -> Evidence:
    view = KernelView(**{"state": "S", "turns": 28, "busy_share": 0.0, **seen})
    return Evidence(stack=stack, kernel=view, answered=answered)


@pytest.mark.parametrize(
    ("evidence", "holds", "undecided"),
    [
        (_holds(), True, False),
        (_holds(answered=True), False, False),  # it took its time
        (_holds(turns=19), False, True),
        (_holds(turns=None), False, False),  # it cannot be asked
        (_holds(state="R", runs=True, cpu_seconds=0.14), True, False),
        (_holds(state="R", runs=True, cpu_seconds=0.03), False, True),  # it waits for a core
        (_holds(turns=0, state="T"), False, False),
        (Evidence(stack=_SLEEPS), False, False),
    ],
)
def test_only_one_that_had_its_turns_and_did_not_answer_holds_the_lock(
    evidence: Evidence, holds: bool, undecided: bool
) -> None:
    assert (evidence.holds_lock, evidence.undecided) == (holds, undecided)


def test_one_that_holds_the_lock_is_to_blame_before_one_that_is_busy() -> None:
    assert to_blame([0, 1], {0: Evidence(stack=_SLEEPS), 1: _holds()}) == 1
    assert to_blame([0, 1], {0: Evidence(stack=_SLEEPS), 1: _holds(_COLLECTIVE)}) == 0, "that one waits for others"
    assert to_blame([0, 1], {0: Evidence(stack=_BACKWARD), 1: _holds(_COLLECTIVE)}) == 1


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        (_holds(), "holds the GIL in train at /tmp/ipykernel_1/1.py:4 (native code that does not release it)"),
        (_holds(main_turns=25), "holds the GIL in one of its threads (native code that does not release it)"),
        (_holds(""), "holds the GIL (native code that does not release it)"),
    ],
)
def test_where_it_holds_the_lock(evidence: Evidence, told: str) -> None:
    assert lock_held(evidence) == told


def test_none_outside_the_suspicion_is_to_blame() -> None:
    """Rank 2 is in evaluation, as it has declared: its stack is of no interest."""
    evidence = {0: Evidence(stack=_BACKWARD), 1: Evidence(stack=_COLLECTIVE), 2: Evidence(stack=_SLEEPS)}
    assert to_blame([0, 1], evidence) is None


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        (Evidence(kernel=_STOPPED), "it was stopped by a signal (SIGSTOP)"),
        (Evidence(stack=_SLEEPS, kernel=_STOPPED),
         "it was stopped by a signal (SIGSTOP), in train at /tmp/ipykernel_1/1.py:4"),
        (Evidence(kernel=KernelView(state="D", place="nfs_wait")),
         "it answers no signal: it is stuck in the kernel (nfs_wait)"),
        (Evidence(), "it answers no signal: it is stuck in the kernel"),
        (Evidence(begun=False), "its process has not come up"),
        (Evidence(stack=_COLLECTIVE, kernel=KernelView(state="S", busy_share=0.0)),
         "it waits for other ranks, in all_reduce at /x/torch/distributed/c10d.py:2810"),
        (Evidence(stack=_SLEEPS, kernel=KernelView(state="R", busy_share=0.9)),
         "it keeps a core busy, in train at /tmp/ipykernel_1/1.py:4"),
        (Evidence(stack=_SLEEPS, kernel=KernelView(state="S", place="do_nanosleep", busy_share=0.01)),
         "it sleeps or waits (do_nanosleep), in train at /tmp/ipykernel_1/1.py:4"),
        (Evidence(stack=_SLEEPS, kernel=KernelView(state="S")), "in train at /tmp/ipykernel_1/1.py:4"),
    ],
)  # fmt: skip
def test_what_it_does(evidence: Evidence, told: str) -> None:
    assert deed(evidence) == told
