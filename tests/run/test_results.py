"""What comes back from a run that succeeds."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sgpu
from sgpu import Run, distributed
from sgpu.contract.errors import InputError, ResultError


@pytest.mark.slow
def test_one_run_tells_all(capfd: pytest.CaptureFixture[str], left: Callable[[Run], list[int]]) -> None:
    """Order, arguments, environment, who is who, kinds of results, logs: one run for all of it."""

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    @distributed(gpus=3, env={"MY_SETTING": "set"}, name="tells")
    def tells(base: int, *, factor: int) -> dict[str, Any]:
        import os
        import random
        import sys

        import numpy as np
        import torch
        import torch.distributed as dist

        import sgpu

        device = sgpu.runtime.init()
        rank = sgpu.runtime.rank()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print(f"rank {rank} says hello")
        print(f"\rprogress {rank} 1/2\rprogress {rank} 2/2", file=sys.stderr)
        os.write(1, b"raw from %d\n" % rank)
        weight = torch.ones(2, requires_grad=True)
        return {
            "value": base * factor + rank,
            "who": (rank, sgpu.runtime.local_rank(), sgpu.runtime.world_size(), sgpu.runtime.is_main(), str(device)),
            "total": total.item(),
            "setting": os.environ["MY_SETTING"],
            "cwd": os.getcwd(),
            "draws": (random.random(), float(np.random.rand()), float(torch.rand(()))),
            "point": Point(rank),
            "function": lambda x: x + rank,
            "non_leaf": weight * 2,
            "array": np.full(50_000_000 // 8, rank, dtype=np.float64) if rank == 1 else None,
            "modules": sorted(
                {"mlflow", "IPython", "ipywidgets", "anywidget", "sgpu.decorator", "sgpu.launch"} & set(sys.modules)
            ),
        }

    results = tells.distributed(10, factor=2)
    assert [result["value"] for result in results] == [20, 21, 22]
    assert [result["who"] for result in results] == [
        (0, 0, 3, True, "cpu"), (1, 1, 3, False, "cpu"), (2, 2, 3, False, "cpu"),
    ]  # fmt: skip
    assert [result["total"] for result in results] == [6.0] * 3
    assert {result["setting"] for result in results} == {"set"}
    assert {result["cwd"] for result in results} == {str(pathlib.Path.cwd())}
    assert len({draw for result in results for draw in result["draws"]}) == 9, "each rank draws its own numbers"
    assert all(isinstance(result["point"], Point) for result in results)
    assert [result["point"].x for result in results] == [0, 1, 2]
    assert results[2]["function"](5) == 7
    assert torch.equal(results[0]["non_leaf"], torch.full((2,), 2.0))
    assert results[1]["array"].nbytes == 50_000_000
    assert np.all(results[1]["array"] == 1.0)
    assert [result["modules"] for result in results] == [[], [], []]

    (run,) = sgpu.runs()
    assert run.state == "SUCCEEDED"
    for rank in range(3):
        text = run.logs(rank)
        assert f"rank {rank} says hello\n" in text
        assert f"\rprogress {rank} 1/2\rprogress {rank} 2/2\n" in text
        assert f"raw from {rank}\n" in text
        assert not any(f"rank {other} says hello" in text for other in range(3) if other != rank)
    merged = run.logs()
    assert [merged.count(f"--- rank {rank}, generation 0") for rank in range(3)] == [1, 1, 1]
    assert left(run) == []
    assert repr(run) == f"<Run {run.id}: SUCCEEDED, step 0>"
    assert Run.open(run.id[-6:]).id == run.id
    assert Run.open(run.path).id == run.id
    with pytest.raises(InputError, match="has succeeded; call the function again"):
        run.resume()
    run.cancel()
    assert run.state == "SUCCEEDED"
    assert "no GPU here; 3 worker(s) on the CPU with gloo" in capfd.readouterr().out


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_names_its_rank(left: Callable[[Run], list[int]]) -> None:
    @distributed(gpus=2)
    def returns_a_lock_on_rank_1() -> Any:
        import threading

        import sgpu

        return threading.Lock() if sgpu.runtime.rank() == 1 else "fine"

    run = returns_a_lock_on_rank_1.submit()
    with pytest.raises(ResultError, match="the return value of rank 1 could not be brought back: a lock") as caught:
        run.result(90)
    assert caught.value.rank == 1
    assert run.state == "SUCCEEDED"
    assert left(run) == []


def test_here_it_runs_as_a_plain_function(home: pathlib.Path) -> None:
    @distributed(gpus=4)
    def where() -> tuple[int, int]:
        return sgpu.runtime.rank(), sgpu.runtime.world_size()

    assert where() == where.local() == (0, 1)
    assert not home.exists()


_NOTEBOOK = """
import os, pathlib, sys
import helpers, package
from sgpu import distributed

@distributed(gpus=1)
def asks():
    import os, package.part
    return helpers.VALUE, helpers.double(2), package.VALUE, os.path.basename(os.getcwd())

print(asks.submit().result(90), flush=True)
pathlib.Path("helpers.py").write_text("VALUE = 'edited'\\ndef double(x):\\n    return 20 * x\\n")
os.chdir(sys.argv[1])
print(asks.submit().result(90), flush=True)
"""


@pytest.mark.slow
def test_helpers_next_to_the_script_are_the_edited_ones(
    script: Callable[..., subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    """Edited between two runs of one process that does not reload it; workers in another folder; one GPU, a list."""
    folder = tmp_path / "notebook"
    (folder / "package").mkdir(parents=True)
    (folder / "helpers.py").write_text("VALUE = 'first'\ndef double(x):\n    return 2 * x\n")
    (folder / "package" / "__init__.py").write_text("from .part import VALUE\n")
    (folder / "package" / "part.py").write_text("VALUE = 'relative'\n")
    (tmp_path / "elsewhere").mkdir()
    output, _ = script(_NOTEBOOK, str(tmp_path / "elsewhere")).communicate(timeout=110)
    lines = [line for line in output.splitlines() if line.startswith("[")]
    assert lines == [
        "[('first', 4, 'relative', 'notebook')]", "[('edited', 40, 'relative', 'elsewhere')]",
    ], output  # fmt: skip


def test_a_run_that_is_not_there(home: pathlib.Path) -> None:
    assert sgpu.runs() == []
    with pytest.raises(InputError, match="no run 'abc'"):
        sgpu.attach("abc")
    with pytest.raises(InputError, match=r"it has no spec\.json"):
        Run.open(str(home / "runs" / "x"))
