"""Has the agent of a lost node started again, by the back-end that had started the run's agents."""

from __future__ import annotations

import subprocess
from typing import Protocol

from sgpu import settings
from sgpu.contract import process
from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir


class Starter(Protocol):
    """Has agents started by the back-end."""

    def start(self, node: int) -> None:
        """Starts the agent of a node."""

    def replace(self, node: int, spare: int) -> None:
        """Starts an agent in the place of a spare that has become `node`."""


class NodeStarter:
    """Order of calls: `start` and `replace` as often as needed, each comes back at once; `close`."""

    def __init__(self, run: RunDir, *, python: str) -> None:
        self._run, self._python = run, python
        self._commands: list[subprocess.Popen[bytes]] = []

    def replace(self, node: int, spare: int) -> None:
        """A spare has taken a node's place: they trade numbers, and the lost agent is started anew as the spare.

        What is left of the lost one is ended as a spare's start ends what is left of a former spare.
        """
        places = self._run.node(node).agent, self._run.node(spare).agent
        lost, taken = map(process.read_process, places)
        for path, agent in zip(places, (taken, lost), strict=True):
            if agent is not None:
                agent.write(path)
        self.start(spare)

    def start(self, node: int) -> None:
        try:
            with self._run.agent_log.open("ab") as log:
                self._commands.append(
                    subprocess.Popen(
                        [self._python, "-m", "sgpu.launch", str(self._run.root), "--node", str(node)],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._run.root,
                        env=settings.inherited(),
                    )
                )  # fmt: skip
        except OSError as error:
            emit(self._run, "warning", generation=0, message=f"node {node} could not be started again: {error}")

    def pids(self) -> list[int]:
        """Of what is starting, and of agents that became this process' own (see process.adopt_orphans)."""
        self._commands = [command for command in self._commands if command.poll() is None]
        agents = [process.read_process(self._run.node(node).agent) for node in self._run.other_nodes()]
        return [*(command.pid for command in self._commands), *(agent.pid for agent in agents if agent is not None)]

    def close(self) -> None:
        """Waits for what is starting: nothing of it may appear after the run's end."""
        for command in self._commands:
            command.wait()
