"""This machine: an agent a (simulated) node, started by command in a session of its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import threading
from dataclasses import dataclass

from sgpu import leftovers, settings
from sgpu.contract.errors import InputError
from sgpu.contract.process import process_of
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.launch.plan import Machine

_MOST_NODES = 64


@dataclass(frozen=True)
class Local:
    """Workers on this machine.

    Attributes:
        nodes: simulated nodes, each with an agent, workers and a loopback address (127.0.0.2, ...) of its own, and as
            many of the workers and GPUs as the others.
        spares: further agents, warm, one of which takes a lost node's place at once. Only where workers run on the CPU.
    """

    nodes: int = 1
    spares: int = 0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("spares", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_NODES:
                raise InputError(f"Local({name}=...) must be a whole number, {least} to {_MOST_NODES}; found {value!r}")
        if self.spares and self.nodes == 1:
            raise InputError("Local(spares=...): a spare takes the place of another node than the first; use nodes=2")

    @property
    def name(self) -> str:
        return "local"

    def machine(self) -> Machine:
        gpus = visible_gpus()
        if gpus and self.spares:
            raise InputError(
                f"Local(spares={self.spares}): a simulated node in reserve would need GPUs of its own; use spares=0"
            )
        return Machine(gpus=gpus, nodes=self.nodes, spares=self.spares)

    def command(self, spec: RunSpec, run: RunDir, node: int = 0) -> list[str]:
        command = [spec.python, "-m", "sgpu.agent", str(run.root)]
        if spec.nodes > 1:
            command += ["--node", str(node), "--address", _address(node)]
            if spec.accelerator == "cuda":
                command += ["--gpus", ",".join(_gpus_of(spec, node))]
        return command

    def start(self, spec: RunSpec, run: RunDir) -> None:
        for node in range(spec.nodes + spec.spares):
            self.start_node(spec, run, node)

    def start_node(self, spec: RunSpec, run: RunDir, node: int) -> None:
        folder = run.node(node)
        if node:
            folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            leftovers.end_node(run, node)
        with folder.agent_log.open("ab") as log:
            agent = subprocess.Popen(
                self.command(spec, run, node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=run.root,  # not the notebook's folder: a random.py there must not become the agent's
                env=_environment(),
            )
        started = process_of(agent.pid)
        if started is not None:  # from now on a run without a living agent is a lost one
            started.write(folder.agent)
        # Collects the agent's exit status, so that an ended one is not a zombie of the notebook.
        threading.Thread(target=agent.wait, name=f"sgpu-reap-{agent.pid}", daemon=True).start()


def _address(node: int) -> str:
    """Every address in 127.0.0.0/8 is this machine."""
    return f"127.0.0.{node + 2}"


def _gpus_of(spec: RunSpec, node: int) -> list[str]:
    """A simulated node's share of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    visible = settings.cuda_visible_devices()
    names = visible if visible is not None else [str(number) for number in range(visible_gpus())]
    ranks = spec.ranks_of(node)
    return names[ranks.start : ranks.stop]


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
