"""TrainLoop in a bare process and under plain torchrun: spool, checkpoints, status and MLflow all the same."""

from __future__ import annotations

import json
import pathlib
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from sgpu.checkpoint import Catalog
from sgpu.contract.rundir import RunDir, all_runs
from sgpu.contract.status import read_status
from sgpu.metrics.spool import series

Script = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
    import os, pathlib, signal, sys
    import torch
    import sgpu
    from sgpu import TrainLoop
    from sgpu.contract.errors import InputError
    from sgpu.data import DataLoader

    notes, how = pathlib.Path(sys.argv[1]), sys.argv[2]
    sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    data = torch.utils.data.TensorDataset(torch.arange(24))
    loop = TrainLoop(
        model=torch.nn.Linear(1, 1), loader=DataLoader(data, batch_size=2, shuffle=True, seed=1, num_workers=0),
        epochs=2, checkpoint_every=2,
    )
    if how == "plain":
        try:
            sgpu.runs()[0].result()
        except InputError as error:
            (notes / "told").write_text(str(error))
    with (notes / f"rank{rank}").open("a", buffering=1) as trained:
        for (numbers,) in loop:
            if how == "kill" and loop.step == 5 and rank == 1 and not (notes / "killed").exists():
                (notes / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise" and loop.step == 5:
                raise ArithmeticError("the user's own")
            loop.log(loss=float(loop.step))
            trained.write(f"{loop.step} {numbers.tolist()}\\n")
"""


def read_mlflow(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    """What MLflow has of a run that has ended; on a machine in trouble the forwarder takes longer than the run."""
    import mlflow

    forwarders = [each for each in psutil.process_iter(["cmdline"]) if str(run.root) in (each.info["cmdline"] or [])]
    psutil.wait_procs(forwarders, timeout=100)
    kept = json.loads(run.mlflow.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own use of SQLAlchemy
        client = mlflow.MlflowClient(kept["tracking_uri"])
        return {
            name: sorted((each.step, each.value) for each in client.get_metric_history(kept["run_id"], name))
            for name in ("loss", "fetch_seconds")
        }


def only_run(home: pathlib.Path) -> RunDir:
    (run,) = all_runs(home)
    return run


def test_a_bare_process_leaves_a_run_like_any_other(script: Script, home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = script(TRAIN, str(tmp_path), "plain")
    assert done.returncode == 0, done.stderr
    assert "would wait for itself" in (tmp_path / "told").read_text()
    run = only_run(home)
    status: Any = read_status(run)
    assert (status.state, status.step, status.total_steps) in {("SUCCEEDED", 24, None), ("SUCCEEDED", 24, 24)}
    assert Catalog(str(run.checkpoints)).steps() == [20, 22, 24]
    wanted = [(step, step - 1.0) for step in range(1, 25)]
    assert series(run)["loss"] == wanted
    found = read_mlflow(run)
    assert found["loss"] == wanted
    assert [step for step, _ in found["fetch_seconds"]] == list(range(1, 25))


def test_a_bare_process_that_raises_is_a_failed_run(script: Script, home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = script(TRAIN, str(tmp_path), "raise")
    assert done.returncode == 1
    assert "ArithmeticError: the user's own" in done.stderr
    run = only_run(home)
    status: Any = read_status(run)
    assert status.state == "FAILED"
    assert "the user's own" in status.failure["message"]
    assert Catalog(str(run.checkpoints)).steps() == [2, 4]


@pytest.mark.slow
def test_torchrun_restarts_and_the_loop_goes_on_in_the_same_run(
    script: Script, home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    # One restart is needed; torchrun's own rendezvous sometimes burns another.
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--standalone")
    done = script(TRAIN, str(tmp_path), "kill", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    run = only_run(home)
    status: Any = read_status(run)
    assert (status.state, status.step) == ("SUCCEEDED", 12)
    assert any(f"resumed from step {step} " in done.stdout for step in (2, 4)), done.stdout
    for epoch in (range(6), range(6, 12)):
        samples = []
        for rank in range(2):
            steps: dict[int, str] = {}
            for line in (tmp_path / f"rank{rank}").read_text().splitlines():
                step, _, numbers = line.partition(" ")
                assert steps.setdefault(int(step), numbers) == numbers, f"step {step} was done again with other samples"
            samples += [number for step in epoch for number in json.loads(steps[step])]
        assert sorted(samples) == list(range(24))
    found = read_mlflow(run)
    assert found["loss"] == [(step, step - 1.0) for step in range(1, 13)]
