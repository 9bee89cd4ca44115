"""The writing process: `python -m sgpu.checkpoint.helper URL DESCRIPTOR`. Loads no torch.

Reads one job a line on its input (see `write.WriteJob`), answers one line each. It ends at an empty line, or when its
input does, that is with its trainer, after the write in hand.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from typing import Any

from sgpu.checkpoint.storage import open_store
from sgpu.checkpoint.write import WriteJob, write_share
from sgpu.contract.errors import SgpuError

NICENESS = 10


class _Memory:
    """The trainer's segment; mapped again when it has grown."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def view(self) -> memoryview:
        size = os.fstat(self._descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return memoryview(self._map)


def main() -> None:
    os.nice(NICENESS)
    store, memory = open_store(sys.argv[1]), _Memory(int(sys.argv[2]))
    for line in sys.stdin:
        if line == "\n":
            break
        try:
            written = write_share(store, memory.view(), WriteJob.from_json(json.loads(line)))
            answer: dict[str, Any] = {"files": [file.to_json() for file in written]}
        except (OSError, SgpuError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
