"""An agent can tell a helper process that hangs from one that works, and from one that is not there."""

from __future__ import annotations

import os
import signal
import subprocess

from sgpu.checkpoint.helper.asking import answers


def test_a_helper_that_stands_still_does_not_answer(helper: subprocess.Popen[str]) -> None:
    name = os.environ["SGPU_CHECKPOINT_HELPER"]
    assert answers(name, 60)
    helper.send_signal(signal.SIGSTOP)
    assert not answers(name, 0.5)
    helper.send_signal(signal.SIGCONT)
    assert answers(name, 60)


def test_one_that_is_not_there_does_not_hang() -> None:
    assert answers("sgpu-1-1-nobody", 60)
