"""`python -m sgpu.worker RUN RANK GENERATION`: a worker in a fresh interpreter, where forking is not safe."""

from __future__ import annotations

import pathlib
import sys

from sgpu.worker.bootstrap import run_worker

if __name__ == "__main__":
    run_worker(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
