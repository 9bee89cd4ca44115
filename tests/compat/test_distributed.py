"""The decorator under its published parameters, run for real with two workers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

import sgpu
import sgpu.compat as serverless_gpu
from sgpu.compat import GPUType, distributed
from sgpu.contract.errors import InputError


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("sgpu.compat", ["distributed", "runtime", "data", "compute", "ray_launch", "ray_init"]),
        ("sgpu.compat.launcher", ["distributed"]),
        ("sgpu.compat.compute", ["GPUType"]),
        ("sgpu.compat.runtime", ["get_global_rank", "get_local_rank", "get_world_size"]),
        ("sgpu.compat.ray", ["ray_launch", "ray_init"]),
        (
            "sgpu.compat.data",
            ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"],
        ),
    ],
)
def test_published_import_paths_resolve(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    for name in names:
        assert getattr(found, name) is not None


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"'sgpu.compat' has no attribute 'no_such'; it has .*distributed"):
        _ = serverless_gpu.no_such


def test_what_a_worker_imports_drags_in_neither_launcher_nor_notebook_parts() -> None:
    seen = "import sys, sgpu.compat.runtime, sgpu.compat.compute; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True).stdout.split()
    assert "sgpu.compat.runtime" in loaded
    unwanted = {"torch", "mlflow", "IPython", "ipywidgets", "sgpu.decorator", "sgpu.run", "sgpu.launch"}
    assert not unwanted & set(loaded)


def test_the_list_of_results_and_one_warning_for_all_that_has_no_meaning() -> None:
    with pytest.warns(UserWarning, match="has no effect") as told:

        @distributed(gpus=2, gpu_type=GPUType.H100, remote=True)
        def greet(name: str) -> tuple[int, int, str]:
            runtime = serverless_gpu.runtime
            if runtime.get_local_rank() == 0:
                print("hello", name)
            return runtime.get_global_rank(), runtime.get_world_size(), name

    assert [str(each.message).split(" has no effect")[0] for each in told] == ["gpu_type='H100', remote=True"]
    assert told[0].filename == __file__
    assert greet.distributed("reader") == [(0, 2, "reader"), (1, 2, "reader")]
    assert "hello reader" in sgpu.runs()[0].logs(rank=0)
    assert "hello" not in sgpu.runs()[0].logs(rank=1)


def test_run_async_gives_a_handle_and_one_gpu_a_list_too() -> None:
    with pytest.warns(UserWarning, match=r"accelerator_type='GPU_8xH100' has no effect"):

        @serverless_gpu.distributed(num_accelerators=1, accelerator_type="GPU_8xH100", run_async=True)
        def square(number: int) -> int:
            return number * number

    handle = square.distributed(7)
    assert isinstance(handle, sgpu.Run)
    assert handle.result(timeout_seconds=60) == [49]
    assert square(3) == 9


def nothing() -> None:
    """Decorated, never run."""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": 0}, "gpus must be 1 or more"),
        ({"gpus": "8"}, "gpus must be a whole number"),
        ({"gpus": True}, "gpus must be a whole number"),
        ({"num_accelerators": -1}, "gpus must be 1 or more"),
        ({"gpus": 2, "num_accelerators": 4}, "gpus=2 and num_accelerators=4 are two names of one number"),
        ({"gpu_type": 8}, 'gpu_type must be a text as "H100"'),
        ({"accelerator_type": ""}, "accelerator_type must be a text"),
        ({"remote": "yes"}, "remote must be True or False; found 'yes'"),
        ({"run_async": 1}, "run_async must be True or False; found 1"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"timeout": "3h"}, "timeout must be a number of seconds above 0"),
        ({"timeout": float("inf")}, "timeout must be a number of seconds above 0"),
    ],
)
def test_bad_options_are_refused_at_decoration(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        distributed(**options)(nothing)


def test_the_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(InputError, match=r"write @distributed\(\) with parentheses above nothing"):
        distributed(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (90, 90.0), (1.5, 1.5), (timedelta(hours=3), 3 * 3600.0)]
)
def test_timeout_and_both_names_of_the_count_reach_the_run(
    timeout: float | timedelta | None, seconds: float | None
) -> None:
    plan = distributed(2, num_accelerators=2, timeout=timeout)(nothing).plan()
    assert (plan.spec.world_size, plan.spec.timeout_seconds) == (2, seconds)


def test_ray_is_refused_where_it_is_used() -> None:
    from sgpu.compat.ray import ray_init, ray_launch

    with pytest.raises(InputError, match=r"@ray_launch is not supported: .*@distributed\(gpus=N\)"):
        ray_launch(gpus=8, gpu_type="H100")(nothing)
    with pytest.raises(InputError, match=r"ray_init\(\) is not supported"):
        ray_init()
