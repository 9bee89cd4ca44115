"""The cache as people see it, and what a crash of the machine leaves of it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sgpu.cli import app
from sgpu.contract import atomic
from sgpu.contract.errors import InputError
from sgpu.data import VolumeDataset
from sgpu.data.caching.cachebook import CacheBook
from sgpu.data.caching.room import STATE
from sgpu.data.caching.sums import Sum, Sums
from tests.data.conftest import MakeVolume


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cache", *arguments])
    return result.exit_code, result.output


def damage(path: str) -> None:
    """Other bytes of the same size, under the same time."""
    status = os.stat(path)
    pathlib.Path(path).write_bytes(b"\0" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def reboot(home: pathlib.Path) -> None:
    """The cache knows other boots than the present one."""
    boots = home / "cache" / STATE / "boots"
    for path in boots.iterdir():
        path.unlink()
    atomic.write_json(boots / "an-earlier-boot", {"since_ns": 0}, durable=False)


def test_what_is_there_is_listed_with_who_uses_it(make_volume: MakeVolume, home: pathlib.Path) -> None:
    code, told = run("list")
    assert code == 2
    assert f"there is no cache in {home / 'cache'}" in told
    used, left = VolumeDataset(make_volume(7, name="used")), VolumeDataset(make_volume(3, name="left"))
    list(used), list(left)
    name, url = left.source.volume_id, left.url
    del left
    code, told = run("list")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in told.splitlines()[1:3]}
    assert lines[used.source.volume_id][1:4] == ["7", "700", "B"]
    assert "yes" in lines[used.source.volume_id]
    assert lines[name][-2:] == ["no", url]
    assert told.splitlines()[-1] == f"1 kB in {home / 'cache'}"


def test_only_what_nobody_reads_is_cleared(make_volume: MakeVolume, home: pathlib.Path) -> None:
    used, left = VolumeDataset(make_volume(7, name="used")), VolumeDataset(make_volume(3, name="left"))
    paths = list(used)
    list(left)
    name, room = left.source.volume_id, used.source.cache.room
    del left
    code, told = run("clear")
    assert (code, room.used_bytes()) == (0, 1000)
    assert f"would remove {name} (3 files, 300 B)" in told
    code, told = run("clear", "--yes")
    assert told.splitlines() == [f"removed {name} (3 files, 300 B)"]
    assert not (home / "cache" / name).exists()
    assert all(map(os.path.exists, paths))
    assert room.used_bytes() == 700
    code, told = run("clear", used.source.volume_id, "--yes")
    assert code == 2
    assert "is being read by a process" in told
    code, told = run("clear", "cats", "--yes")
    assert code == 2
    assert f"has no volume cats; it has {used.source.volume_id}" in told
    assert run("clear", "--yes") == (0, "nothing to remove\n")


def test_damage_is_found_by_checksum(make_volume: MakeVolume, home: pathlib.Path) -> None:
    volume = VolumeDataset(make_volume(5))
    paths = list(volume)
    assert run("verify") == (0, "5 whole, 0 damaged\n")
    damage(paths[2])
    (home / "cache" / volume.source.volume_id / "stranger").write_text("nobody knows me")
    code, told = run("verify")
    name = f"{volume.source.volume_id}/{volume.relative_path(paths[2])}"
    assert (code, told.splitlines()) == (1, [f"damaged {name}", "4 whole, 1 damaged, 1 without a checksum"])
    assert run("verify", "--remove")[0] == 0
    assert [os.path.exists(path) for path in paths] == [True, True, False, True, True]
    assert sorted(VolumeDataset(volume.url)) == sorted(paths)
    assert CacheBook(home / "cache").verify().whole == 5


def test_files_of_an_earlier_boot_are_looked_at_once(make_volume: MakeVolume, home: pathlib.Path) -> None:
    root = make_volume(6)
    paths = list(VolumeDataset(root))
    damage(paths[1])
    list(VolumeDataset(root))
    assert pathlib.Path(paths[1]).read_bytes() == bytes(100), "within one boot copies are trusted"
    reboot(home)
    again = VolumeDataset(root)
    found = list(again)
    assert [pathlib.Path(path).read_bytes() for path in found] == [
        (root / again.relative_path(path)).read_bytes() for path in found
    ]
    assert again.source.counts().downloads == 1
    before = again.source.cache._suspect_before_ns
    assert before > 0
    assert all(os.stat(path).st_ctime_ns >= before for path in paths)
    assert again.source.cache.room.used_bytes() == 600


def test_files_without_a_checksum_come_anew_after_a_boot(make_volume: MakeVolume, home: pathlib.Path) -> None:
    root = make_volume(4)
    list(VolumeDataset(root))
    (home / "cache" / STATE / "sums").unlink()
    reboot(home)
    again = VolumeDataset(root)
    assert len(list(again)) == 4
    assert again.source.counts().downloads == 4


def test_records_that_a_crash_cut_are_left_out(tmp_path: pathlib.Path) -> None:
    sums = Sums(tmp_path / "sums")
    assert sums.load() == {}
    sums.add_all([(1, Sum(10, 20, 30))])
    sums.add_all([(2, Sum(11, -21, 2**32 - 1))])
    sums.add_all([(1, Sum(12, 22, 32))])
    with sums.file.open("ab") as file:
        file.write(b"half a record")
    assert sums.load() == {1: Sum(12, 22, 32), 2: Sum(11, -21, 2**32 - 1)}


EIGHT = """
import sys
from sgpu.data.source import Source, SourceOptions
source = Source(SourceOptions(url=sys.argv[1]))
for number in range(len(source)):
    body = open(source.obtain(number), "rb").read()
    assert len(body) == 50_000 and int.from_bytes(body[:4], "little") == number_of(source, number)
print(source.counts().downloads)
""".replace("number_of(source, number)", "int(source.listing.path(number).split('/')[-1][:4])")


def test_eight_processes_and_one_cache_download_each_file_once(make_volume: MakeVolume, home: pathlib.Path) -> None:
    """One of them is killed in the middle of a download; those that come after do without it."""
    root = make_volume(24, size_bytes=50_000)
    log = home.parent / "fired"
    faulty = {**os.environ, "SGPU_FAILPOINT": "data.copy#5=kill", "SGPU_FAILPOINT_LOG": str(log)}
    victim = subprocess.run([sys.executable, "-c", EIGHT, str(root)], env=faulty, check=False, timeout=100)
    assert victim.returncode == -9
    assert "action=kill" in log.read_text()
    others = [
        subprocess.Popen([sys.executable, "-c", EIGHT, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    told = [other.communicate(timeout=110) for other in others]
    assert [other.returncode for other in others] == [0] * 8, [error for _, error in told]
    assert sum(int(out) for out, _ in told) == 20
    assert list((home / "cache" / STATE / "parts").iterdir()) == []
    assert VolumeDataset(root).source.cache.room.used_bytes() == 24 * 50_000


def test_a_cache_on_eight_megabytes(tmp_path: pathlib.Path, make_volume: MakeVolume) -> None:
    """A real file system that is full: what finds no room is read around it, and every byte is right."""
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        root = make_volume(12, size_bytes=1_000_000)
        volume = VolumeDataset(root, cache_dir=small / "cache", min_free_disk_bytes=0)
        with pytest.warns(UserWarning, match="has no room left"):  # noqa: PT031
            for _ in range(2):
                for path in volume:
                    assert pathlib.Path(path).read_bytes() == (root / volume.relative_path(path)).read_bytes()
        assert 6_000_000 <= volume.source.cache.room.used_bytes() <= 8 * 2**20
        assert volume.source.counts().bypassed > 0
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_there_must_be_a_cache(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="there is no cache in"):
        CacheBook(tmp_path)
