"""Volumes to read and ranks to be."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import pytest

from sgpu.data.volumes import url as url_volumes

MakeVolume = Callable[..., pathlib.Path]


@pytest.fixture
def make_volume(tmp_path: pathlib.Path) -> MakeVolume:
    """make_volume(files, size_bytes=100, name="volume"): a folder of files 0000.bin... in three class folders."""

    def make(files: int, size_bytes: int = 100, name: str = "volume") -> pathlib.Path:
        root = tmp_path / name
        for number in range(files):
            path = root / f"class{number % 3}" / f"{number:04}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(number.to_bytes(4, "little") + bytes(size_bytes - 4))
            os.utime(path, ns=(0, (1_700_000_000 + number) * 10**9))
        return root

    return make


def eventually(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits until it is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def being(rank: int, world: int) -> Iterator[None]:
    """This process is a rank of a world."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture
def as_rank() -> Callable[[int, int], contextlib.AbstractContextManager[None]]:
    return being


def between_requests(monkeypatch: pytest.MonkeyPatch, range_bytes: int, act: Callable[[], None]) -> list[int]:
    """Files come in ranges of this size, one after the other, and after the first of one `act` strikes, once.

    Gives a list of where that one began, empty until then.
    """
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(url_volumes, "_RANGES_AT_ONCE", 1)
    write, fired = url_volumes._pwrite_all, list[int]()

    def write_and_act(descriptor: int, body: bytes, at: int) -> None:
        write(descriptor, body, at)
        if not fired:
            fired.append(at)
            act()

    monkeypatch.setattr(url_volumes, "_pwrite_all", write_and_act)
    return fired
