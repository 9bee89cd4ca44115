"""Bad input is refused before anything starts, by name, with what was expected, found, and to be done."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest

import sgpu
from sgpu import CheckpointPolicy, RestartPolicy, distributed
from sgpu.contract.errors import InputError
from sgpu.launch import plan, registry
from sgpu.launch.local import Local, visible_gpus
from sgpu.launch.plan import Machine


def _train(x: int, *, y: int = 2) -> int:
    return x + y


def _nothing_was_made(home: pathlib.Path) -> None:
    assert not home.exists() or os.listdir(home) == []


_BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"gpus": 0}, "gpus must be 1 or more", "found 0"),
    ({"gpus": -1}, "gpus must be 1 or more", "found -1"),
    ({"gpus": 1.5}, "gpus must be a whole number", "found 1.5 (float)"),
    ({"gpus": 2.0}, "gpus must be a whole number", "found 2.0 (float)"),
    ({"gpus": "2"}, "gpus must be a whole number", "found '2' (str)"),
    ({"gpus": True}, "gpus must be a whole number", "found True (bool)"),
    ({"gpus": [0, 1]}, "gpus must be a whole number", "found [0, 1] (list)"),
    ({"on": "nope"}, "on='nope'", "known are local"),
    ({"on": None}, "on=", "found None"),
    ({"on": Local}, "on=", "Local"),
    ({"name": ""}, "name must be", "found ''"),
    ({"name": "  "}, "name must be", "found '  '"),
    ({"name": 5}, "name must be", "found 5"),
    ({"timeout_seconds": 0}, "timeout_seconds must be a number above 0", "found 0"),
    ({"timeout_seconds": -3}, "timeout_seconds must be a number above 0", "found -3"),
    ({"timeout_seconds": "60"}, "timeout_seconds must be a number above 0", "found '60'"),
    ({"timeout_seconds": True}, "timeout_seconds must be a number above 0", "found True"),
    ({"timeout_seconds": float("nan")}, "timeout_seconds must be a number above 0", "found nan"),
    ({"env": "A=1"}, "env must be a mapping", "found 'A=1'"),
    ({"env": ["A"]}, "env must be a mapping", "found ['A']"),
    ({"env": {"A": 1}}, "env must map text to text", "write 'A': '1'"),
    ({"env": {1: "A"}}, "env must map text to text", "found 1: 'A'"),
    ({"env": {"A": None}}, "env must map text to text", "found 'A': None"),
    ({"env": {"A=B": "1"}}, "env", "'A=B'"),
    ({"env": {"": "1"}}, "env", "''"),
    ({"env": {"A": "x\0y"}}, "env", "'A'"),
    ({"env": {"RANK": "0"}}, "env", "'RANK'"),
    ({"env": {"SGPU_RUN_DIR": "/x"}}, "env", "'SGPU_RUN_DIR'"),
    ({"restarts": -1}, "restarts must be", "found -1"),
    ({"restarts": "3"}, "restarts must be", "found '3'"),
    ({"restarts": 1.5}, "restarts must be", "found 1.5"),
    ({"restarts": True}, "restarts must be", "found True"),
    ({"restarts": {"max_restarts": 1}}, "restarts must be", "found {"),
    ({"checkpoints": 7}, "checkpoints must be a path, a URL or a CheckpointPolicy", "found 7"),
    ({"checkpoints": ""}, "checkpoints root must be a path or URL", "found ''"),
    ({"checkpoints": ["a"]}, "checkpoints must be", "found ['a']"),
]


@pytest.mark.parametrize(("options", "expected", "found"), _BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_an_option_is_refused_at_decoration(
    options: dict[str, Any], expected: str, found: str, home: pathlib.Path
) -> None:
    with pytest.raises(InputError) as caught:
        distributed(**options)
    assert expected in str(caught.value)
    assert found in str(caught.value)
    _nothing_was_made(home)


async def _async_function() -> None: ...


async def _async_generator() -> AsyncIterator[int]:
    yield 1


def _generator() -> Iterator[int]:
    yield 1


class _Class:
    def method(self) -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 1

    @property
    def a_property(self) -> int:
        return 1


class _AsyncCall:
    async def __call__(self) -> None: ...


class _GeneratorCall:
    def __call__(self) -> Iterator[int]:
        yield 1


_BAD_FUNCTIONS: list[tuple[str, Callable[[], object], str, str]] = [
    ("async def", lambda: _async_function, "async function _async_function()", "asyncio.run"),
    ("async generator", lambda: _async_generator, "async function _async_generator()", "asyncio.run"),
    ("generator", lambda: _generator, "generator _generator()", "return a list"),
    ("partial of async", lambda: functools.partial(_async_function), "async function", "asyncio.run"),
    ("partial of generator", lambda: functools.partial(_generator), "generator", "return a list"),
    ("async __call__", _AsyncCall, "async function", "asyncio.run"),
    ("generator __call__", _GeneratorCall, "generator", "return a list"),
    ("method", lambda: _Class.method, "method _Class.method()", "pass it the object"),
    ("classmethod", lambda: _Class.__dict__["of_class"], "classmethod", "decorate a plain function"),
    ("staticmethod", lambda: staticmethod(_train), "staticmethod", "decorate a plain function"),
    ("property", lambda: _Class.__dict__["a_property"], "property", "decorate a plain function"),
    ("class", lambda: _Class, "class _Class", "decorate a function that makes one"),
    ("built-in", lambda: len, "built-in len", "wrap it in a function"),
    ("built-in method", lambda: [].append, "built-in list.append", "wrap it in a function"),
    ("number", lambda: 5, "needs a function", "found 5 (int)"),
    ("None", lambda: None, "needs a function", "found None"),
    ("twice", lambda: distributed(gpus=1)(_train), "twice", "_train"),
]


@pytest.mark.parametrize(
    ("make", "expected", "advice"), [row[1:] for row in _BAD_FUNCTIONS], ids=[r[0] for r in _BAD_FUNCTIONS]
)
def test_a_kind_of_function_is_refused_at_decoration(
    make: Callable[[], object], expected: str, advice: str, home: pathlib.Path
) -> None:
    with pytest.raises(InputError) as caught:
        distributed(gpus=1)(make())  # type: ignore[arg-type]
    assert expected in str(caught.value)
    assert advice in str(caught.value)
    _nothing_was_made(home)


class _Callable:
    def __call__(self, x: int) -> int:
        return 2 * x

    def bound(self, x: int) -> int:
        return 3 * x


def _nested_function_with_a_first_argument_called_self() -> Callable[..., Any]:
    def function(self: int) -> int:
        return self

    return function


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_train, 5), (lambda x: 4 * x, 12), (functools.partial(_train, y=7), 10), (_Callable(), 6),
        (_Callable().bound, 9), (_nested_function_with_a_first_argument_called_self(), 3),
    ],
    ids=["function", "lambda", "partial", "callable object", "bound method", "first argument 'self'"],
)  # fmt: skip
def test_what_is_supported_runs_here_and_can_be_planned(
    function: Callable[..., Any], expected: int, home: pathlib.Path
) -> None:
    decorated = distributed(gpus=2)(function)
    assert decorated(3) == expected
    assert decorated.local(3) == expected
    assert decorated.plan(3).spec.world_size == 2
    _nothing_was_made(home)


def test_parentheses_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"write @distributed\(\) with parentheses above _train"):
        distributed(_train)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2), {}, "too many positional arguments"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((1,), {"x": 1}, "multiple values for argument 'x'"),
    ],
)
@pytest.mark.parametrize("call", ["submit", "plan", "distributed"])
def test_wrong_arguments_of_the_call_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: str, call: str, home: pathlib.Path
) -> None:
    decorated = distributed(gpus=2)(_train)
    with pytest.raises(InputError, match=r"_train\(x, \*, y=2\) cannot be called so") as caught:
        getattr(decorated, call)(*args, **kwargs)
    assert expected in str(caught.value)
    _nothing_was_made(home)


@pytest.mark.parametrize("gpus", [65, 10**6])
def test_more_workers_than_there_can_be(gpus: int, home: pathlib.Path) -> None:
    with pytest.raises(InputError, match=f"gpus={gpus}, but "):
        distributed(gpus=gpus)(_train).submit(1)
    _nothing_was_made(home)


@pytest.mark.parametrize(
    ("gpus", "there", "expected"), [(None, 0, 1), (None, 8, 8), (3, 8, 3), (8, 8, 8), (64, 0, 64), (1, 1, 1)]
)
def test_world_size(gpus: int | None, there: int, expected: int) -> None:
    assert plan.world_size(gpus, Machine(gpus=there)) == expected


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(InputError, match=r"gpus=9, but there are 8 .*ask for 8 or fewer, or gpus=None"):
        plan.world_size(9, Machine(gpus=8))


@pytest.mark.parametrize(
    ("present", "visible", "expected"),
    [(4, None, 4), (4, "0,2", 2), (4, "", 0), (4, "-1", 0), (0, None, 0), (0, "0,1", 0), (2, "0,1,2,3", 2)],
)
def test_visible_gpus(present: int, visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["null", "nvidiactl", "nvidia-uvm", *[f"nvidia{index}" for index in range(present)]]
    monkeypatch.setattr("sgpu.settings.device_names", lambda: names)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


@pytest.mark.parametrize("nodes", [0, -1, 1.5, True, "1", 65])
def test_a_number_of_nodes_that_cannot_be(nodes: Any) -> None:
    with pytest.raises(InputError, match=r"Local\(nodes="):
        Local(nodes=nodes)


@pytest.mark.parametrize("spares", [-1, 1.5, True, "1", None, 65])
def test_a_number_of_spares_that_cannot_be(spares: Any) -> None:
    with pytest.raises(InputError, match=r"Local\(spares="):
        Local(nodes=2, spares=spares)


def test_a_single_node_has_no_spares() -> None:
    with pytest.raises(InputError, match="use nodes=2"):
        Local(spares=1)


def test_unwritable_checkpoint_folder_is_refused_first(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file" / "below", tmp_path / "file", pathlib.Path("/proc/sgpu-checkpoints")):
        with pytest.raises(InputError) as caught:
            distributed(gpus=2, checkpoints=place)(_train).submit(1)
        assert str(place) in str(caught.value)
        assert isinstance(caught.value, InputError)
    _nothing_was_made(home)


@pytest.mark.parametrize("reason", ["a file", "full"])
def test_a_home_that_cannot_be_written_is_refused(
    reason: str, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a file":
        home.write_text("")
    else:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("sgpu.decorator.code.snapshot", full)
    with pytest.raises(InputError, match="run's folder cannot be written") as refused:
        distributed(gpus=1)(_train).submit(1)
    assert str(home / "runs") in str(refused.value)
    assert "set SGPU_HOME" in str(refused.value)
    assert home.is_file() or os.listdir(home / "runs") == []


def test_a_captured_lock_starts_nothing(home: pathlib.Path) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(InputError, match="variable 'lock'"):
        distributed(gpus=2)(lambda: lock).submit()
    _nothing_was_made(home)


def test_plan_tells_and_writes_nothing(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    decorated = distributed(
        gpus=2, name="cats", env={"A": "1"}, restarts=5, timeout_seconds=60, checkpoints=tmp_path / "kept"
    )(_train)
    planned = decorated.plan(1, y=3)
    assert (planned.spec.world_size, planned.spec.name, planned.spec.environment) == (2, "cats", {"A": "1"})
    assert planned.spec.parameters == {"x": "1", "y": "3"}
    told = str(planned)
    for part in ("2 CPU worker(s) on local", planned.run_folder, str(tmp_path / "kept"), "up to 5", "A=1", "mlflow.db"):
        assert part in told
    assert planned.command[1:3] == ("-m", "sgpu.agent")
    _nothing_was_made(home)
    assert not (tmp_path / "kept").exists()


def test_policies_and_back_ends_may_be_objects() -> None:
    policy = CheckpointPolicy(root="/x", every_steps=5)
    decorated = distributed(gpus=2, on=Local(), restarts=RestartPolicy(max_restarts=0), checkpoints=policy)(_train)
    spec = decorated.plan(1).spec
    assert (spec.checkpoints, spec.restarts.max_restarts, spec.backend) == (policy, 0, "local")
    assert registry.find("local") == Local()


def test_the_function_keeps_its_face() -> None:
    @distributed(gpus=2)
    def documented(x: int) -> int:
        """What it does."""
        return x

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it does."
    assert asyncio.iscoroutinefunction(documented) is False
    assert isinstance(documented, sgpu.DistributedFunction)
    assert isinstance({}, Mapping)
