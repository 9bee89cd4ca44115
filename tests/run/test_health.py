"""Runs on machines whose GPUs are as a recording says: refused, or told, with the GPU named."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from sgpu import distributed
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
