"""Whom the stacks of silent ranks blame."""

from __future__ import annotations

import pytest

from sgpu.agent.stacks import to_blame, waits

_SLEEPS = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/elastic/x.py", line 1 in watch

Current thread 0x00007f02 (most recent call first):
  File "/tmp/ipykernel_1/1.py", line 4 in train
  File "/lib/python3.11/site-packages/sgpu/worker/bootstrap.py", line 64 in _call
"""
_COLLECTIVE = """Current thread 0x00007f02 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/tmp/ipykernel_1/1.py", line 5 in train
"""
_BACKWARD = """Current thread 0x00007f02 (most recent call first):
  File "/lib/python3.11/site-packages/torch/autograd/graph.py", line 824 in _engine_run_backward
  File "/tmp/ipykernel_1/1.py", line 5 in train
"""


@pytest.mark.parametrize(("text", "expected"), [(_SLEEPS, False), (_COLLECTIVE, True), (_BACKWARD, True), ("", False)])
def test_waits(text: str, expected: bool) -> None:
    assert waits(text) is expected


@pytest.mark.parametrize(
    ("stacks", "blamed"),
    [
        ({0: _COLLECTIVE, 1: _SLEEPS}, 1),
        ({1: _SLEEPS, 0: _COLLECTIVE}, 1),
        ({0: _BACKWARD, 1: ""}, 1),
        ({0: _SLEEPS, 1: ""}, 1),
        ({2: _COLLECTIVE, 0: _BACKWARD}, 2),
        ({3: _SLEEPS, 1: _SLEEPS}, 3),
        ({1: ""}, 1),
    ],
)
def test_to_blame(stacks: dict[int, str], blamed: int) -> None:
    assert to_blame(stacks) == blamed
