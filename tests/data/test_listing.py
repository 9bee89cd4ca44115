from __future__ import annotations

import datetime as dt
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import fsspec
import pytest

from sgpu.contract.errors import InputError, ListingChangedError, VolumeError
from sgpu.data import VolumeDataset, VolumeFiles
from sgpu.data.volumes import folder as folder_volumes
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.finding import list_volume
from sgpu.data.volumes.folder import FolderVolume
from sgpu.data.volumes.listing import Listing, difference, shared_listing, write_listing
from sgpu.data.volumes.opening import open_volume
from sgpu.data.volumes.pattern import compile_pattern
from sgpu.data.volumes.versions import stamp_of


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**/*", "a.jpg", True), ("**/*", "a/b/c", True), ("*.jpg", "a.jpg", True), ("*.jpg", "a/b.jpg", False),
        ("**/*.{jpg,png}", "a/b.png", True), ("**/*.{jpg,png}", "a/b.gif", False), ("a/**", "a/b/c", True),
        ("a/**", "b/a/c", False), ("[ab]?.x", "b1.x", True), ("[!ab]?.x", "b1.x", False), ("a.b", "aXb", False),
        ("**/c/*.bin", "c/1.bin", True), ("**/c/*.bin", "a/c/1.bin", True), ("**/c/*.bin", "ac/1.bin", False),
        ("*", "new\nline", True),
    ],
)  # fmt: skip
def test_patterns(pattern: str, path: str, fits: bool) -> None:
    assert bool(compile_pattern(pattern).fullmatch(path)) == fits


@pytest.mark.parametrize("pattern", ["", "/abs", 3, None, "[z-a]"])
def test_bad_patterns_are_refused(pattern: Any) -> None:
    with pytest.raises(InputError, match="pattern"):
        compile_pattern(pattern)


def test_odd_names_come_back_as_they_are(tmp_path: pathlib.Path) -> None:
    names = ["x", "x.1", "é/ü", "e\u0301", "new\nline", "A", "a", "sp ace", os.fsdecode(b"raw\xff")]
    for name in names:
        path = tmp_path / "odd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, errors="surrogateescape")
    files = VolumeFiles(tmp_path / "odd")
    assert [files.relative(number) for number in range(len(files))] == sorted(names, key=os.fsencode)
    for number in range(len(files)):
        local = files[number]
        assert files.relative_path(local) == files.relative(number)
        assert pathlib.Path(local).read_text(errors="surrogateescape") == files.relative(number)


def test_links_are_followed_once_and_dead_ones_told(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume"
    (root / "a").mkdir(parents=True)
    (root / "a" / "1").write_text("x")
    (root / "loop").symlink_to(root)
    (root / "linked").symlink_to(root / "a" / "1")
    (root / "dead").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe")
    with pytest.warns(UserWarning, match="dead in volume .* is a link to nothing"):
        found = list_volume(FolderVolume(str(root)), "**/*")
    assert [entry.path for entry in found] == ["a/1", "linked"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_mount_is_asked_many_questions_at_a_time_for_the_same_listing(
    slow: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "volume"
    names = [f"{a}/{b}/{number}" for a in ("a", "m", "z") for b in ("b", "y") for number in range(30)] + ["top", "é/u"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "a" / "also-z").symlink_to(root / "z")  # which of two ways counts must not hang on who was faster
    (root / "m" / "loop").symlink_to(root)
    for name in ("_SLOW_SCAN_SECONDS", "_SLOW_QUESTION_SECONDS"):
        monkeypatch.setattr(folder_volumes, name, 0.0 if slow else 1e9)
    threads = []
    made = folder_volumes.ThreadPoolExecutor
    monkeypatch.setattr(folder_volumes, "ThreadPoolExecutor", lambda count: threads.append(count) or made(count))
    found = list_volume(FolderVolume(str(root)), "**/*")
    wanted = [name.replace("z/", "a/also-z/") for name in names]
    assert [entry.path for entry in found] == sorted(wanted, key=os.fsencode)
    assert bool(threads) == slow
    closed = root / "m" / "closed"
    closed.mkdir()
    monkeypatch.setattr(folder_volumes.os, "scandir", _refuses(closed, os.scandir))
    with pytest.raises(VolumeError, match=r"folder .*m/closed of volume .* cannot be read"):
        list_volume(FolderVolume(str(root)), "**/*")


def _refuses(closed: pathlib.Path, scan: Any) -> Any:
    def scandir(path: str) -> Any:
        if path == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    return scandir


def test_missing_empty_unfit_volumes_are_refused_at_construction(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("x")
    for url, told in (
        (tmp_path / "none", "does not exist"), (tmp_path / "empty", "it is empty"), (tmp_path / "file", "is a file"),
        ("memory://nothing-here", "does not exist"), ("nonsense://x/y", "cannot be opened"),
    ):  # fmt: skip
        with pytest.raises(VolumeError, match=told) as caught:
            VolumeDataset(url)
        assert caught.value.url
    with pytest.raises(VolumeError, match=r"1 others, as 'a\.txt'\. Check the pattern"):
        VolumeDataset(tmp_path / "full", pattern="*.jpg")
    with pytest.raises(VolumeError, match="lies inside volume"):
        VolumeDataset(tmp_path / "full", cache_dir=tmp_path / "full" / "cache")
    for url in ("", 3, None):
        with pytest.raises(InputError, match="url must be"):
            VolumeDataset(url)  # type: ignore[arg-type]
    for arguments in (
        {"cache_limit_bytes": -1},
        {"min_free_disk_bytes": 1.5},
        {"cache_limit_bytes": True},
        {"seed": "1"},
    ):
        with pytest.raises(InputError, match=r"whole number"):
            VolumeDataset(tmp_path / "full", **arguments)  # type: ignore[arg-type]


def test_a_folder_without_permission_is_named(tmp_path: pathlib.Path) -> None:
    """In a process that has not root's right to read everything."""
    (tmp_path / "v" / "closed").mkdir(parents=True, mode=0)
    script = "import sys; from sgpu.data import VolumeDataset; VolumeDataset(sys.argv[1])"
    bare = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*bare, sys.executable, "-c", script, str(tmp_path / "v")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"VolumeError: .*closed.* cannot be read", done.stderr), done.stderr


@pytest.mark.parametrize("bad", ["a//b", "../b", "a/./b", "a/" + "x" * 256, "/a", "a/..", ".", "a\0b", "a/"])
def test_names_that_would_leave_the_cache_are_refused(bad: str, tmp_path: pathlib.Path) -> None:
    class Store(FolderVolume):
        def entries(self) -> Any:
            return iter([Entry("a/fine", 1, 1), Entry(bad, 1, 1), Entry("z/..fine/.x", 1, 1)])

    with pytest.raises(VolumeError, match="no local folder can hold"):
        list_volume(Store(str(tmp_path)), "**")


def test_an_object_that_is_also_a_prefix_is_refused_by_both_names(tmp_path: pathlib.Path) -> None:
    class Store(FolderVolume):
        def entries(self) -> Any:
            return iter([Entry("x/y", 1, 1), Entry("x", 1, 1), Entry("x.1", 1, 1)])

    with pytest.raises(VolumeError, match="both a file 'x' and a file 'x/y'"):
        list_volume(Store(str(tmp_path)), "**/*")


def test_listing_round_trip_find_and_difference(tmp_path: pathlib.Path) -> None:
    before = write_listing(tmp_path, "u", [Entry("a", 1, 1), Entry("b", 2, 2), Entry("d/e", 0, 3)])
    after = write_listing(tmp_path, "u", [Entry("a", 1, 1), Entry("b", 2, 9), Entry("c", 3, 3)])
    assert list(before.entries()) == [Entry("a", 1, 1), Entry("b", 2, 2), Entry("d/e", 0, 3)]
    assert before.total_bytes == 3
    assert [before.find(path) for path in ("a", "b", "c", "d/e", "zz", "")] == [0, 1, None, 2, None, None]
    found = difference(before, after)
    assert (found.added, found.removed, found.changed) == (["c"], ["d/e"], ["b"])
    assert "1 added (c), 1 removed (d/e), 1 changed (b)" in found.text()
    assert before.id != after.id
    assert write_listing(tmp_path, "u", list(before.entries())).id == before.id


def shared(root: pathlib.Path, shelf: pathlib.Path, scope: str | None) -> Listing:
    volume = FolderVolume(str(root))
    return shared_listing(volume, lambda: list_volume(volume, "**/*"), shelf, scope)


def test_one_process_lists_for_a_run(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    (root / "a").write_text("1")
    first = shared(root, tmp_path / "shelf", "run 1")
    (root / "b").write_text("2")
    assert shared(root, tmp_path / "shelf", "run 1").id == first.id
    assert len(shared(root, tmp_path / "shelf", "run 2")) == 2
    assert len(shared(root, tmp_path / "shelf", None)) == 2


def test_stores_by_url() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/shop/x": b"1", "/shop/x.1": b"22", "/shop/z/y": b"333"})
    files = VolumeFiles("memory://shop")
    found = {files.relative(number): pathlib.Path(files[number]).read_bytes() for number in range(len(files))}
    assert found == {"x": b"1", "x.1": b"22", "z/y": b"333"}
    memory.rm("/shop", recursive=True)


def test_file_urls_are_folders(tmp_path: pathlib.Path) -> None:
    assert open_volume(f"file://{tmp_path}").url == str(tmp_path)


def test_a_version_is_a_time() -> None:
    when = dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc)
    plain, tagged = stamp_of({"LastModified": when}), stamp_of({"LastModified": when, "ETag": "abc"})
    assert plain == int(when.timestamp() * 1e6)
    assert tagged // 10**6 == plain // 10**6
    assert tagged != stamp_of({"LastModified": when, "ETag": "abd"})
    assert stamp_of({}) == 0


def test_another_listing_is_refused_with_the_difference(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    for name in "abc":
        (root / name).write_text(name)
    state = VolumeDataset(root).state_dict()
    (root / "d").write_text("d")
    (root / "a").write_text("aaa")
    (root / "b").unlink()
    with pytest.raises(ListingChangedError, match=r"1 added \(d\), 1 removed \(b\), 1 changed \(a\)") as caught:
        VolumeDataset(root).load_state_dict(state)
    assert (caught.value.added, caught.value.removed, caught.value.changed) == (["d"], ["b"], ["a"])


def test_the_package_and_the_fetcher_load_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sgpu.data.fetching.fetcher, sys; print({'torch', 'fsspec'} & {*sys.modules})"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
