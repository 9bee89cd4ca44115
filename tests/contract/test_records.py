"""Appended lines: several writers, killed writers, broken lines."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys

import pytest

from sgpu.contract import records
from sgpu.contract.events import KINDS, emit
from sgpu.contract.rundir import RunDir

_WRITER = """
import pathlib, sys
from sgpu.contract import records
for number in range(400):
    records.append(pathlib.Path(sys.argv[1]), {"writer": sys.argv[2], "number": number, "pad": "x" * (number % 97)})
"""


def test_lines_of_several_processes_never_mix(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(index)]) for index in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = records.read_all(path)
    assert len([line for line in path.read_bytes().split(b"\n") if line]) == len(found) == 1600
    for index in range(4):
        assert [record["number"] for record in found if record["writer"] == str(index)] == list(range(400))


def test_a_torn_last_line_waits_for_its_rest(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.append(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b": 2')
    (first,) = records.read_from(path)
    assert first.record == {"a": 1}
    with path.open("ab") as file:
        file.write(b"}\n")
    (second,) = records.read_from(path, first.next_offset)
    assert second.record == {"b": 2}
    assert second.next_offset == path.stat().st_size


def test_what_follows_a_torn_line_is_not_lost_with_it(tmp_path: pathlib.Path) -> None:
    """A writer was killed in the middle of a line; the next one's record stands on a line of its own."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    records.append(path, {"c": 3})
    assert records.read_all(path) == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("broken", [b"\n", b"nonsense\n", b"[1, 2]\n", b'"text"\n', b"\xff\xfe\n", b"{\n", b"\0\0\0\n"])
def test_a_broken_line_is_passed_over(tmp_path: pathlib.Path, broken: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + broken + b'{"b": 2}\n')
    lines = list(records.read_from(path))
    assert [line.record for line in lines] == [{"a": 1}, {"b": 2}]
    assert lines[-1].next_offset == path.stat().st_size


def test_a_partial_write_is_completed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """write(2) may take only a part (a nearly full disk, a signal)."""
    path, original, sizes = tmp_path / "lines.jsonl", os.write, []

    def short(descriptor: int, content: bytes) -> int:
        sizes.append(len(content))
        return original(descriptor, content[:10])

    monkeypatch.setattr(os, "write", short)
    records.append(path, {"name": "a value longer than ten bytes"})
    assert len(sizes) > 1
    assert records.read_all(path) == [{"name": "a value longer than ten bytes"}]


def test_special_numbers_and_unknown_objects(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.append(path, {"nan": math.nan, "inf": -math.inf, "path": tmp_path})
    (found,) = records.read_all(path)
    assert math.isnan(found["nan"])
    assert found["inf"] == -math.inf
    assert found["path"] == str(tmp_path)


def test_no_file_is_no_lines(tmp_path: pathlib.Path) -> None:
    assert records.read_all(tmp_path / "none.jsonl") == []


def test_events_have_a_known_kind(tmp_path: pathlib.Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    emit(run, "warning", generation=2, rank=1, message="m")
    (event,) = records.read_all(run.events)
    assert {key: event[key] for key in ("kind", "generation", "rank", "message")} == {
        "kind": "warning", "generation": 2, "rank": 1, "message": "m",
    }  # fmt: skip
    assert "warning" in KINDS
    with pytest.raises(ValueError, match="unknown event 'warned'; known"):
        emit(run, "warned", generation=0)
