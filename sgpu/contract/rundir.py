"""Every path of a run. The one file that knows these names.

$SGPU_HOME/runs/<id>/
    spec.json             what was asked for; written once
    payload.pkl           the function and its arguments
    code/                 the user's local modules as they were at the call
    status.json           where it stands; replaced atomically by the agent
    events.jsonl          what happened, one JSON object a line; appended by agent and workers
    cancel                exists when somebody asked for an end
    step_times.json       how long steps took, from which the limit of a hang is learned
    agent.json agent.log  the supervisor's process and its own log
    heartbeat.page        one slot a rank (see heartbeat.py), shared memory of agent and workers
    controller.json       where the agents of other nodes find the first one's, and the secret that they share
    peers/                with peer_memory: <k>.json, where node k's checkpoint helper listens, and its secret
    nodes/<k>/            of each node but the first: agent.json, agent.log, heartbeat.page
    machine.jsonl         what the first node measures of itself; of the others in nodes/<k>/
    attempts/<generation>/rank<k>/{log, outcome, stacks, process}
    metrics/              rank<k>.jsonl spools, forwarder.json (how far MLflow has them), mlflow.json (which run)
    checkpoints/          unless the user named a place
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

from sgpu.contract.errors import InputError


@dataclass(frozen=True)
class RunDir:
    root: pathlib.Path

    @property
    def id(self) -> str:
        return self.root.name

    def create(self) -> None:
        self.root.mkdir(parents=True, mode=0o700)
        for folder in (self.attempts, self.metrics, self.code, self.nodes):
            folder.mkdir(mode=0o700)

    @property
    def spec(self) -> pathlib.Path:
        return self.root / "spec.json"

    @property
    def payload(self) -> pathlib.Path:
        return self.root / "payload.pkl"

    @property
    def code(self) -> pathlib.Path:
        return self.root / "code"

    @property
    def status(self) -> pathlib.Path:
        return self.root / "status.json"

    @property
    def events(self) -> pathlib.Path:
        return self.root / "events.jsonl"

    @property
    def step_times(self) -> pathlib.Path:
        return self.root / "step_times.json"

    @property
    def cancel(self) -> pathlib.Path:
        return self.root / "cancel"

    @property
    def agent(self) -> pathlib.Path:
        return self.root / "agent.json"

    @property
    def agent_log(self) -> pathlib.Path:
        return self.root / "agent.log"

    @property
    def heartbeat(self) -> pathlib.Path:
        return self.root / "heartbeat.page"

    @property
    def controller(self) -> pathlib.Path:
        return self.root / "controller.json"

    @property
    def peers(self) -> pathlib.Path:
        return self.root / "peers"

    @property
    def nodes(self) -> pathlib.Path:
        return self.root / "nodes"

    def node(self, node: int) -> RunDir:
        """Where `agent`, `agent_log` and `heartbeat` of a node are: the run's own folder for the first."""
        return self if node == 0 else RunDir(self.nodes / str(node))

    def other_nodes(self) -> list[int]:
        """Nodes besides the first that had an agent, in order."""
        if not self.nodes.exists():
            return []
        return sorted(int(name) for name in os.listdir(self.nodes) if name.isdecimal())

    def machine(self, node: int) -> pathlib.Path:
        """What a node measures of itself: CPU, memory, disk, network, GPUs."""
        return self.node(node).root / "machine.jsonl"

    @property
    def attempts(self) -> pathlib.Path:
        return self.root / "attempts"

    def attempt(self, generation: int, rank: int) -> pathlib.Path:
        return self.attempts / str(generation) / f"rank{rank}"

    def log(self, generation: int, rank: int) -> pathlib.Path:
        return self.attempt(generation, rank) / "log"

    def outcome(self, generation: int, rank: int) -> pathlib.Path:
        return self.attempt(generation, rank) / "outcome"

    def stacks(self, generation: int, rank: int) -> pathlib.Path:
        return self.attempt(generation, rank) / "stacks"

    def process(self, generation: int, rank: int) -> pathlib.Path:
        return self.attempt(generation, rank) / "process"

    def generations(self) -> list[int]:
        """The generations that have a folder, in order."""
        if not self.attempts.exists():
            return []
        return sorted(int(name) for name in os.listdir(self.attempts) if name.isdecimal())

    @property
    def metrics(self) -> pathlib.Path:
        return self.root / "metrics"

    def spool(self, rank: int) -> pathlib.Path:
        return self.metrics / f"rank{rank}.jsonl"

    @property
    def forwarder(self) -> pathlib.Path:
        return self.metrics / "forwarder.json"

    @property
    def forwarder_log(self) -> pathlib.Path:
        return self.metrics / "forwarder.log"

    @property
    def mlflow(self) -> pathlib.Path:
        return self.metrics / "mlflow.json"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.root / "checkpoints"


def runs_folder(home: pathlib.Path) -> pathlib.Path:
    return home / "runs"


def all_runs(home: pathlib.Path) -> list[RunDir]:
    """Every run folder, newest first (an id starts with its time); one without a spec is no run yet."""
    folder = runs_folder(home)
    if not folder.exists():
        return []
    found = [RunDir(folder / name) for name in sorted(os.listdir(folder), reverse=True) if not name.startswith(".")]
    return [run for run in found if run.spec.exists()]


def find_run(home: pathlib.Path, id_or_path: str) -> RunDir:
    """A run by its id (or the start or end of it, where that is enough), or by its folder.

    Raises:
        InputError: there is none, or several.
    """
    as_path = pathlib.Path(id_or_path).expanduser()
    if os.sep in id_or_path:
        if (as_path / "spec.json").exists():
            return RunDir(as_path.absolute())
        raise InputError(f"no run at {as_path}: it has no spec.json")
    found = [run for run in all_runs(home) if run.id.startswith(id_or_path) or run.id.endswith(id_or_path)]
    exact = [run for run in found if run.id == id_or_path]
    if len(exact or found) == 1 and id_or_path:
        return (exact or found)[0]
    folder = runs_folder(home)
    if not found:
        raise InputError(f"no run {id_or_path!r} in {folder}; `sgpu runs` lists them")
    raise InputError(f"{id_or_path!r} could be any of {[run.id for run in found[:5]]} in {folder}; give more of it")
