"""Volumes on Hugging Face's hub, by its own client: what is asked, what moves, what fails, who is let in."""

from __future__ import annotations

import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest
from fsspec.registry import _registry
from huggingface_hub import HfFileSystem, constants

import sgpu.data.caching.reading
from sgpu.contract.errors import FetchError, InputError, ListingChangedError, VolumeError
from sgpu.data import DataLoader, TableDataset, VolumeDataset, VolumeFiles
from sgpu.data.volumes import url as url_volumes
from sgpu.data.volumes.hub.place import place_of
from tests.data import keys
from tests.data.hub import Fault, Hub, running_hub
from tests.data.hub_repository import Repository, listed

CATS = "hf://datasets/org/cats"
NAMES = (
    "plain", "with space.bin", " leading", "trailing ", "ü-composed", "u\u0308-composed.bin", "hash#1", "percent%20",
    "%2F", "a?download=true", "plus+.bin", "Case/one", "case/one", "a/b/c/d/e", "quote'\"", "[x]{y}*", "&=;,@:$!()",
    "日本語.bin", "🙂", ".hidden", "resolve/main", "@main", "x.1", "empty.bin",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Where this process, and those that it starts, look for the hub."""
    monkeypatch.setattr(sgpu.data.caching.reading, "_BACKOFF_SECONDS", 0.001)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "of-hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "of-hub" / "token"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # it is read when the client is loaded
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()
        huggingface_hub.close_session()


def filled(hub: Hub, count: int = 12, size: int = 1_000, **more: Any) -> tuple[Repository, dict[str, bytes]]:
    """A repository with files of both kinds, and what is in them by path."""
    repository = hub.repository("datasets/org/cats", **more)
    wanted = {f"class{number % 2}/{number:02}.{('txt', 'bin')[number % 3 == 0]}": os.urandom(size)
              for number in range(count)}  # fmt: skip
    repository.commit({**wanted})
    return repository, wanted


def contents(files: VolumeFiles) -> dict[str, bytes]:
    return {files.relative(number): pathlib.Path(files[number]).read_bytes() for number in range(len(files))}


@pytest.mark.parametrize("private", [False, True])
def test_every_name_comes_in_one_request_and_lists_in_one_a_page(private: bool, hub: Hub, tmp_path: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    hub.page, hub.let_in = 10, {"key": True}
    monkeypatch.setenv("HF_TOKEN", "key")
    wanted = {name: os.urandom((1, 100, 5_000)[number % 3]) for number, name in enumerate(NAMES)} | {"empty.bin": b""}
    hub.repository("datasets/org/cats", private=private).commit(
        {f"in it/{name}": body for name, body in wanted.items()}
    )
    files = VolumeFiles(f"{CATS}/in it", pattern="**")
    pages = -(-len(list(listed(dict(wanted), ""))) // 10)
    assert hub.asked == {"revision": 1, "tree": pages}, "one for the commit, one a page"
    hub.asked.clear()
    assert contents(files) == wanted
    assert hub.asked["resolve"] == len(NAMES)
    assert hub.asked.keys() <= {"resolve", "resolve-cache", "large"}, "nothing else is asked"
    assert set(hub.tokens) == {"key"}
    assert list((tmp_path / "of-hub").rglob("*")) == [], "no second cache"
    entry = next(entry for entry in files.source.listing.entries() if entry.size_bytes == 5_000)
    assert files.source.volume.read(entry, 2, 700) == wanted[entry.path][2:700]


def test_a_long_list_is_asked_for_folder_by_folder(hub: Hub) -> None:
    hub.page = 5
    wanted = {f"{number % 4}/{number % 3}/{number:03}": b"%d" % number for number in range(240)} | {"top": b"t"}
    hub.repository("datasets/org/cats").commit({**wanted})
    listing = VolumeFiles(CATS, pattern="**").source.listing
    assert {entry.path: entry.size_bytes for entry in listing.entries()} == {k: len(v) for k, v in wanted.items()}
    assert 53 < hub.asked["tree"] < 53 + 1 + 3 * (1 + 4), "a page or three more for each folder that was divided"


@pytest.mark.parametrize(
    "root",
    ["datasets/org/cats", "org/model/some/folder", "datasets/org/cats@v1.0/a@b", "spaces/org/app@a%2Fb/x",
     "datasets/org/cats@refs/convert/parquet/x/y", "models/org/m@refs/pr/12", "datasets/org/cats/a@b/c"],
)  # fmt: skip
def test_a_place_is_the_one_that_the_client_means(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfFileSystem, "_repo_and_revision_exist", lambda *_: (True, None))
    theirs, ours = HfFileSystem(skip_instance_cache=True).resolve_path(root), place_of(root)
    assert (ours.kind, ours.name, ours.revision, ours.folder) == (
        theirs.repo_type, theirs.repo_id, theirs.revision, theirs.path_in_repo,
    )  # fmt: skip
    assert place_of(ours.root(ours.revision)) == ours


def test_what_is_pushed_meanwhile_is_not_read_and_what_stayed_is_not_read_again(hub: Hub) -> None:
    repository, wanted = filled(hub)
    files = VolumeFiles(CATS)
    changed, removed, *_ = wanted
    after: dict[str, bytes | None] = {changed: os.urandom(1_000), removed: None, "class9/new.txt": b"new"}
    repository.commit(after)
    assert contents(files) == wanted, "as it was listed"
    newer = VolumeFiles(CATS)
    assert contents(newer) == {path: body for path, body in {**wanted, **after}.items() if body is not None}
    assert newer.source.counts().downloads == 2
    then = files.source.listing.commit
    assert contents(VolumeFiles(f"{CATS}@{then}")) == wanted
    repository.branches["refs/pr/1"] = repository.branches["v1.0"] = then
    for revision in ("v1.0", "refs/pr/1"):
        assert VolumeFiles(f"{CATS}@{revision}").source.listing.id == files.source.listing.id


def test_where_history_was_rewritten_what_is_the_same_goes_on_and_the_rest_is_told(hub: Hub) -> None:
    repository, wanted = filled(hub)
    files = VolumeFiles(CATS)
    (changed, removed), names = list(wanted)[:2], [files.relative(number) for number in range(len(files))]
    repository.commit({changed: os.urandom(1_000), removed: None})
    repository.squash()
    with pytest.raises(ListingChangedError, match=f"{changed} in volume {CATS} changed since"):
        files[names.index(changed)]
    with pytest.raises(FetchError, match=f"could not read {removed} of volume {CATS} after 1 try"):
        files[names.index(removed)]
    kept = [number for number, name in enumerate(names) if name not in (changed, removed)]
    assert all(pathlib.Path(files[number]).read_bytes() == wanted[names[number]] for number in kept)


def test_a_state_of_another_commit_is_told_with_its_name(hub: Hub) -> None:
    repository, wanted = filled(hub)
    loader = DataLoader(VolumeDataset(CATS, shuffle=True), 5, collate_fn=list)
    next(iter(loader))
    state = loader.state_dict()
    (then,) = repository.commits
    repository.commit({"class9/new.txt": b"new"})
    with pytest.raises(ListingChangedError, match=rf"1 added \(class9/new.txt\).* as @{then} behind the repository"):
        DataLoader(VolumeDataset(CATS, shuffle=True), 5, collate_fn=list).load_state_dict(state)
    again = VolumeDataset(f"{CATS}@{then}", shuffle=True)
    loader = DataLoader(again, 5, collate_fn=list)
    loader.load_state_dict(state)
    assert len({again.relative_path(path) for batch in loader for path in batch}) == len(wanted) - 5


@pytest.mark.parametrize("by", ["HF_TOKEN", "credentials"])
def test_workers_and_fetcher_bring_each_file_once_with_a_token_that_nobody_else_sees(
    by: str, hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.let_in = {"hf_secret": True}
    monkeypatch.setenv(by if by == "HF_TOKEN" else keys.HUB_TOKEN, "hf_secret")
    _, wanted = filled(hub, 24, private=True)
    credentials = keys.of_hub if by == "credentials" else None
    volume = VolumeDataset(CATS, shuffle=True, credentials=credentials)
    first = volume.source.obtain(0)
    with DataLoader(volume, 3, num_workers=2, collate_fn=list) as loader:
        for _ in range(2):
            paths = [path for batch in loader for path in batch]
            assert {volume.relative_path(path): pathlib.Path(path).read_bytes() for path in paths} == wanted
    assert first in paths
    assert volume.source.counts().downloads == hub.asked["resolve"] == len(wanted)
    assert set(hub.tokens) == {"hf_secret"}
    assert "hf_secret" not in caplog.text
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > len(wanted)
    assert not any(b"hf_secret" in body for body in written)


def test_a_token_that_ran_out_is_renewed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = filled(hub, private=True)
    hub.let_in = {"first": True}
    monkeypatch.setenv(keys.HUB_TOKEN, "first")
    files = VolumeFiles(CATS, credentials=keys.of_hub)
    hub.let_in = {"second": True}
    monkeypatch.setenv(keys.HUB_TOKEN, "second")
    assert contents(files) == wanted
    assert files.source.counts().retries == 0, "a renewal is no failure"
    hub.let_in = {}
    entry = files.source.listing.entry(0)
    with pytest.raises(PermissionError, match=r"refuses these credentials, and also .*Invalid credentials.*renew them"):
        files.source.volume.body(entry)


def test_who_is_told_to_wait_waits(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    _, wanted = filled(hub, 3)
    until, refused = dict[str, float](), list[str]()

    def limit(kind: str) -> int | None:
        if kind not in ("revision", "resolve") or time.monotonic() >= until.setdefault(kind, time.monotonic() + 1):
            return None
        refused.append(kind)
        return 1

    hub.limit = limit
    files = VolumeFiles(CATS)
    assert contents(files) == wanted
    assert refused == ["revision", "resolve"], "nobody asks too early"
    assert files.source.counts().retries == 0
    assert "waiting 1 s. With a token (HF_TOKEN) it answers more" in caplog.text


@pytest.mark.parametrize("fault", ["cut", "flip", "short", "unavailable", "hold"])
def test_never_a_wrong_byte(fault: Fault, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", 30_000)
    _, wanted = filled(hub, 2, 20_000)
    body = os.urandom(100_000)
    hub.repositories["datasets/org/cats"].commit({"large.bin": body})
    files = VolumeFiles(CATS)
    if fault == "hold":
        monkeypatch.setattr(url_volumes, "STALL_SECONDS", 1.0)
    count = 1 if fault == "hold" else 3
    for number in range(count):
        hub.faults.append(fault)
        wanted_now = {**wanted, "large.bin": body}[files.relative(number)]
        assert pathlib.Path(files[number]).read_bytes() == wanted_now
    assert hub.fired == [fault] * count
    assert files.source.counts().retries >= count
    entry = files.source.listing.entry(0)
    hub.faults += [fault]
    if fault not in ("flip", "hold"):  # of a part the hub tells no checksum
        with pytest.raises(OSError, match=r"bytes came|RemoteProtocolError|HTTP503"):
            files.source.volume.read(entry, 10, 900)


def test_the_parts_of_a_large_file_ask_the_hub_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", 10_000)
    monkeypatch.setattr(url_volumes, "_RANGES_AT_ONCE", 1)
    repository, body = hub.repository("org/model"), os.urandom(95_000)
    repository.commit({"a.bin": body})
    assert pathlib.Path(VolumeFiles("hf://org/model")[0]).read_bytes() == body
    assert (hub.asked["resolve"], hub.asked["large"]) == (1, 10)
    hub.lasts = 4
    repository.commit({"b.bin": body[::-1]})
    files = VolumeFiles("hf://org/model")
    hub.asked.clear()
    repository.commit({"b.bin": body})
    assert pathlib.Path(files[1]).read_bytes() == body[::-1], "at the commit that was listed"
    assert (hub.asked["resolve"], hub.asked["large"]) == (3, 12), "a URL that has expired is asked for again"


def test_a_table_is_read_by_parts(hub: Hub, tmp_path: pathlib.Path) -> None:
    import pyarrow.parquet as pq

    from tests.data.formats import table

    pq.write_table(table(range(100)), tmp_path / "a.parquet", row_group_size=10)
    hub.repository("datasets/org/cats").commit({"data/a.parquet": (tmp_path / "a.parquet").read_bytes()})
    rows = TableDataset(f"{CATS}/data", shuffle=True)
    with DataLoader(rows, 7) as loader:
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(100))


def test_what_cannot_be_read_is_told_when_it_is_listed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(hub, gated=True)
    hub.let_in = {"other": False}
    with pytest.raises(
        VolumeError, match=r"dataset 'org/cats' of .* is gated.*without a token. Ask for access at http"
    ):
        VolumeFiles(CATS)
    with pytest.raises(VolumeError, match=r"no dataset 'org/cat' of .* seen without a token. Check its name.*HF_TOKEN"):
        VolumeFiles("hf://datasets/org/cat")
    monkeypatch.setenv("HF_TOKEN", "other")
    with pytest.raises(VolumeError, match=rf"is gated.* with this token. Ask .*{hub.url}/datasets/org/cats, and"):
        VolumeFiles(CATS)
    with pytest.raises(VolumeError, match=r"no model 'org/cats' of .* with this token. Check its name, and its kind"):
        VolumeFiles("hf://org/cats")
    monkeypatch.setenv("HF_TOKEN", "no such")
    with pytest.raises(VolumeError, match=r"refuses these credentials, and also .*Invalid credentials"):
        VolumeFiles(CATS)
    monkeypatch.delenv("HF_TOKEN")
    hub.repositories["datasets/org/cats"].gated = False
    with pytest.raises(VolumeError, match=r"'org/cats' of .* has no such revision. Check its branch, tag or commit"):
        VolumeFiles(f"{CATS}@no-such")
    with pytest.raises(VolumeError, match=r"class2/x does not exist.* 2 names in .*, as 'class0', 'class1'"):
        VolumeFiles(f"{CATS}/class2/x")


def test_what_names_no_repository_is_refused_at_once() -> None:
    for url in ("hf://cats", "hf://datasets/cats", "hf://datasets/org/cats@", "hf://dataset/org/cats"):
        with pytest.raises(VolumeError, match=r"names no repository\..* Expected hf://datasets/organisation/name"):
            VolumeFiles(url)


def test_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(_registry, "hf", raising=False)
    with pytest.raises(InputError, match=r'as with pip install "sgpu\[hf\]"'):
        VolumeFiles(CATS)
