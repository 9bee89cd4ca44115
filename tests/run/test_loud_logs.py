"""Four ranks that print a hundred thousand lines: every byte is on disk, and the view stays small."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from sgpu import distributed
from sgpu.contract.rundir import RunDir
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.showing.messages import Messages

pytestmark = pytest.mark.slow

RANKS = 4
LINES = 25_000
LONG_BYTES = 5_000_000


def loud() -> tuple[int, str]:
    """Prints bars, broken UTF-8, and a line of 5 MB; how many bytes that were, and their digest."""
    import os

    import sgpu

    rank = sgpu.runtime.rank()
    digest, written = hashlib.sha256(), 0
    pieces = [b"BEGIN\n"]
    for number in range(LINES):
        bar = b"\r%d%%" % (number % 100)
        broken = b" \xff\xc3(" if number % 100 == 0 else "é".encode()
        pieces.append(bar + b"\rrank %d line %d" % (rank, number) + broken + b"\n")
        if number == LINES // 2:
            pieces.append(b"x" * LONG_BYTES + b"\n")
        if len(pieces) == 500:
            content = b"".join(pieces)
            pieces = []
            digest.update(content)
            written += len(content)
            while content:
                content = content[os.write(1 + number % 2, content) :]  # both streams go to one log, in order
    end = b"".join(pieces) + b"rank %d is done" % rank
    digest.update(end)
    written += len(end)
    while end:
        end = end[os.write(1, end) :]
    return written, digest.hexdigest()


def test_all_bytes_are_on_disk_and_the_view_stays_small() -> None:
    run = distributed(gpus=RANKS)(loud).submit()
    folder = RunDir(pathlib.Path(run.path))
    feed, messages = Feed(folder), Messages()
    sizes = []

    def look() -> None:
        sizes.append(len(json.dumps(messages.message(feed.snapshot()))))

    assert run.wait(110, each_turn=look) == "SUCCEEDED"
    look()
    results = run.result(60)
    for rank, (size_bytes, digest) in enumerate(results):
        content = folder.log(0, rank).read_bytes()
        start = content.index(b"BEGIN\n")
        assert hashlib.sha256(content[start : start + size_bytes]).hexdigest() == digest, (
            f"rank {rank}'s log has changed"
        )
    assert max(sizes) < 500_000, "one message of the view is large"
    tails = {log.rank: log for log in feed.snapshot().logs}
    for rank in range(RANKS):
        assert any(f"rank {rank} is done" in line for line in tails[rank].lines[-3:])
        assert sum(len(line) for line in tails[rank].lines) < 200_000
        assert not any("\r" in line or "\x1b" in line for line in tails[rank].lines)
    feed.close()
