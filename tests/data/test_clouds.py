"""Volumes in Azure's and Google's stores, by emulators of both: what test_s3.py and test_versions.py ask of others."""

from __future__ import annotations

import datetime as dt
import gzip
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

import fsspec
import pytest
from azure.storage.blob import ContainerClient, ContentSettings
from google.oauth2.credentials import Credentials
from typer.testing import CliRunner

from sgpu.cli import app
from sgpu.contract.errors import DataError, FetchError, ListingChangedError, VolumeError
from sgpu.data import DataLoader, TableDataset, VolumeDataset, VolumeFiles
from sgpu.data.volumes import url as url_volumes
from tests.checkpoint.servers import AZURE_KEY, azure, azure_server, gcs, gcs_server  # noqa: F401 - fixtures
from tests.data import keys
from tests.data.conftest import being, between_requests

NAMES = (
    "plain", "with space", " leading", "trailing ", "ü-composed", "u\u0308-composed", "hash#1", "#/x", "percent%20",
    "%2F", "a?versionid=1", "a?generation=1", "what?", "plus+", "Case/one", "case/one", "ONE", "one", "a/b/c/d/e/f/g",
    "quote'\"", "[x]{y}*", "&=;,@:$!()", "日本語", "🙂", ".hidden", "tab\tin", "x", "x.1", "marked/in", "n" * 240,
)  # fmt: skip
SIZES = (0, 1, 100, 5_000)
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A fresh folder in a store, and how others change it."""

    url: str
    put: Callable[..., Any]
    remove: Callable[[str], Any]

    def fill(self, count: int, size: int) -> dict[str, bytes]:
        """`count` files, and what is in them by path."""
        wanted = {f"class{number % 2}/{number:02}.bin": os.urandom(size) for number in range(count)}
        for name, body in wanted.items():
            self.put(name, body)
        return wanted


@pytest.fixture(params=["azure", "gcs"])
def cloud(request: pytest.FixtureRequest, azure_server: str, gcs_server: str) -> Iterator[Cloud]:  # noqa: F811
    url: str = request.getfixturevalue(request.param)
    if request.param == "azure":
        folder = url.removeprefix("abfs://bucket/")
        with ContainerClient.from_connection_string(azure_server, "bucket") as client:
            yield Cloud(
                url=url,
                put=lambda name, body, **more: client.upload_blob(f"{folder}/{name}", body, overwrite=True, **more),
                remove=lambda name: client.delete_blob(f"{folder}/{name}"),
            )
    else:
        files = fsspec.filesystem("gs")
        yield Cloud(
            url=url,
            put=lambda name, body, **more: files.pipe_file(f"{url}/{name}", body, **more),
            remove=lambda name: files.rm_file(f"{url}/{name}"),
        )


def test_every_name_size_and_version(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: os.urandom(SIZES[number % 4]) for number, name in enumerate(NAMES)}
    for name, body in wanted.items():
        cloud.put(name, body)
    cloud.put("marked/", b"")
    cloud.put("empty/", b"")
    found = {}
    for path, info in VolumeDataset(cloud.url, pattern="**", yield_metadata=True):
        found[info.path] = pathlib.Path(path).read_bytes()
        assert info.size_bytes == len(found[info.path])
        assert len(info.etag) > 10
        assert '"' not in info.etag
    assert found == wanted
    source = VolumeFiles(cloud.url, pattern="*[!n]").source
    monkeypatch.setattr(source.volume, "_check", None)  # the version comes with the bytes
    for entry in source.listing.entries():
        if entry.size_bytes == 5_000:
            assert source.volume.read(entry, 2, 700) == wanted[entry.path][2:700]
    cloud.put("x/below", b"1")
    with pytest.raises(VolumeError, match=r"has both a file 'x' and a file 'x/below' below that name"):
        VolumeFiles(cloud.url)
    (below,) = VolumeFiles(cloud.url, pattern="x/*")
    assert pathlib.Path(below).read_bytes() == b"1"


@pytest.mark.parametrize("ranges", [8 << 20, 20_000])
def test_what_is_replaced_or_removed_after_the_listing_is_told(
    ranges: int, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", ranges)
    wanted = cloud.fill(4, 50_000)
    files = VolumeFiles(cloud.url)
    names = [files.relative(number) for number in range(4)]
    kept = files[0]
    for name in names[:2]:
        cloud.put(name, os.urandom(50_000))
    cloud.remove(names[2])
    for number in (1, 2):
        entry = files.source.listing.entry(number)
        with pytest.raises((ListingChangedError, FileNotFoundError)):
            files.source.volume.read(entry, 10, 20)
    with pytest.raises(ListingChangedError, match=f"{names[1]} in volume {cloud.url} changed since") as told:
        files[1]
    assert told.value.changed == [names[1]]
    with pytest.raises(FetchError, match=f"could not read {names[2]} of volume {cloud.url} after 1 try"):
        files[2]
    assert pathlib.Path(files[3]).read_bytes() == wanted[names[3]]
    assert (files[0], pathlib.Path(kept).read_bytes()) == (kept, wanted[names[0]]), "what a run has read stays"


def test_a_large_file_that_is_replaced_between_two_requests(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.fill(1, 50_000)
    files = VolumeFiles(cloud.url)
    fired = between_requests(monkeypatch, 20_000, lambda: cloud.put("class0/00.bin", bytes(50_000)))
    with pytest.raises(ListingChangedError, match=r"class0/00\.bin in volume"):
        files[0]
    assert fired == [0]
    assert not pathlib.Path(files.source.cache.local(0)).exists()


def test_workers_and_fetcher_bring_each_file_once_and_the_cache_knows_the_volume(cloud: Cloud) -> None:
    wanted = cloud.fill(13, 1_000)
    volume = VolumeDataset(cloud.url, shuffle=True)
    with DataLoader(volume, 3, num_workers=2, collate_fn=list) as loader:
        for _ in range(2):
            paths = [path for batch in loader for path in batch]
            assert {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in paths} == wanted
    assert volume.source.counts().downloads == len(wanted)
    told = CliRunner().invoke(app, ["cache", "list"])
    assert told.exit_code == 0
    assert cloud.url in told.output
    told = CliRunner().invoke(app, ["cache", "verify"])
    assert (told.exit_code, told.output) == (0, "13 whole, 0 damaged\n")


def test_a_file_that_is_replaced_during_an_epoch_ends_it(cloud: Cloud) -> None:
    wanted = cloud.fill(12, 1_000)
    volume = VolumeDataset(cloud.url)
    paths = iter(volume)
    got = {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in islice(paths, 2)}
    changed = [name for name in wanted if name not in got]
    for name in changed:
        cloud.put(name, os.urandom(1_000))
    with pytest.raises(ListingChangedError, match=f"in volume {cloud.url} changed since") as told:
        next(paths)
    assert set(told.value.changed) < set(changed)
    assert got.items() <= wanted.items()


def test_ranks_continue_exactly_as_one(cloud: Cloud) -> None:
    wanted = cloud.fill(11, 10)
    taken: list[str] = []
    for rank in range(2):
        with being(rank, 2):
            volume = VolumeDataset(cloud.url, shuffle=True)
            loader = DataLoader(volume, 2, collate_fn=list)
            taken += [volume.relative_path(path) for batch in islice(loader, 2) for path in batch]
            state = loader.state_dict()
    volume = VolumeDataset(cloud.url, shuffle=True)
    loader = DataLoader(volume, 2, collate_fn=list)
    loader.load_state_dict(state)
    rest = [volume.relative_path(path) for batch in loader for path in batch]
    assert (len(taken), sorted(taken + rest)) == (8, sorted(wanted))


def test_what_is_not_there_is_told_with_what_is(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgpu.data.volumes.stores._LOOK_SECONDS", 100.0)
    cloud.fill(2, 10)
    folder = cloud.url.rpartition("/")[2]
    with pytest.raises(VolumeError, match=r"no file that matches '\*\.jpg'; it has 2 others, as 'class0/00\.bin'"):
        VolumeFiles(cloud.url, pattern="*.jpg")
    with pytest.raises(VolumeError, match=rf"class2 does not exist or holds nothing.*{folder}', as 'class0', 'class1'"):
        VolumeFiles(f"{cloud.url}/class2")
    elsewhere = cloud.url.replace("://bucket/", "://no-such-bucket/")
    with pytest.raises(VolumeError, match=r"no-such-bucket/.* does not exist.* names in the store, as .*'bucket'"):
        VolumeFiles(elsewhere)


def test_a_table_is_read_by_parts(cloud: Cloud, tmp_path: pathlib.Path) -> None:
    import pyarrow.parquet as pq

    from tests.data.formats import table

    pq.write_table(table(range(100)), tmp_path / "a.parquet", row_group_size=10)
    cloud.put("a.parquet", (tmp_path / "a.parquet").read_bytes())
    rows = TableDataset(cloud.url, shuffle=True)
    assert (rows.rows, rows.groups) == (100, 10)
    with DataLoader(rows, 7) as loader:
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(100))


def test_what_is_marked_as_compressed_comes_as_it_is_kept_or_not_at_all(cloud: Cloud) -> None:
    body = gzip.compress(b"text" * 100)
    if cloud.url.startswith("abfs"):
        cloud.put("a.txt", body, content_settings=ContentSettings(content_encoding="gzip"))
        assert pathlib.Path(VolumeFiles(cloud.url)[0]).read_bytes() == body
        return
    cloud.put("a.txt", body, fixed_key_metadata={"content_encoding": "gzip"})
    with pytest.raises(DataError, match=r"a\.txt is marked as compressed \(Content-Encoding: gzip\)"):
        VolumeFiles(cloud.url)[0]


class Forbidding(BaseHTTPRequestHandler):
    """As Google's store answers who may not list."""

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        body = b'{"error": {"code": 403, "message": "nobody does not have storage.objects.list access"}}'
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


REFUSED = r"volume (abfs|gs)://bucket/.* cannot be listed: .*refuses these credentials, and also those .*renew them"


def test_refused_credentials_are_told_once_by_google(gcs: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setitem(keys.options, "endpoint_url", f"http://127.0.0.1:{listening.server_port}")
        with pytest.raises(VolumeError, match=REFUSED):
            VolumeFiles(gcs, credentials=keys.of_cloud)
        listening.shutdown()
        thread.join()


def test_a_token_of_google_that_ran_out_is_renewed(gcs: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    fsspec.filesystem("gs").pipe_file(f"{gcs}/a", b"1")
    gone = Credentials("gone", expiry=dt.datetime(2020, 1, 1))  # type: ignore[no-untyped-call]
    tokens = [gone, Credentials("new")]  # type: ignore[no-untyped-call]
    monkeypatch.setattr(keys, "of_cloud", lambda: {"token": tokens.pop(0)})
    (path,) = VolumeFiles(gcs, credentials="tests.data.keys:of_cloud")
    assert (pathlib.Path(path).read_bytes(), tokens) == (b"1", [])


def test_refused_credentials_are_told_once_by_azure(
    azure: str, azure_server: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    other = azure_server.replace(AZURE_KEY, "bm8=")
    monkeypatch.setitem(keys.options, "connection_string", other)
    with pytest.raises(VolumeError, match=REFUSED):
        VolumeFiles(azure, credentials=keys.of_cloud)
