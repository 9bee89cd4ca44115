"""Runs on machines whose GPUs are as a recording says: refused, or told, with the GPU named."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from sgpu import RestartPolicy, distributed
from sgpu.contract.errors import InputError, RunError
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir

_HEALTHY = {"uncorrectable": 0, "remap_failed": False, "throttles": 0}


def _answer() -> int:
    return 7


@pytest.fixture
def recorded(tmp_path: pathlib.Path, monkeypatch: Any) -> Any:
    def record(*gpus: dict[str, Any], **besides: Any) -> None:
        path = tmp_path / "gpus.json"
        figures = [{"index": index, **_HEALTHY, **more} for index, more in enumerate(gpus)]
        path.write_text(json.dumps({"gpus": figures, **besides}))
        monkeypatch.setenv("SGPU_HEALTH_RECORDED", str(path))

    return record


def warnings(path: str) -> list[str]:
    return [event["message"] for event in read_all(RunDir(pathlib.Path(path)).events) if event["kind"] == "warning"]


def test_a_run_is_refused_where_a_gpu_is_bad(recorded: Any) -> None:
    recorded({}, {"uncorrectable": 5})
    run = distributed(gpus=2)(_answer).submit()
    with pytest.raises(RunError, match="gpu 1: ECC: 5 uncorrectable errors"):
        run.result(timeout_seconds=60)
    assert run.status.restarts == 0
    assert any("FAILED: gpu 1" in message for message in warnings(run.path))


def test_a_bad_gpu_is_left_out(recorded: Any) -> None:
    def visible() -> str:
        from sgpu import settings

        return ",".join(settings.cuda_visible_devices() or [])

    recorded({"lost": "GPU is lost"}, {}, {})
    run = distributed(gpus=2)(visible).submit()
    assert run.result(timeout_seconds=60) == ["1,2", "1,2"]
    assert any("left out: gpu 0: present" in message for message in warnings(run.path))


def test_a_run_that_may_goes_on_without_a_gpu_that_turns_out_bad(recorded: Any, tmp_path: pathlib.Path) -> None:
    """Exactly: the samples that two ranks have not trained are trained by one, in the same batches."""

    def train(recording: str, bad: str) -> list[list[float]]:
        import os
        import signal

        import torch

        import sgpu
        from sgpu import TrainLoop
        from sgpu.data import DataLoader

        sgpu.runtime.init()
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None])
        loop = TrainLoop(
            model=model, loader=DataLoader(data, global_batch_size=4, shuffle=True, seed=1), checkpoint_every=1
        )
        taken = []
        for (numbers,) in loop:
            if loop.step == 3 and sgpu.runtime.rank() == 1:
                pathlib.Path(recording).write_text(bad)
                os.kill(os.getpid(), signal.SIGKILL)
            taken.append([float(loop.step), *numbers[:, 0].tolist()])
        return taken

    recorded({}, {})
    recording = tmp_path / "gpus.json"
    bad = json.loads(recording.read_text())
    bad["gpus"][1]["uncorrectable"] = 5
    restarts = RestartPolicy(min_gpus=1)
    run = distributed(gpus=2, restarts=restarts)(train).submit(str(recording), json.dumps(bad))
    (taken,) = run.result(timeout_seconds=100)
    assert [step for step, *_ in taken][-3:] == [3.0, 4.0, 5.0]
    assert all(len(numbers) == 4 for _, *numbers in taken)
    sizes = [event["to_world_size"] for event in run.events() if event["kind"] == "resized"]
    assert sizes == [1]
    assert any("left out: gpu 1: ECC: 5 uncorrectable errors" in message for message in warnings(run.path))


@pytest.mark.parametrize("mode", ["warn", "off"])
def test_a_user_may_take_the_risk(recorded: Any, monkeypatch: Any, mode: str) -> None:
    monkeypatch.setenv("SGPU_HEALTH", mode)
    recorded({}, {"uncorrectable": 5})
    run = distributed(gpus=2)(_answer).submit()
    assert run.result(timeout_seconds=60) == [7, 7]
    assert any("FAILED: gpu 1" in message for message in warnings(run.path)) == (mode == "warn")


def test_a_wedged_driver_delays_the_start_and_is_told(recorded: Any) -> None:
    recorded({}, hang_seconds=600)
    run = distributed(gpus=2)(_answer).submit()
    assert run.result(timeout_seconds=60) == [7, 7]
    assert any("UNKNOWN: gpu: GPUs: no answer within 5 s" in message for message in warnings(run.path))


def test_a_setting_that_means_nothing_is_refused_before_anything_starts(monkeypatch: Any) -> None:
    monkeypatch.setenv("SGPU_HEALTH", "maybe")
    with pytest.raises(InputError, match="SGPU_HEALTH"):
        distributed(gpus=2)(_answer).submit()
