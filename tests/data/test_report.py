"""Where the time goes: the rule as a table, and real loaders that are slow in one way each."""

from __future__ import annotations

import functools
import pathlib
import time
from typing import Any

import pytest

from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.measuring.report import LoaderReport, Measured, report_of
from sgpu.data.measuring.work import Work
from sgpu.data.source import Source
from tests.data.conftest import MakeVolume
from tests.data.samples import Numbers

FAR: dict[str, Any] = {"batches": 100, "seconds": 100.0}


@pytest.mark.parametrize(
    ("kind", "measured"),
    [
        ("unknown", Measured(batches=19, seconds=100.0, waited_seconds=99.0, work=Work(99.0, 99.0), workers=0)),
        ("unknown", Measured(batches=100, seconds=4.9, waited_seconds=4.9, work=Work(4.9, 4.9), workers=0)),
        ("unknown", Measured(batches=0, seconds=0.0, waited_seconds=0.0, work=Work(), workers=2)),
        ("compute", Measured(**FAR, waited_seconds=1.9, work=Work(80.0, 70.0), workers=1)),
        (
            "bandwidth",
            Measured(**FAR, waited_seconds=50.0, work=Work(190.0, 100.0), workers=2, bytes_per_second=8.1,
                     best_bytes_per_second=10.0),
        ),
        (
            "latency",
            Measured(**FAR, waited_seconds=50.0, work=Work(190.0, 100.0), workers=2, bytes_per_second=7.9,
                     best_bytes_per_second=10.0),
        ),
        ("latency", Measured(**FAR, waited_seconds=50.0, work=Work(50.0, 40.0), workers=0)),
        ("decode", Measured(**FAR, waited_seconds=50.0, work=Work(190.0, 10.0, 20.0), workers=2)),
        ("decode", Measured(**FAR, waited_seconds=50.0, work=Work(50.0, 0.0, 1.0), workers=0)),
        ("collate", Measured(**FAR, waited_seconds=50.0, work=Work(190.0, 10.0, 150.0), workers=2)),
        ("transfer", Measured(**FAR, waited_seconds=50.0, work=Work(90.0, 10.0, 20.0), workers=2)),
    ],
)  # fmt: skip
def test_the_rule(kind: str, measured: Measured) -> None:
    found = report_of(measured)
    assert found.kind == kind
    assert str(found) == found.sentence
    words = {"unknown": "Too little was seen", "compute": "Compute-bound: the loop waited for data for 2 % of 100 s"}
    assert str(found).startswith(words.get(kind, f"{kind.capitalize()}-bound: the loop waited for data for 50 % of"))
    assert found.files_share + found.decode_share + found.collate_share == pytest.approx(1.0, abs=1e-6)


class Clock:
    """Stands for time.perf_counter: what is slow adds to it, and nothing else counts."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Numbers):
    """Each sample takes a second to make."""

    def __init__(self, size: int, clock: Clock) -> None:
        super().__init__(size)
        self.clock = clock

    def __getitem__(self, number: int) -> int:
        self.clock.now += 1.0
        return number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_a_loader_says_what_its_samples_cost(clock: Clock) -> None:
    loader = DataLoader(Slow(40, clock), num_workers=0)
    for _ in loader:
        clock.now += 0.5
    found = loader.report()
    assert (found.kind, found.batches) == ("decode", 40)
    assert found.seconds == pytest.approx(39 * 1.5 + 0.5)
    assert found.waited_share == pytest.approx(39 / 59)
    assert "Use workers (num_workers=2 or more)" in found.sentence


def test_a_loader_says_what_collating_costs(clock: Clock) -> None:
    def collate(items: list[int]) -> list[int]:
        clock.now += 2.0
        return items

    loader = DataLoader(Numbers(40), num_workers=0, collate_fn=collate)
    assert len(list(loader)) == 40
    assert loader.report().kind == "collate"


def test_a_loader_that_is_never_waited_for(clock: Clock) -> None:
    loader = DataLoader(Numbers(40), num_workers=0)
    for _ in loader:
        clock.now += 1.0
    assert loader.report().kind == "compute"


def test_a_loader_says_what_files_cost(clock: Clock, make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the volume gives all that it has; then the same files one after the other, long after."""
    monkeypatch.setattr(Source, "waits_first", lambda *_: False)  # one thread alone turns the clock
    loader = DataLoader(VolumeDataset(make_volume(40, size_bytes=1_000_000)), num_workers=0)
    volume: Any = loader.dataset
    copy = type(volume.source.volume).copy

    def slow(*arguments: Any, seconds: float = 1.0) -> Any:
        clock.now += seconds
        return copy(*arguments)

    monkeypatch.setattr(type(volume.source.volume), "copy", slow)
    for path in loader:
        assert pathlib.Path(path[0]).exists()
    found = loader.report()
    assert found.kind == "bandwidth"
    assert found.bytes_per_second == pytest.approx(1e6, rel=0.05)
    clock.now += 1.0
    assert isinstance(found, LoaderReport)
    for path in volume.source.root.rglob("*.bin"):
        path.unlink()
    monkeypatch.setattr(type(volume.source.volume), "copy", functools.partialmethod(slow, seconds=10.0))
    for _ in loader:
        clock.now += 0.1
    assert loader.report().kind == "latency"


def test_a_short_run_is_told_nothing() -> None:
    loader = DataLoader(Numbers(100), num_workers=0)
    list(loader)
    assert loader.report().kind == "unknown"
    assert "100 batches" in str(loader.report())


def test_workers_tell_what_their_batches_cost(make_volume: MakeVolume) -> None:
    with DataLoader(VolumeDataset(make_volume(30)), 2, num_workers=1) as loader:
        list(loader)
        found = loader.report()
    assert found.files_share > 0
    assert found.batches == 15
