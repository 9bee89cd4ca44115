"""Every error class: what it tells survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle

import cloudpickle
import pytest

from sgpu.contract import errors
from sgpu.contract.errors import RemoteTraceback, SgpuError

_CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SgpuError)]


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [pickle, cloudpickle, None], ids=["pickle", "cloudpickle", "deepcopy"])
def test_survives_copying_with_its_facts(kind: type[SgpuError], copied: object) -> None:
    error = kind("expected x, found y", rank=3, step=17, path="/p")
    again = copy.deepcopy(error) if copied is None else copied.loads(copied.dumps(error))  # type: ignore[attr-defined]
    assert type(again) is kind
    assert str(again) == "expected x, found y"
    assert (again.rank, again.step, again.path) == (3, 17, "/p")
    with pytest.raises(AttributeError, match=rf"{kind.__name__} has no fact 'size'; it has \['path', 'rank', 'step'\]"):
        _ = again.size


def test_the_tree_is_the_one_that_is_drawn() -> None:
    drawn = errors.__doc__ or ""
    for kind in _CLASSES:
        assert kind.__name__ in drawn
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.VolumeError, errors.InputError)
    assert issubclass(errors.VolumeError, errors.DataError)
    assert not issubclass(errors.RunError, errors.InputError)


def test_a_remote_traceback_shows_its_text() -> None:
    again = pickle.loads(pickle.dumps(RemoteTraceback("rank 1:\n  line")))
    assert str(again) == "\nrank 1:\n  line"
