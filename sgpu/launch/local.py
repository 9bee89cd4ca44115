"""This machine: one agent, started by command in a session of its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import threading
from dataclasses import dataclass

from sgpu import settings
from sgpu.contract.errors import InputError
from sgpu.contract.process import process_of
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.launch.plan import Machine


@dataclass(frozen=True)
class Local:
    """Workers on this machine.

    Attributes:
        nodes: simulated nodes, each with an agent of its own. Only 1 so far.
    """

    nodes: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 1:
            raise InputError(f"Local(nodes=...) must be a whole number, 1 or more; found {self.nodes!r}")
        if self.nodes > 1:
            raise InputError(f"Local(nodes={self.nodes}): simulated nodes are not supported yet; use nodes=1")

    @property
    def name(self) -> str:
        return "local"

    def machine(self) -> Machine:
        return Machine(gpus=visible_gpus())

    def command(self, spec: RunSpec, run: RunDir) -> list[str]:
        return [spec.python, "-m", "sgpu.agent", str(run.root)]

    def start(self, spec: RunSpec, run: RunDir) -> None:
        with run.agent_log.open("ab") as log:
            agent = subprocess.Popen(
                self.command(spec, run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=run.root,  # not the notebook's folder: a random.py there must not become the agent's
                env=_environment(),
            )
        started = process_of(agent.pid)
        if started is not None:  # from now on a run without a living agent is a lost one
            started.write(run.agent)
        # Collects the agent's exit status, so that an ended one is not a zombie of the notebook.
        threading.Thread(target=agent.wait, name=f"sgpu-reap-{agent.pid}", daemon=True).start()


def _environment() -> dict[str, str]:
    """This process' own, such that the agent finds the same sgpu."""
    environment = settings.inherited()
    home = str(pathlib.Path(__file__).parents[2])
    paths = [home, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def visible_gpus() -> int:
    """NVIDIA GPUs of this machine, CUDA_VISIBLE_DEVICES counted; without loading CUDA or any library."""
    present = [name for name in settings.device_names() if re.fullmatch(r"nvidia\d+", name)]
    chosen = settings.cuda_visible_devices()
    if chosen is None:
        return len(present)
    return min(len(present), len(chosen))
