"""A volume on a real S3 server: sizes, etags, large files in pieces, and credentials that expire in the middle."""

from __future__ import annotations

import datetime as dt
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import botocore.auth
import fsspec
import pytest

import sgpu.data.caching.reading
from sgpu.contract.errors import DataError, FetchError, ListingChangedError, VolumeError
from sgpu.data import DataLoader, TableDataset, VolumeDataset, VolumeFiles
from sgpu.data.fetching import child
from sgpu.data.volumes import url as url_volumes
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.url import UrlVolume
from sgpu.testing.proxy import FaultyProxy
from tests.checkpoint.servers import S3, s3, s3_server  # noqa: F401 - fixtures
from tests.data import keys

SIZES = (0, 1, 5_000, 300_000)


@pytest.fixture
def files(s3: str) -> dict[str, bytes]:  # noqa: F811
    """What is in the volume, by path."""
    wanted = {f"class{number % 2}/{number:02} ü.bin": os.urandom(SIZES[number % 4]) for number in range(10)}
    store = fsspec.filesystem("s3")
    store.pipe({f"{s3.removeprefix('s3://')}/{name}": body for name, body in wanted.items()})
    return wanted


@pytest.fixture
def proxy(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:  # noqa: F811
    """In front of the server, whose first key can expire there; `keys.for_s3` then gives the second."""
    with FaultyProxy("127.0.0.1", s3_server.port) as made:
        monkeypatch.setitem(keys.s3_options, "endpoint_url", f"http://127.0.0.1:{made.port}")
        keys.s3_keys[:] = [s3_server.key, "second"]
        yield made


def test_every_byte_size_and_etag(
    s3: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", 100_000)
    found = {}
    for path, info in VolumeDataset(s3, yield_metadata=True):
        found[info.path] = pathlib.Path(path).read_bytes()
        assert info.size_bytes == len(found[info.path])
        assert '"' not in info.etag
        assert len(info.etag) >= 32
    assert found == files


def test_credentials_that_expire_are_renewed_without_a_retry(
    s3: str, s3_server: S3, files: dict[str, bytes], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(sgpu.data.caching.reading, "_BACKOFF_SECONDS", 0.001)
    volume = VolumeDataset(s3, credentials=keys.for_s3)
    paths = iter(volume)
    got = {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in islice(paths, 4)}
    proxy.expire(s3_server.key)
    got |= {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in paths}
    assert got == files
    assert proxy.fired >= 1
    assert volume.source.counts().retries == 0
    proxy.expire("second")
    keys.s3_keys[:] = ["second"]
    with pytest.raises(DataError, match=r"these credentials, and also those that were looked up anew"):
        list(VolumeDataset(s3, credentials=keys.for_s3, cache_dir=volume.source.root / "other"))


def test_a_table_and_its_loader_over_s3(s3: str, tmp_path: pathlib.Path) -> None:  # noqa: F811
    import pyarrow.parquet as pq

    from tests.data.formats import table

    pq.write_table(table(range(100)), tmp_path / "a.parquet", row_group_size=10)
    fsspec.filesystem("s3").pipe_file(f"{s3.removeprefix('s3://')}/a.parquet", (tmp_path / "a.parquet").read_bytes())
    rows = TableDataset(s3, shuffle=True)
    assert (rows.rows, rows.groups) == (100, 10)
    with DataLoader(rows, 7, num_workers=1) as loader:
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(100))


@pytest.mark.parametrize("ranges", [100_000, 2_000])
@pytest.mark.parametrize("size", [5_000, 6_000])
def test_an_object_that_was_replaced_is_told(
    size: int, ranges: int, s3: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", ranges)
    volume: Any = VolumeDataset(s3)
    name = next(name for name, body in files.items() if len(body) == 5_000)
    fsspec.filesystem("s3").pipe_file(f"{s3.removeprefix('s3://')}/{name}", b"x" * size)
    with pytest.raises(
        ListingChangedError, match=r"changed since the volume was listed: listed with 5000 bytes"
    ) as got:
        list(volume)
    assert got.value.changed == [name]


def test_a_file_takes_one_request(s3: str, s3_server: S3, files: dict[str, bytes]) -> None:  # noqa: F811
    """Its version comes with its bytes."""
    store, asked = fsspec.filesystem("s3"), []

    async def count(method: str, *told: Any, **more: Any) -> Any:
        asked.append(method)
        return await call(method, *told, **more)

    volume = VolumeFiles(s3)
    call, store._call_s3 = store._call_s3, count
    for number in range(len(volume)):
        volume[number]
    del store._call_s3
    assert asked == ["get_object"] * len(files)


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_wrong_is_told_as_refused_credentials(
    hours: int, s3: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    volume = VolumeFiles(s3)
    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *told, **more: now(*told, **more) + dt.timedelta(hours=hours)
    )
    with pytest.raises(FetchError, match=r"these credentials, and also those that were looked up anew.*(?i:time|skew)"):
        volume[0]
    with pytest.raises(VolumeError, match=r"(?i:time|skew|credentials)"):
        VolumeFiles(s3)
    monkeypatch.undo()
    assert pathlib.Path(volume[0]).exists(), "once the clock is right"


def hastened(url: str, credentials: str | None = None) -> tuple[UrlVolume, dict[str, Entry]]:
    volume = UrlVolume(url, credentials)
    volume.hasten()
    return volume, {entry.path: entry for entry in volume.entries()}


def body_of(volume: UrlVolume, entry: Entry) -> bytes:
    descriptor = os.memfd_create("body")
    try:
        os.ftruncate(descriptor, entry.size_bytes)
        volume.copy(entry, descriptor)
        return os.pread(descriptor, entry.size_bytes + 1, 0)
    finally:
        os.close(descriptor)


def test_obstore_brings_the_same_bytes_and_notices_another_version(
    s3: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    volume, entries = hastened(s3)
    assert {path: body_of(volume, entry) for path, entry in entries.items()} == files
    large = next(entry for entry in entries.values() if entry.size_bytes == 300_000)
    assert volume.read(large, 100, 2_000) == files[large.path][100:2_000]
    assert volume.quick is not None
    assert volume.quick.answers >= len(files)
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", 100_000)
    assert body_of(volume, large) == files[large.path]
    fsspec.filesystem("s3").pipe_file(f"{s3.removeprefix('s3://')}/{large.path}", bytes(300_000))
    with pytest.raises(ListingChangedError):
        body_of(volume, large)


WORKERS = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torch.utils.data import IterableDataset
from sgpu.data import DataLoader, VolumeDataset

class Bodies(IterableDataset):
    def __init__(self):
        self.volume = VolumeDataset(sys.argv[1], cache_dir=sys.argv[2])
    def __iter__(self):
        for path in self.volume:
            quick = self.volume.source.volume.quick
            yield os.path.getsize(path), quick.answers if quick else 0

def read():
    with DataLoader(Bodies(), 4, num_workers=2, collate_fn=list) as loader:
        return [sample for batch in loader for sample in batch]

if len(sys.argv) > 3:
    import obstore
found = read()
print(sum(size for size, _ in found), max(answers for _, answers in found))
"""


@pytest.mark.parametrize("loaded_before", [False, True])
def test_workers_read_by_obstore_where_it_was_not_loaded_before_they_were_forked(
    loaded_before: bool, s3: str, files: dict[str, bytes], tmp_path: pathlib.Path  # noqa: F811
) -> None:  # fmt: skip
    more = ["loaded"] if loaded_before else []
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, s3, str(tmp_path / "own"), *more], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size, answers = map(int, done.stdout.split())
    assert size == sum(map(len, files.values()))
    assert (answers > 0) is not loaded_before


def test_what_obstore_fails_at_is_asked_of_s3fs(
    s3: str, s3_server: S3, files: dict[str, bytes], proxy: FaultyProxy  # noqa: F811
) -> None:  # fmt: skip
    volume, entries = hastened(s3, "tests.data.keys:for_s3")
    some, others = list(entries.values())[:5], list(entries.values())[5:]
    assert [body_of(volume, entry) for entry in some] == [files[entry.path] for entry in some]
    first = volume.quick
    proxy.expire(s3_server.key)
    assert [body_of(volume, entry) for entry in others] == [files[entry.path] for entry in others]
    # Obstore failed, where its open connection was cut without an answer; s3fs was refused, and looked for others.
    assert proxy.fired >= 1
    assert volume.quick is not first
    assert volume.quick is not None
    assert volume.quick.answers >= 1
    whole = next(entry for entry in entries.values() if entry.size_bytes == 300_000)
    proxy.fail("cut_reply", after_bytes=1_000)
    assert body_of(volume, whole) == files[whole.path]


READS_ALL = """
import json, sys
from sgpu.data.fetching import child

told, source = child.begin()
bodies = [source.volume.body(entry) for entry in source.listing.entries()]
clients = [name for name in ("fsspec", "s3fs", "aiobotocore", "botocore") if name in sys.modules]
print(json.dumps([sum(map(len, bodies)), source.volume.quick.answers, clients]))
child.leave(source)
"""


def test_a_process_beside_the_loop_reads_with_the_access_of_the_loop_and_loads_no_client_of_s3(
    s3: str, s3_server: S3, files: dict[str, bytes], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    (tmp_path / "reads_all.py").write_text(READS_ALL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = VolumeFiles(s3).source
    for name in s3_server.variables():
        monkeypatch.delenv(name)
    process, pipe = child.start("reads_all", source, {}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with process.stdout as told:
            assert json.loads(told.read()) == [sum(map(len, files.values())), len(files), []]
    finally:
        child.end(process, pipe, os.getpid())
    assert process.wait() == 0
    assert s3_server.secret not in repr(source.volume.access())


def test_access_that_runs_out_is_renewed_by_s3fs_and_obstore_reads_on(
    s3: str, s3_server: S3, files: dict[str, bytes], proxy: FaultyProxy  # noqa: F811
) -> None:  # fmt: skip
    loops = UrlVolume(s3, "tests.data.keys:for_s3")
    entries = list(loops.entries())
    assert not loops.others_are_quicker, "nobody was given access yet"
    volume = UrlVolume(s3, "tests.data.keys:for_s3", access=loops.access())
    volume.hasten()
    assert (loops.others_are_quicker, volume.others_are_quicker) == (True, False)
    assert [body_of(volume, entry) for entry in entries[:5]] == [files[entry.path] for entry in entries[:5]]
    first = volume.quick
    assert volume._opened is None, "no file system was wanted"
    proxy.expire(s3_server.key)
    assert [body_of(volume, entry) for entry in entries] == [files[entry.path] for entry in entries]
    assert proxy.fired >= 1
    assert volume._opened is not None
    assert volume.quick is not None
    assert volume.quick is not first
    assert volume.quick.answers >= 1


def test_any_name_is_read_with_access_from_elsewhere(s3: str) -> None:  # noqa: F811
    """By obstore, or, where it takes no such name, by s3fs."""
    names = [
        "a b",
        "\u00e9",
        "e\u0301",
        "%41",
        "a%2Fb",
        "#x",
        "q?y",
        "p+q",
        "a&b<c>'\"",
        "~`|{}^",
        "..x",
        "tab\there",
        "A/a",
        "a/A",
    ]
    store = fsspec.filesystem("s3")
    store.pipe({f"{s3.removeprefix('s3://')}/{name}": repr(name).encode() for name in names})
    loops = UrlVolume(s3)
    entries = sorted(loops.entries())
    volume = UrlVolume(s3, access=loops.access())
    volume.hasten()
    assert [(entry.path, volume.body(entry)) for entry in entries] == [
        (name, repr(name).encode()) for name in sorted(names)
    ]
    assert volume._opened is not None, "obstore reads a name with a tab now, and may list, too (see decision 0029)"


def test_without_obstore_s3fs_reads(
    s3: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "obstore", None)
    volume, entries = hastened(s3)
    assert {path: body_of(volume, entry) for path, entry in entries.items()} == files
    assert volume.quick is None
