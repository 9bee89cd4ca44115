"""Every kind of hang in one run of two ranks in DDP: told with what the rank does, and survived; and what is none."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu import RestartPolicy, Run, distributed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_LIMIT_SECONDS = 2.0
_LONGER_SECONDS = 2.7  # than the limit


def _train(folder: str, limit: float, longer: float) -> int:
    import ctypes
    import json
    import os
    import pathlib
    import signal
    import subprocess
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    import sgpu
    from sgpu import settings

    def locks_twice(library: Any) -> None:
        """No signal ends this wait."""
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    def is_stopped() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def spins() -> None:
        while True:
            pass

    def holds_the_lock_of_the_interpreter() -> None:
        locks_twice(ctypes.PyDLL(None))

    def blocks_in_c() -> None:
        locks_twice(ctypes.CDLL(None))

    def waits_for_the_other() -> None:
        dist.recv(torch.zeros(1), src=1 - rank)

    kinds = [is_stopped, spins, holds_the_lock_of_the_interpreter, blocks_in_c, waits_for_the_other]

    def note(name: str, **facts: Any) -> None:
        (pathlib.Path(folder) / name).write_text(json.dumps(facts))

    class SlowToSave:
        def state_dict(self) -> dict[str, Any]:
            if settings.generation() == 0 and not (pathlib.Path(folder) / "saved").exists():
                time.sleep(longer)
                note("saved")
            return {"nothing": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def is_stopped_for_a_while() -> None:
        at = time.monotonic()
        subprocess.Popen(["sh", "-c", f"sleep {limit / 3}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        note("continued", seconds=time.monotonic() - at)

    def does_what_is_no_hang(step: int) -> None:
        if step == 1:
            time.sleep(longer)
            note("first step")
        elif step == 2 and rank == 1:
            is_stopped_for_a_while()
        elif step == 3 and rank == 1:
            with sgpu.runtime.section("export", 60):
                until, library = time.monotonic() + longer, ctypes.PyDLL(None)
                while time.monotonic() < until:
                    library.usleep(200_000)  # with the interpreter's lock
            note("exported")

    sgpu.runtime.init()
    rank, generation = sgpu.runtime.rank(), settings.generation()
    model = DDP(torch.nn.Linear(4, 1))
    loop = sgpu.TrainLoop(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), extra={"slow": SlowToSave()},
        max_steps=6 + 3 * len(kinds), checkpoint_every=1,
    )  # fmt: skip
    for _ in loop:
        step = loop.step + 1
        if generation == 0:
            does_what_is_no_hang(step)
        number, rest = divmod(step - 6, 3)
        if rest == 0 and 0 <= number < len(kinds) and not (pathlib.Path(folder) / f"hung{number}.{rank}").exists():
            kind = kinds[number]
            if rank == 1 or kind is waits_for_the_other:
                note(f"hung{number}.{rank}", generation=generation, step=loop.step)
                kind()
        model(torch.ones(2, 4)).sum().backward()
    return loop.step


_TOLD = [
    (1, "it was stopped by a signal (SIGSTOP); see "),
    (1, "it keeps a core busy, in spins at "),
    (1, "it sleeps or waits (futex"),  # with the interpreter's lock
    (1, "it sleeps or waits (futex"),
    (
        None,
        "each waits for the others, so that none is to blame (rank 0 in 'step' after step 17, rank 1 in 'step' after",
    ),
]


def test_each_kind_of_hang_is_told_and_what_is_none_is_not(
    tmp_path: pathlib.Path, left: Callable[[Run], list[int]]
) -> None:
    policy = RestartPolicy(
        max_restarts=20, backoff_seconds=0.01, hang_seconds=_LIMIT_SECONDS,
        section_seconds={"first_step": 60.0, "checkpoint": 60.0},
    )  # fmt: skip
    marked = tmp_path / "marks"
    marked.mkdir()
    run = distributed(gpus=2, restarts=policy)(_train).submit(str(marked), _LIMIT_SECONDS, _LONGER_SECONDS)
    assert run.result(110) == [21, 21]
    marks = {path.name: json.loads(path.read_text()) for path in marked.iterdir()}
    assert {"first step", "continued", "exported", "saved"} <= marks.keys()
    assert marks["continued"]["seconds"] > _LIMIT_SECONDS / 4
    failures = [event for event in run.events() if event["kind"] == "failure"]
    for number, (rank, words) in enumerate(_TOLD):
        fired = marks[f"hung{number}.1"]
        (failure,) = [event for event in failures if event["generation"] == fired["generation"]]
        holds = "rank 1 holds the GIL in locks_twice at " in failure["message"]
        assert holds == (number == 2), failure["message"]
        _is_told(failure, rank, words, step=fired["step"], run=run)
    assert len(failures) == len(_TOLD), "and nothing else was taken for a hang"
    assert left(run) == []


def _is_told(failure: dict[str, Any], rank: int | None, words: str, *, step: int, run: Run) -> None:
    assert (failure["rank"], failure["step"], failure["cause"]) == (rank, step, f"no step for {_LIMIT_SECONDS:g} s")
    message = failure["message"]
    assert words in message
    assert f"s (limit {_LIMIT_SECONDS:g} s)" in message
    folder = pathlib.Path(run.path, "attempts", str(failure["generation"]))
    if rank is None:
        assert str(folder / "rank*" / "stacks") in message
        return
    assert f"rank {rank} " in message
    assert "completed no step for " in message
    assert f"in section 'step' after step {step}; " in message
    waiting = (folder / "rank0" / "stacks").read_text()
    assert "torch/autograd" in waiting, "the other waits in its backward pass, and wrote its stack too"
    if "(futex" in words:
        assert "), in locks_twice at " in message
    assert "state: " in (folder / "rank1" / "process").read_text()
