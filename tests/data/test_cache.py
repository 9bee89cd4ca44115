"""The cache: whole or absent, single flight, never above its limit, never a deadlock."""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import sgpu.data.caching.reading
from sgpu.contract import failpoint as failpoints
from sgpu.contract.errors import FetchError, InputError, ListingChangedError
from sgpu.data import DataLoader, VolumeDataset, VolumeFiles
from sgpu.data.caching.eviction import CachedFile, choose
from sgpu.data.caching.private import PrivateCopies, private_root
from sgpu.data.caching.room import STATE
from tests.data.conftest import MakeVolume, being, eventually
from tests.data.samples import Wrapped

OPEN = """
from sgpu.data.source import Source, SourceOptions
def open_(url, **more):
    return Source(SourceOptions(url=url, **more))
"""
Arm = Callable[[str], pathlib.Path]


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """Sets a failpoint in this process; gives the file that tells whether it fired."""
    log = tmp_path / "fired"

    def setting(points: str) -> pathlib.Path:
        monkeypatch.setenv("SGPU_FAILPOINT", points)
        monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(log))
        monkeypatch.setattr(sgpu.data.caching.reading, "_BACKOFF_SECONDS", 0.001)
        failpoints.reset()
        return log

    yield setting
    monkeypatch.delenv("SGPU_FAILPOINT", raising=False)
    failpoints.reset()


def content(number: int, size: int = 100) -> bytes:
    return number.to_bytes(4, "little") + bytes(size - 4)


def cached_bytes(cache: pathlib.Path) -> int:
    """All that is in the cache folder but its own books."""
    return sum(
        path.stat().st_size
        for path in cache.rglob("*")
        if path.is_file() and (STATE not in path.parts or "parts" in path.parts)
    )


def parts(home: pathlib.Path) -> list[pathlib.Path]:
    return list((home / "cache" / STATE / "parts").iterdir())


def script(text: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_copies_are_whole_and_carry_the_time_of_the_original(make_volume: MakeVolume) -> None:
    root = make_volume(9)
    for path in VolumeDataset(root):
        original = root / VolumeDataset(root).relative_path(path)
        assert pathlib.Path(path).read_bytes() == original.read_bytes()
        assert os.stat(path).st_mtime_ns == original.stat().st_mtime_ns
        assert not os.path.samefile(path, original)


def test_a_second_job_downloads_nothing(make_volume: MakeVolume) -> None:
    root = make_volume(9)
    list(VolumeDataset(root))
    again = VolumeDataset(root)
    list(again)
    counts = again.source.counts()
    assert (counts.requests, counts.downloads) == (9, 0)


def test_a_new_version_is_fetched_anew(make_volume: MakeVolume) -> None:
    root = make_volume(3)
    list(VolumeDataset(root))
    changed = root / "class0" / "0000.bin"
    changed.write_bytes(b"x" * 100)
    os.utime(changed, ns=(0, 5 * 10**9))
    (root / "class1" / "0001.bin").unlink()
    (root / "class1" / "0001.bin").mkdir()
    (root / "class1" / "0001.bin" / "deep").write_text("now a folder")
    found = {pathlib.Path(path).name: pathlib.Path(path).read_bytes() for path in VolumeDataset(root)}
    assert found == {"0000.bin": b"x" * 100, "deep": b"now a folder", "0002.bin": content(2)}
    (root / "class1" / "0001.bin" / "deep").unlink()
    (root / "class1" / "0001.bin").rmdir()
    (root / "class1" / "0001.bin").write_text("a file again")
    assert {pathlib.Path(path).read_bytes() for path in VolumeDataset(root)} >= {b"a file again"}
    assert VolumeDataset(root).source.cache.room.used_bytes() == cached_bytes(VolumeDataset(root).source.root)


def test_a_file_that_changes_under_a_run_is_told(make_volume: MakeVolume) -> None:
    root = make_volume(3)
    volume = VolumeDataset(root)
    (root / "class1" / "0001.bin").write_bytes(b"longer" * 50)
    with pytest.raises(ListingChangedError, match=r"class1/0001.bin .* changed since the volume was listed") as caught:
        list(volume)
    assert caught.value.changed == ["class1/0001.bin"]
    assert parts(pathlib.Path(os.environ["SGPU_HOME"])) == []


@pytest.mark.parametrize("point", ["data.copy", "data.publish"])
def test_a_process_killed_at_any_file_leaves_no_half_file(
    point: str, make_volume: MakeVolume, home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    root, log = make_volume(6), tmp_path / "fired"
    for nth in (1, 4, 6):
        victim = script(
            f"{OPEN}\nsource = open_({str(root)!r})\nfor number in range(6): source.obtain(number)",
            SGPU_FAILPOINT=f"{point}#{nth}=kill", SGPU_FAILPOINT_LOG=str(log),
        )  # fmt: skip
        victim.communicate(timeout=60)
        assert victim.returncode == -signal.SIGKILL
        assert len(parts(home)) == 1
        volume = VolumeDataset(root)
        assert parts(home) == []
        for path in (home / "cache" / volume.source.volume_id).rglob("*.bin"):
            assert path.read_bytes() == content(int(path.stem))
        assert volume.source.cache.room.used_bytes() == cached_bytes(home / "cache")
        assert len(list(volume)) == 6
        for path in (home / "cache" / volume.source.volume_id).rglob("*.bin"):
            path.unlink()
        (home / "cache" / STATE / "usage").unlink()
    assert log.read_text().count("action=kill") == 3


@pytest.mark.parametrize("flock", ["true", "lies"])
def test_four_processes_that_want_the_same_files(flock: str, make_volume: MakeVolume) -> None:
    root = make_volume(12, size_bytes=300_000)
    lie = "import fcntl; fcntl.flock = fcntl.fcntl = lambda *_: None" if flock == "lies" else ""
    others = [
        script(f"""{lie}
import pathlib
{OPEN}
source = open_({str(root)!r})
for number in range(12):
    path = source.obtain(number)
    body = pathlib.Path(path).read_bytes()
    assert len(body) == 300_000 and int.from_bytes(body[:4], "little") == int(pathlib.Path(path).stem), path
print(source.counts().downloads)
""")
        for _ in range(4)
    ]
    downloads = []
    for other in others:
        out, err = other.communicate(timeout=100)
        assert other.returncode == 0, err
        downloads.append(int(out.split()[-1]))
    if flock == "true":
        assert sum(downloads) == 12


def test_a_hiccup_is_retried_and_counted(make_volume: MakeVolume, arm: Arm) -> None:
    fired = arm("data.copy#2=errno:EIO")
    volume = VolumeDataset(make_volume(4))
    assert len(list(volume)) == 4
    assert "data.copy rank=None nth=2 action=errno" in fired.read_text()
    assert volume.source.counts().retries == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_is_named_with_volume_and_rank(
    workers: int, make_volume: MakeVolume, arm: Arm, home: pathlib.Path
) -> None:
    root = make_volume(4)
    fired = arm("data.copy=errno:EIO")
    with being(1, 2):
        with DataLoader(Wrapped(VolumeDataset(root)), 1, num_workers=workers) as loader:
            with pytest.raises(
                FetchError, match=rf"rank 1 could not read .* of volume {root} after 5 tries.*Input/output"
            ):
                next(iter(loader))
            with pytest.raises(FetchError) as caught:
                next(iter(loader))
    assert (caught.value.url, caught.value.rank) == (str(root), 1)
    assert caught.value.path.endswith(".bin")
    # five tries each time, and one for each file that a new process brings ahead
    assert fired.read_text().count("action=errno") in range(10, 10 + 2 * 4 + 1)
    room = VolumeDataset(root).source.cache.room
    eventually(lambda: parts(home) == [] and room.used_bytes() == 0)  # what is brought ahead still fails by itself


def test_a_file_that_is_gone_is_not_retried(make_volume: MakeVolume) -> None:
    root = make_volume(3)
    volume = VolumeDataset(root)
    (root / "class0" / "0000.bin").unlink()
    with pytest.raises(FetchError, match="after 1 try: FileNotFoundError"):
        next(iter(volume))


def test_a_full_disk_is_read_around(make_volume: MakeVolume, arm: Arm, home: pathlib.Path) -> None:
    fired = arm("data.copy=errno:ENOSPC")
    root = make_volume(5)
    volume = VolumeDataset(root)
    with pytest.warns(UserWarning, match="has no room left") as told:
        found = [pathlib.Path(path).read_bytes() for path in volume]
    assert len(told) == 1
    assert sorted(found) == sorted(content(number) for number in range(5))
    assert fired.read_text().count("action=errno") == 5
    assert cached_bytes(home / "cache") == 0
    assert volume.source.cache.room.used_bytes() == 0


def test_no_room_for_even_one_file_is_an_error_with_both_places(arm: Arm, home: pathlib.Path) -> None:
    """Nothing can be read in place behind a URL."""
    memory = fsspec.filesystem("memory")
    memory.pipe({"/nowhere/a": content(1)})
    files = VolumeFiles("memory://nowhere")
    fired = arm("data.copy=errno:ENOSPC")
    with (
        pytest.warns(UserWarning, match="no room left"),
        pytest.raises(FetchError, match=r"no room for a of volume memory://nowhere .* nor beside it in ") as caught,
    ):
        files[0]
    assert caught.value.path == "a"
    assert fired.read_text().count("action=errno") == 2
    memory.rm("/nowhere", recursive=True)


def test_a_cache_of_another_user_is_refused(make_volume: MakeVolume, tmp_path: pathlib.Path) -> None:
    root, cache = make_volume(2), tmp_path / "cache"
    files = VolumeFiles(root, cache_dir=cache)
    files[0]
    state = files.source.cache.room.state
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(state, 65534, 65534)
    with pytest.raises(InputError, match=rf"cache folder {cache} belongs to another user \(65534\).* with cache_dir"):
        VolumeFiles(root, cache_dir=cache)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/cache cannot be made: Not a directory"):
        VolumeFiles(root, cache_dir=tmp_path / "file" / "cache")


def test_a_limit_is_kept_and_residents_stay(make_volume: MakeVolume, home: pathlib.Path) -> None:
    """Half of the data fits: half of the reads hit from the second epoch on, whatever the order."""
    root = make_volume(40)
    volume = VolumeDataset(root, shuffle=True, cache_limit_bytes=2000)
    with pytest.warns(UserWarning, match="no room left .a limit of 2000 bytes"):  # noqa: PT031
        for path in volume:
            assert pathlib.Path(path).read_bytes() == content(int(pathlib.Path(path).stem))
            assert cached_bytes(home / "cache") <= 2000
    before = volume.source.counts()
    for _ in range(3):
        assert len(list(volume)) == 40
    after = volume.source.counts()
    assert cached_bytes(home / "cache") == 2000
    assert after.requests - before.requests == 120
    assert after.bypassed - before.bypassed == 60
    assert after.downloads == before.downloads == 20


def test_what_nobody_lists_goes_first_the_oldest_of_it(make_volume: MakeVolume, home: pathlib.Path) -> None:
    old, new = make_volume(10, name="old"), make_volume(10, name="new")
    first = VolumeDataset(old, cache_limit_bytes=1500)
    list(first)
    folder = home / "cache" / first.source.volume_id
    del first
    second = VolumeDataset(new, cache_limit_bytes=1500)
    list(second)
    assert len(list((home / "cache" / second.source.volume_id).rglob("*.bin"))) == 10
    assert sorted(int(path.stem) for path in folder.rglob("*.bin")) == [2, 4, 5, 7, 8]
    assert cached_bytes(home / "cache") == 1500


def test_eviction_is_all_or_nothing() -> None:
    def file(name: str, downloaded: int, resident: bool = False) -> CachedFile:
        return CachedFile(path=name, size_bytes=10, downloaded_ns=downloaded, resident=resident)

    files = [file("a", 3), file("b", 1), file("c", 2), file("d", 0, resident=True)]
    assert [found.path for found in choose(files, 15)] == ["b", "c"]
    assert choose(files, 0) == []
    assert choose(files, 31) == []
    assert [found.path for found in choose(files, 30)] == ["b", "c", "a"]


def test_two_jobs_share_a_cache_of_three_files(make_volume: MakeVolume, tmp_path: pathlib.Path) -> None:
    root, cache = make_volume(10, size_bytes=50_000), tmp_path / "cache"
    text = f"""
import pathlib, random, warnings
warnings.simplefilter("ignore")
{OPEN}
for _ in range(4):
    source = open_({str(root)!r}, cache_dir={str(cache)!r}, cache_limit_bytes=150_000)
    for number in random.sample(range(10), 10):
        assert len(pathlib.Path(source.obtain(number)).read_bytes()) == 50_000
        used = sum(p.stat().st_size for p in pathlib.Path({str(cache)!r}).glob("[!.]*/**/*.bin"))
        assert used <= 200_000, used
print("done")
"""
    for job in [script(text), script(text)]:
        out, err = job.communicate(timeout=100)
        assert out.strip() == "done", err


def test_too_little_free_disk_is_read_around(make_volume: MakeVolume, home: pathlib.Path) -> None:
    volume = VolumeDataset(make_volume(3), min_free_disk_bytes=2**62)
    with pytest.warns(UserWarning, match="min_free_disk_bytes"):
        assert len(list(volume)) == 3
    assert cached_bytes(home / "cache") == 0


def test_the_setting_of_free_disk_counts(make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_MIN_FREE_DISK_BYTES", "12345")
    assert VolumeDataset(make_volume(3)).source.cache.room.min_free_bytes == 12345
    assert VolumeDataset(make_volume(3), min_free_disk_bytes=7).source.cache.room.min_free_bytes == 7


def test_threads_that_first_find_no_room_at_once_keep_their_copies_together(tmp_path: pathlib.Path) -> None:
    def placed(copies: PrivateCopies, beginning: threading.Barrier, number: int) -> str:
        beginning.wait()
        place = copies.place(f"{number}.bin")
        copies.keep(place)
        return place

    for _ in range(20):
        copies = PrivateCopies("volume", str(tmp_path))
        with ThreadPoolExecutor(8) as pool:
            places = pool.map(partial(placed, copies, threading.Barrier(8, timeout=60)), range(8))
        assert len({pathlib.Path(place).relative_to(private_root()).parts[0] for place in places}) == 1


def test_private_copies_around_the_cache_keep_their_names_and_go(make_volume: MakeVolume) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/around/cat{number % 2}/{number}": content(number) for number in range(8)})
    files = VolumeFiles("memory://around", cache_limit_bytes=250)
    with pytest.warns(UserWarning, match="no room left"):
        paths = [files[number] for number in range(8)]
    for number, path in enumerate(paths):
        assert files.relative_path(path) == files.relative(number)
        assert pathlib.Path(path).parent.name == files.relative(number).split("/")[0]
        assert pathlib.Path(path).read_bytes() == content(int(pathlib.Path(path).name))
    private = [path for path in paths if path.startswith(str(private_root()))]
    assert len(private) == 6
    files.source.cache.private.kept = 2
    files[7]
    assert sum(os.path.exists(path) for path in private) < 3
    del files
    assert not any(os.path.exists(path) for path in private)
    memory.rm("/around", recursive=True)


class Flipping(MemoryFileSystem):  # type: ignore[misc]
    """A store that tells checksums and damages the first download of each file."""

    protocol = "flipping"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    flipped: set[str] = set()  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flipping://", "memory://")))

    def find(self, path: str, **more: Any) -> Any:
        found = super().find(path, **more)
        for name, facts in found.items():
            facts["md5Hash"] = base64.b64encode(hashlib.md5(self.store[name].getvalue()).digest()).decode()
        return found

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        opened = super().open(path, mode, **more)
        if mode == "rb" and path not in self.flipped:
            self.flipped.add(path)
            body = bytearray(opened.read())
            body[len(body) // 2] ^= 1
            return fsspec.implementations.memory.MemoryFile(self, path, bytes(body))
        return opened


def test_damaged_downloads_are_seen_by_checksum_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgpu.data.caching.reading, "_BACKOFF_SECONDS", 0.001)
    fsspec.register_implementation("flipping", Flipping, clobber=True)
    store = fsspec.filesystem("flipping")
    for number in range(5):
        store.pipe_file(f"/shop/{number}", content(number))
    Flipping.flipped.clear()
    files = VolumeFiles("flipping://shop")
    assert [pathlib.Path(files[number]).read_bytes() for number in range(5)] == [content(number) for number in range(5)]
    assert len(Flipping.flipped) == 5
    assert files.source.counts().retries == 5
