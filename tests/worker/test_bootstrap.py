"""What a worker writes about its call, without starting one."""

from __future__ import annotations

import functools
import pathlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgpu.contract.errors import CheckpointMismatchError, PositionError, VolumeError
from sgpu.contract.heartbeat import Page, Slot
from sgpu.worker import bootstrap


@pytest.fixture
def slot(tmp_path: pathlib.Path) -> Slot:
    slot = Page.create(tmp_path / "page", 1).slot(0)
    slot.start(0)
    return slot


class _RefusesPickling:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (threading.Lock, "lock"), (lambda: (number for number in range(2)), "generator"),
        (lambda: [threading.Lock()], "list"), (lambda: {"a": threading.Thread(target=print)}, "dict"),
        (_RefusesPickling, "_RefusesPickling"), (lambda: sys._getframe(), "frame"),
    ],
)  # fmt: skip
def test_a_result_that_cannot_be_pickled_is_told(make: Callable[[], Any], kind: str) -> None:
    content, problem = bootstrap._pack_result(make())
    assert content is None
    assert problem is not None
    assert problem.startswith(f"a {kind} cannot be pickled: ")


def test_an_open_file(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "f").open("w") as file:
        content, problem = bootstrap._pack_result(file)
    assert content is None
    assert problem is not None
    assert "TextIOWrapper cannot be pickled" in problem


def test_results_that_can() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    values = {
        "non_leaf": weight * 2, "grad": weight.grad, "parameter": torch.nn.Parameter(torch.zeros(2)),
        "function": lambda x: x + 1, "partial": functools.partial(max, 3), "none": None, "bytes": b"\0",
        "module": torch.nn.Linear(2, 2), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    }  # fmt: skip
    content, problem = bootstrap._pack_result(values)
    assert problem is None
    again = pickle.loads(content or b"")
    assert torch.equal(again["non_leaf"], torch.full((3,), 2.0))
    assert torch.equal(again["grad"], torch.full((3,), 2.0))
    assert isinstance(again["parameter"], torch.nn.Parameter)
    assert again["function"](1) == 2
    assert again["partial"](5) == 5
    assert (again["none"], again["bytes"], again["dtype"]) == (None, b"\0", torch.bfloat16)


class _NeedsTwoError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class _HoldsALockError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def _outcome(error: BaseException, slot: Slot) -> Any:
    try:
        raise error
    except BaseException as raised:
        return bootstrap._exception(raised, "exception", slot, rank=1, generation=2)


def test_an_exception_goes_whole_where_it_can(slot: Slot) -> None:
    slot.beat(12)
    outcome = _outcome(KeyError("missing"), slot)
    again = pickle.loads(outcome.exception)
    assert (type(again), again.args) == (KeyError, ("missing",))
    assert (outcome.exception_type, outcome.rank, outcome.generation, outcome.step) == ("KeyError", 1, 2, 12)
    assert "raise error" in outcome.traceback


def test_a_text_of_millions_of_characters_is_told_by_its_ends(slot: Slot) -> None:
    """Status, events and the notebook carry it; the exception itself goes whole."""
    outcome = _outcome(ValueError("begin " + "x" * 3_000_000 + " end"), slot)
    for told in (outcome.message, outcome.traceback):
        assert len(told) < 30_000
        assert "begin xxx" in told
        assert told.endswith("xxx end")
        assert "characters: see the log" in told
    assert len(str(pickle.loads(outcome.exception))) == 3_000_010


class _SaysMoreError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class _CannotTravelError(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


@pytest.mark.parametrize(
    "error", [_NeedsTwoError(1, 2), _SaysMoreError(7), _HoldsALockError(), FileNotFoundError(2, "No such file", "x")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_exception_keeps_its_type_and_text_whatever_its_constructor_wants(error: Exception, slot: Slot) -> None:
    again = pickle.loads(_outcome(error, slot).exception)
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))
    assert getattr(again, "code", None) == getattr(error, "code", None)
    assert not hasattr(again, "lock")


@pytest.mark.parametrize("error", [_CannotTravelError()], ids=lambda error: type(error).__name__)
def test_an_exception_that_cannot_goes_as_text(error: Exception, slot: Slot) -> None:
    outcome = _outcome(error, slot)
    assert outcome.exception is None
    assert outcome.exception_type == type(error).__name__
    assert outcome.message == str(error)
    assert type(error).__name__ in outcome.traceback


@pytest.mark.parametrize(
    ("error", "collateral", "unrecoverable"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"), True, False),
        (RuntimeError("Broken pipe"), True, False),
        (ConnectionResetError("Connection reset by peer"), True, False),
        (
            torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
            True,
            False,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (ValueError("Connection closed by peer"), False, False),
        (ModuleNotFoundError("No module named 'x'"), False, True),
        (NameError("name 'x' is not defined"), False, True),
        (UnboundLocalError("x"), False, True),
        (NotImplementedError(), False, True),
        (CheckpointMismatchError("weight has another shape"), False, True),
        (PositionError("another data set"), False, True),
        (VolumeError("not mounted"), False, False),
        (KeyError("x"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_effects_and_hopeless_cases_are_told_apart(
    error: Exception, collateral: bool, unrecoverable: bool, slot: Slot
) -> None:
    outcome = _outcome(error, slot)
    assert (outcome.collateral, outcome.unrecoverable) == (collateral, unrecoverable)


def test_the_traceback_begins_with_the_users_own_frame(tmp_path: pathlib.Path, slot: Slot) -> None:
    file = tmp_path / "cell.py"
    file.write_text("def train():\n    return 1 / 0  # here\n")
    cell: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), cell)
    with pytest.raises(ZeroDivisionError) as caught:
        cell["train"]()
    text = bootstrap._user_traceback(caught.value)
    assert "return 1 / 0  # here" in text
    assert text.endswith("ZeroDivisionError: division by zero")


def test_a_worker_loads_no_notebook_and_no_mlflow() -> None:
    code = (
        "import sys, sgpu.worker.bootstrap, sgpu.training.loop\n"
        "heavy = {'IPython', 'ipywidgets', 'anywidget', 'mlflow', 'ray', 'sgpu.decorator', 'sgpu.run', 'sgpu.launch',"
        " 'sgpu.agent', 'sgpu.widgets'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
