"""`python -m sgpu.launch RUN_DIR --node K`: has the back-end of a run start the agent of one of its nodes (again)."""

from __future__ import annotations

import argparse
import pathlib
import sys

from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.launch import registry


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sgpu.launch")
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("--node", type=int, required=True)
    asked = parser.parse_args()
    run = RunDir(asked.run_dir.absolute())
    spec = read_spec(run)
    registry.find(spec.backend).start_node(spec, run, asked.node)
    return 0


if __name__ == "__main__":
    sys.exit(main())
