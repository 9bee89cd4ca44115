"""A file that is replaced by another of the same size: found, and never mixed with the first (S3: test_s3.py)."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from sgpu.contract.errors import DataError, ListingChangedError
from sgpu.data import DataLoader, VolumeDataset, VolumeFiles
from sgpu.data.volumes import url as url_volumes
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.versions import Facts, is_version
from tests.data.conftest import MakeVolume, being, between_requests
from tests.data.test_remote_faults import Quiet, Server

SIZE = 100_000
FIRST, SECOND = b"1" * SIZE, b"2" * SIZE
Replace = Callable[[str, bytes], None]


class Versioned(Quiet):
    """Knows ranges; tells of each file what its class says."""

    ranges = True
    tells: tuple[str, ...] = ()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or keyword in self.tells:
            super().send_header(keyword, value)

    def end_headers(self) -> None:
        path = pathlib.Path(self.translate_path(self.path))
        if path.is_file():
            if "Etag" in self.tells:  # as Go's servers write it
                self.send_header("Etag", f'W/"{hashlib.md5(path.read_bytes()).hexdigest()}"')
            if "Last-Modified" in self.tells and self.command == "GET" and "Range" in self.headers:
                self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        super().end_headers()


@pytest.fixture
def remote(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[tuple[str, Replace]]:
    """A volume of two files, and what replaces one."""
    kind: str = request.param
    if kind.startswith("http"):
        yield from _http(tmp_path / "files", tuple(kind.split()[1:]))
        return
    url, store = "memory://replaced", fsspec.filesystem("memory")

    def replace(name: str, body: bytes) -> None:
        store.pipe_file(f"{url}/{name}", body)

    for name in ("a", "b"):
        replace(name, FIRST)
    yield url, replace
    store.rm(url, recursive=True)


def _http(folder: pathlib.Path, tells: tuple[str, ...]) -> Iterator[tuple[str, Replace]]:
    folder.mkdir()
    times = iter(range(1_700_000_000, 1_800_000_000, 10))

    def replace(name: str, body: bytes) -> None:
        (folder / name).write_bytes(body)
        os.utime(folder / name, (0, next(times)))

    for name in ("a", "b"):
        replace(name, FIRST)
    handler = type("Handler", (Versioned,), {"tells": tells})
    with Server(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", replace
        listening.shutdown()
        thread.join()


EACH = pytest.mark.parametrize("remote", ["memory", "http Etag", "http Last-Modified"], indirect=True)


@EACH
@pytest.mark.parametrize("in_ranges", [False, True])
def test_a_file_that_was_replaced_after_the_listing(
    in_ranges: bool, remote: tuple[str, Replace], monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_ranges:
        monkeypatch.setattr(url_volumes, "RANGE_BYTES", 40_000)
    url, replace = remote
    files = VolumeFiles(url)
    kept = files[0]
    replace("a", SECOND)
    replace("b", SECOND)
    with pytest.raises(ListingChangedError, match=r"b in volume .* changed since the volume was listed") as caught:
        files[1]
    assert caught.value.changed == ["b"]
    with pytest.raises(ListingChangedError, match="b in volume"):
        files.source.volume.read(files.source.listing.entry(1), 0, 10)
    assert files[0] == kept, "what a run has read stays what it was"
    assert pathlib.Path(kept).read_bytes() == FIRST
    assert [pathlib.Path(path).read_bytes() for path in VolumeDataset(url)] == [SECOND, SECOND], "the next run sees it"


@EACH
def test_a_file_that_is_replaced_between_two_requests(
    remote: tuple[str, Replace], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, replace = remote
    files = VolumeFiles(url)
    fired = between_requests(monkeypatch, 40_000, lambda: replace("b", SECOND))
    with pytest.raises(ListingChangedError, match=r"b in volume"):
        files[1]
    assert fired == [0]
    assert not pathlib.Path(files.source.cache.local(1)).exists()


@pytest.mark.parametrize("remote", ["http"], indirect=True)
def test_a_server_that_tells_no_version_is_told_of(remote: tuple[str, Replace]) -> None:
    with pytest.warns(UserWarning, match=r"2 of 2 files of volume http.* come without a version"):
        files = VolumeFiles(remote[0])
    assert pathlib.Path(files[0]).read_bytes() == FIRST


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("remote", ["http Etag"], indirect=True)
def test_two_ranks_with_workers_and_a_fetcher_are_told(rank: int, remote: tuple[str, Replace]) -> None:
    url, replace = remote
    for name in "cdefghijkl":
        replace(name, FIRST)
    with being(rank, 2):
        volume: Any = VolumeDataset(url, shuffle=True)
        for name in "abcdefghijkl":
            replace(name, SECOND)
        with (
            pytest.raises(ListingChangedError, match="changed since the volume was listed"),
            DataLoader(volume, 2, num_workers=2) as loader,
        ):
            list(loader)


@pytest.mark.filterwarnings("ignore:the cache .* has no room left")
def test_a_local_file_that_is_read_in_place_is_the_one_that_was_listed(make_volume: MakeVolume) -> None:
    root = make_volume(2)
    files = VolumeFiles(root, cache_limit_bytes=0)
    assert pathlib.Path(files[0]).is_relative_to(root)
    other = root / files.relative(1)
    other.write_bytes(bytes(other.stat().st_size))
    with pytest.raises(ListingChangedError, match=r"0001\.bin in volume"):
        files[1]
    other.unlink()
    with pytest.raises(DataError, match=r"could not read class1/0001\.bin"):
        files[1]


@pytest.mark.parametrize(
    ("facts", "same"),
    [
        ({"ETag": '"x"'}, True), ({"ETag": 'W/"x"'}, True), ({"ETag": "y"}, False), ({}, None),
        ({"Last-Modified": "Tue, 14 Nov 2023 22:13:20 GMT"}, True),
        ({"updated": "2023-11-14T22:13:20Z"}, True), ({"updated": "2023-11-14T22:13:21Z"}, False),
        ({"mtime": 1_700_000_000}, True), ({"mtime": "yesterday"}, None),
    ],
)  # fmt: skip
def test_a_version_is_a_tag_or_else_a_time(facts: Facts, same: bool | None) -> None:
    assert is_version(Entry("p", 1, 1_700_000_000 * 10**6 + 17, etag="x"), facts) is same


def test_times_without_tags_differ_below_a_second() -> None:
    entry = Entry("p", 1, 1_700_000_000_250_000)
    told = [is_version(entry, {"mtime": 1_700_000_000 + part}) for part in (0.25, 0.75, 0)]
    assert told == [True, False, True], "a header tells whole seconds only"
