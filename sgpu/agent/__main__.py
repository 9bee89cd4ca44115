"""`python -m sgpu.agent RUN_DIR`: supervises a run to its end; with `--node K`, the part of it that is on node K.

Exit status of the first node's: see contract/exits.py. Of the others': 0 the run has ended, 1 the first one was lost.
"""

from __future__ import annotations

import argparse
import pathlib
import socket
import sys

from sgpu import settings
from sgpu.agent.control import control
from sgpu.agent.follow import follow
from sgpu.agent.notices import source_of
from sgpu.agent.preemption import Preemption, Watch
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, read_spec


def _own_address(spec: RunSpec) -> str:
    """Where the agents and workers of other nodes find this one, if nobody said so."""
    return "127.0.0.1" if spec.nodes == 1 else socket.gethostbyname(socket.gethostname())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sgpu.agent")
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument(
        "--node", type=int, default=0, help="of the run; 0, the first, controls it; the last are spares"
    )
    parser.add_argument("--address", default="", help="this node's IPv4 address")
    parser.add_argument("--gpus", default=None, help="CUDA_VISIBLE_DEVICES of this node's workers")
    asked = parser.parse_args()
    run = RunDir(asked.run_dir.absolute())
    spec = read_spec(run)
    count = spec.nodes + spec.spares
    if not 0 <= asked.node < count:
        parser.error(f"--node must be 0 to {count - 1} for this run; found {asked.node}")
    source = source_of(*settings.notices(), vendor=settings.firmware_vendor())
    watch = Watch(source) if source is not None else None
    preemption = Preemption(watch)
    if watch is not None:
        watch.start()
    if asked.node:
        return follow(run, spec, asked.node, address=asked.address, gpus=asked.gpus, asked=preemption)
    return control(run, spec, address=asked.address or _own_address(spec), gpus=asked.gpus, asked=preemption)


if __name__ == "__main__":
    sys.exit(main())
