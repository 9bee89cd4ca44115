"""Ratchets: a change to a public name, a metric or a setting edits the list here, in the same commit."""

from __future__ import annotations

import importlib
import json
import pathlib

import pytest

from sgpu import settings
from sgpu.contract import errors, events
from sgpu.metrics import names

LISTS = json.loads((pathlib.Path(__file__).parent / "names.json").read_text())
MODULES = sorted(name for name in LISTS if name.startswith("sgpu"))
HINT = (
    "if the change is meant, edit tests/architecture/names.json in the same commit, and write a note in docs/changes/"
)


@pytest.mark.parametrize("module", MODULES)
def test_public_names(module: str) -> None:
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == LISTS[module], HINT
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
    assert set(loaded.__all__) <= set(dir(loaded))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "sgpu.training"])
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(module).no_such_name  # noqa: B018


def test_metric_names() -> None:
    assert {name: built_in.unit for name, built_in in names.BUILT_IN.items()} == LISTS["metrics"], HINT
    assert {name: built_in.unit for name, built_in in names.SYSTEM.items()} == LISTS["system metrics"], HINT
    assert {name: built_in.unit for name, built_in in names.NODE.items()} == LISTS["node metrics"], HINT


def test_settings() -> None:
    assert list(settings.NAMES) == LISTS["settings"], HINT


def test_event_kinds() -> None:
    assert sorted(events.KINDS) == LISTS["events"], HINT


def test_errors() -> None:
    found = sorted(
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.SgpuError)
    )
    assert found == LISTS["errors"], HINT
    for name in found:
        assert name in (errors.__doc__ or ""), f"{name} is not in the tree at the top of errors.py"
