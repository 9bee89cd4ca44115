"""Raw bytes of a log as lines: progress bars collapse, long lines and long logs are cut with a note."""

from __future__ import annotations

import pathlib
import random
import re
from typing import Any

import pytest

from sgpu.widgets.reading.logs import KEEP_CHARS, LINE_BYTES, READ_BYTES, LogFollower, Logs


def follow(run: Any, rank: int = 0) -> LogFollower:
    follower = LogFollower(run.dir, rank)
    follower.refresh(run.dir.generations())
    return follower


def lines(follower: LogFollower) -> tuple[str, ...]:
    tail = follower.tail()
    assert tail is not None
    return tail.lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\ntwo\n", ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"\r 1%\r 2%\r 3%", (" 3%",)),
        (b"\r 1%\r100%\ndone\n", ("100%", "done")),
        (b" 50%\r", (" 50%",)),
        (b"bad \xff\xfe utf\n", ("bad \ufffd\ufffd utf",)),
        ("grün ✓\n".encode(), ("grün ✓",)),
        (b"\x1b[31mred\x1b[0m\x00\n", ("red",)),
        (b"\n\n", ("", "")),
        (b"", ()),
    ],
)
def test_table(run: Any, content: bytes, expected: tuple[str, ...]) -> None:
    run.log(content)
    assert lines(follow(run)) == expected


def test_any_cut_of_the_bytes_gives_the_same_lines(run: Any) -> None:
    content = "start\r\n 1%\r 2%\r\n3%\r✓ done\nü".encode() + b"\xff" + b"\r\rlast"
    expected = ("start", " 2%", "✓ done", "last")
    chosen = random.Random(3)
    for rank in range(2):
        follower = LogFollower(run.dir, rank)
        at = 0
        while at < len(content):
            size = chosen.randint(1, 4)
            run.log(content[at : at + size], rank=rank)
            follower.refresh([0])
            at += size
        assert lines(follower) == expected


def test_a_bar_in_one_place_stays_one_line(run: Any) -> None:
    follower = follow(run)
    for percent in range(100):
        run.log(f"\r{percent}%|{'#' * percent}".encode())
        follower.refresh([0])
    assert lines(follower) == (f"99%|{'#' * 99}",)


def test_a_line_of_5_megabytes_is_cut_and_says_so(run: Any) -> None:
    run.log(b"before\n" + b"x" * 5_000_000)
    follower = follow(run)
    told = lines(follower)
    assert told[0] == "[4.9 MB of the log are not shown here]"
    assert told[1].startswith("… xxxx")
    assert told[1].endswith("… [line of 65.5 kB, cut]")
    assert len(told[1]) < LINE_BYTES + 100
    run.log(b"\nafter\n")
    follower.refresh([0])
    assert lines(follower)[-1] == "after"


def bytes_read_by_this_process() -> int:
    found = re.search(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def test_a_hundred_thousand_lines_cost_one_small_read(run: Any) -> None:
    content = b"".join(b"line %06d of a chatty worker\n" % number for number in range(100_000))
    run.log(content)
    before = bytes_read_by_this_process()
    follower = follow(run)
    assert READ_BYTES <= bytes_read_by_this_process() - before <= READ_BYTES + 1000
    told = lines(follower)
    assert told[0] == "[3.0 MB of the log are not shown here]"
    assert told[-1] == "line 099999 of a chatty worker"
    tail = follower.tail()
    assert tail is not None
    assert tail.size_bytes == len(content)
    assert tail.path == str(run.dir.log(0, 0))


def test_memory_is_bounded_and_lines_keep_their_numbers(run: Any) -> None:
    follower = follow(run)
    before = None
    for number in range(400):
        run.log(b"".join(b"%06d %s\n" % (number * 10 + n, b"y" * 90) for n in range(10)))
        follower.refresh([0])
        tail = follower.tail()
        assert tail is not None
        assert len(tail.text) <= KEEP_CHARS
        assert tail.lines[0].startswith(f"{tail.first_line:06d}")
        if before is not None:
            overlap = tail.lines[: before.first_line + len(before.lines) - tail.first_line]
            assert before.lines[tail.first_line - before.first_line :] == overlap
        before = tail


def test_a_restart_goes_on_below_the_last_words_of_the_old_generation(run: Any) -> None:
    run.log(b"old start\n")
    follower = follow(run)
    run.log(b"Segmentation fault")
    run.log(b"new start\n", generation=2)
    follower.refresh([0, 1, 2])
    assert lines(follower) == ("old start", "Segmentation fault", "──── restart 2 ────", "new start")
    tail = follower.tail()
    assert tail is not None
    assert tail.generation == 2
    assert tail.path == str(run.dir.log(2, 0))


def test_nothing_new_gives_the_same_object_and_no_log_gives_none(run: Any) -> None:
    follower = follow(run)
    assert follower.tail() is None
    run.log(b"one\n")
    follower.refresh([0])
    first = follower.tail()
    follower.refresh([0])
    assert follower.tail() is first


def test_the_failing_rank_comes_first(run: Any) -> None:
    run.log(b"a\n", rank=0)
    run.log(b"b\n", rank=1)
    logs = Logs(run.dir, 2)
    logs.refresh()
    assert [tail.rank for tail in logs.tails()] == [0, 1]
    assert [tail.rank for tail in logs.tails(front=1)] == [1, 0]
