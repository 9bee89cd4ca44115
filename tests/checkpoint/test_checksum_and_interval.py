from __future__ import annotations

import math
import pathlib

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from sgpu.checkpoint.format.checksum import SpanChecksums, combine
from sgpu.checkpoint.format.manifest import FileEntry, Item, Manifest
from sgpu.checkpoint.interval import interval_seconds
from sgpu.contract.errors import CheckpointCorruptError, InputError


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_checksums_are_those_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 60))
def test_spans_do_not_depend_on_how_the_bytes_come(parts: list[bytes], piece: int) -> None:
    whole = b"".join(parts)
    sums = SpanChecksums([len(part) for part in parts])
    for start in range(0, len(whole), piece):
        sums.see(memoryview(whole)[start : start + piece])
    assert [span.crc32c for span in sums.spans()] == [crc32c(part) for part in parts]
    assert sums.whole() == crc32c(whole)


def test_too_few_and_too_many_bytes_are_told() -> None:
    with pytest.raises(ValueError, match="fewer"):
        SpanChecksums([3]).spans()
    sums = SpanChecksums([3])
    with pytest.raises(ValueError, match="more than the planned 3"):
        sums.see(memoryview(b"1234"))


def _manifest() -> Manifest:
    item = Item(name="w", offset=0, size_bytes=9, crc32c=5, data_offset=2, data_bytes=4)
    files = {"__0_0.distcp": FileEntry(size_bytes=9, crc32c=7, items=(item,))}
    return Manifest(
        step=3,
        attempt=1,
        world_size=2,
        files=files,
        created_unix_seconds=1.5,
        versions={"torch": "2"},
        metadata={"loss": float("inf")},
    )


def test_a_manifest_comes_back() -> None:
    assert Manifest.from_bytes(_manifest().to_bytes(), "here") == _manifest()


def test_every_flipped_bit_of_a_manifest_is_caught() -> None:
    content = _manifest().to_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
            Manifest.from_bytes(bytes(flipped), str(pathlib.Path("here")))


@pytest.mark.parametrize(
    ("overhead", "mtbf", "save", "budget", "expected"),
    [
        (1.0, 10_000.0, 0.0, 0.5, math.sqrt(20_000.0)),
        (10.0, 100.0, 1.0, 0.01, 1000.0),
        (0.0, 1000.0, 50.0, 0.01, 60.0),
        (0.1, math.inf, 1.0, 0.01, math.inf),
    ],
)
def test_interval(overhead: float, mtbf: float, save: float, budget: float, expected: float) -> None:
    found = interval_seconds(overhead_seconds=overhead, mtbf_seconds=mtbf, save_seconds=save, overhead_budget=budget)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("bad", [{"overhead_seconds": -1}, {"mtbf_seconds": 0}, {"overhead_budget": 1.5}])
def test_interval_refuses_nonsense(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        interval_seconds(**{"overhead_seconds": 1.0, "mtbf_seconds": 10.0, **bad})
