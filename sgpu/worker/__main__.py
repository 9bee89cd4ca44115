"""`python -m sgpu.worker RUN RANK GENERATION CONTROL`: a worker in a fresh interpreter, where forking is not safe."""

from __future__ import annotations

import os
import pathlib
import sys

from sgpu.worker.life import run_worker


def main() -> None:
    try:
        run_worker(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    except SystemExit as error:
        # As a forked worker: background threads that wait for other ranks must not hold a failed one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)


if __name__ == "__main__":
    main()
