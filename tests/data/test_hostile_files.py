"""Bytes are right for every name, size and change under way, over two ranks with two workers each."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from crc32c import crc32c

from sgpu.contract.errors import ListingChangedError
from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.caching.sums import crc_of_path
from sgpu.data.volumes.folder import FolderVolume
from sgpu.data.volumes.holes import crc_after_zeros
from tests.data.conftest import being

NAMES = (
    "plain", "with space", " leading", "trailing ", "new\nline", "tab\t", "quote'\"", "back\\slash", "percent%20",
    "#?&", "[x]{y}*", "-rf", "~", "ü-composed", "u\u0308-decomposed", "UPPER", "upper", "日本語", "🙂", ".hidden",
    "x", "x.1",
    "..dots", os.fsdecode(b"not-utf8-\xff"), "n" * 255, "a/b/c/d/e/f/g",
)  # fmt: skip


def taken_by_two_ranks(root: pathlib.Path, **options: Any) -> Iterator[tuple[str, str]]:
    """Names and local paths, as two ranks with two workers each get them: each file once."""
    found: set[str] = set()
    for rank in range(2):
        with being(rank, 2):
            volume = VolumeDataset(root, shuffle=True, **options)
            with DataLoader(volume, 2, num_workers=2, collate_fn=list) as loader:
                for path in [path for batch in loader for path in batch]:
                    name = volume.relative_path(path)
                    assert name not in found, "each file once"
                    found.add(name)
                    yield name, path


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here
def test_every_name_and_size(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume"
    wanted = {}
    for number, name in enumerate(NAMES):
        body = os.urandom((0, 1, 4095, 4097, 100_000)[number % 5])
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
        wanted[name] = body
    found = taken_by_two_ranks(root, pattern="**")
    assert {name: pathlib.Path(path).read_bytes() for name, path in found} == wanted


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_file_of_five_gigabytes_with_holes_stays_small(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    size, spots = 5 * 2**30, {0: b"begin", 2**31 - 3: b"over the edge", 5 * 2**30 - 3: b"end"}
    with (root / "sparse").open("wb") as file:
        file.truncate(size)
        for place, text in spots.items():
            file.seek(place)
            file.write(text)
    if shutil.disk_usage(tmp_path).free < 6 * 2**30:
        pytest.skip("6 GB of free disk are needed: room is reserved for all of a file")
    for number in range(4):
        (root / f"{number}").write_bytes(b"small")
    paths = dict(taken_by_two_ranks(root, min_free_disk_bytes=0))
    assert sorted(paths) == ["0", "1", "2", "3", "sparse"]
    path = paths["sparse"]
    status = os.stat(path)
    assert (status.st_size, status.st_blocks * 512 < 2**24) == (size, True)
    with open(path, "rb") as copy:
        for place, text in spots.items():
            copy.seek(place)
            assert copy.read(len(text)) == text


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_file_that_changes_under_way_is_told_to_the_rank_that_has_it_and_the_other_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    for number in range(12):
        (root / f"{number}").write_bytes(b"%06d" % number)
    found: dict[str, bytes] = {}
    told: list[ListingChangedError] = []
    volumes = []
    for rank in range(2):
        with being(rank, 2):
            volumes.append(VolumeDataset(root, shuffle=True))
    (root / "7").write_bytes(b"others")
    os.utime(root / "7", ns=(0, 10**18))
    for rank, volume in enumerate(volumes):
        with being(rank, 2), DataLoader(volume, 2, num_workers=2, collate_fn=list) as loader:
            try:
                for batch in loader:
                    found |= {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in batch}
            except ListingChangedError as problem:
                told.append(problem)
    assert [problem.changed for problem in told] == [["7"]]
    assert len(found) >= 6
    assert all(body == b"%06d" % int(name) for name, body in found.items())


@pytest.mark.parametrize("zeros", [0, 1, 7, 4096, 1_000_003])
def test_holes_are_summed_as_the_zeros_that_they_are(zeros: int, tmp_path: pathlib.Path) -> None:
    assert crc_after_zeros(crc32c(b"before"), zeros) == crc32c(b"before" + bytes(zeros))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(9_000_000 + zeros)
        file.seek(5_000_000)
        file.write(b"data")
    assert crc_of_path(tmp_path / "sparse") == crc32c((tmp_path / "sparse").read_bytes())


@pytest.mark.parametrize("change", ["grown", "cut", "rewritten"])
def test_a_file_that_changes_while_it_is_copied_is_no_mixture(
    change: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    victim = root / "victim"
    victim.write_bytes(b"a" * 9_000_000)
    volume = VolumeDataset(root)
    read: Callable[[int, int], bytes] = os.read
    fired = []

    def read_and_change(descriptor: int, count: int) -> bytes:
        piece = read(descriptor, count)
        if not fired and os.path.samestat(os.fstat(descriptor), os.stat(victim)):
            fired.append(change)
            with victim.open("r+b") as file:
                if change == "cut":
                    file.truncate(5_000_000)
                else:
                    file.seek(0, os.SEEK_END if change == "grown" else os.SEEK_SET)
                    file.write(b"b" * 9_000_000)
            os.utime(victim, ns=(0, 10**18))
        return piece

    monkeypatch.setattr("sgpu.data.volumes.folder.os.read", read_and_change)
    with pytest.raises((ListingChangedError, OSError)) as caught:
        list(volume)
    assert fired == [change]
    assert "victim" in str(caught.value)
    assert not list(volume.source.cache.folder.rglob("victim"))
    assert isinstance(volume.source.volume, FolderVolume)
