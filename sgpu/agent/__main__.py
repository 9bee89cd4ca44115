"""`python -m sgpu.agent RUN_DIR`: supervises a run to its end; with `--node K`, the part of it that is on node K.

Exit status of the first node's: 0 succeeded, 1 failed, 2 cancelled, 75 preempted (start it again). Of the others': 0
the run has ended, 1 the first one was lost.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import socket
import sys
import threading

from sgpu.agent.control import control
from sgpu.agent.follow import follow
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, read_spec


class Signals:
    """Set by SIGTERM and SIGUSR1: this node is to be given back."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: self._asked.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook arrives as a cancel
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def __call__(self) -> str | None:
        return "preempt" if self._asked.is_set() else None


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
    signals = Signals()
    if asked.node:
        return follow(run, spec, asked.node, address=asked.address, gpus=asked.gpus, asked=signals)
    return control(run, spec, address=asked.address or _own_address(spec), gpus=asked.gpus, asked=signals)


if __name__ == "__main__":
    sys.exit(main())
