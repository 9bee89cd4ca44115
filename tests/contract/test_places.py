"""What looks like a URL and is none, wherever a place is given."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.checkpoint import Catalog, CheckpointPolicy
from sgpu.cli.checkpoints import place
from sgpu.contract.errors import InputError
from sgpu.contract.places import check_place
from sgpu.data import VolumeDataset
from sgpu.widgets.checkpoints.place import find_place


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("dbfs:/Volumes/main/default/cats", "write /Volumes/main/default/cats, where it is mounted"),
        ("dbfs:///Volumes/main", "write /Volumes/main, where it is mounted"),
        ("dbfs:/mnt/cats", "write /dbfs/mnt/cats, where it is mounted"),
        ("dbfs://mnt/cats", "write /dbfs/mnt/cats, where it is mounted"),
        ("s3:/bucket/cats", "write s3://bucket/cats"), ("s3//bucket/cats", "write s3://bucket/cats"),
        ("file:/data/cats", "write file:///data/cats"),
    ],
)  # fmt: skip
def test_what_to_write_instead_is_told(given: str, instead: str) -> None:
    with pytest.raises(InputError) as caught:
        check_place("root", given)
    assert str(caught.value).endswith(instead)


@pytest.mark.parametrize(
    "given", ["/Volumes/a", "/dbfs/a", "s3://b/c", "file:///a", "a", "dbfs", "s3", "s3/b", "memory://a"]
)
def test_paths_and_urls_pass(given: str) -> None:
    check_place("root", given)


@pytest.mark.parametrize(
    "take", [VolumeDataset, CheckpointPolicy, Catalog, place, find_place], ids=lambda take: take.__name__
)
def test_wherever_a_place_is_given(
    take: Callable[[str], Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="write /Volumes/main, where it is mounted"):
        take("dbfs:/Volumes/main")
    assert os.listdir(tmp_path) == []
