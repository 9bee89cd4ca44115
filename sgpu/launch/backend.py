"""What a back-end does: says what it has, and starts agents. Nothing else depends on where a run runs."""

from __future__ import annotations

from typing import Protocol

from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.launch.plan import Machine


class Backend(Protocol):
    """Order of calls: machine, then per run check and start."""

    @property
    def name(self) -> str:
        """As in `on="local"`."""

    def machine(self) -> Machine:
        """What is there to run on. Raises InputError where the back-end cannot be reached."""

    def command(self, spec: RunSpec, run: RunDir) -> list[str]:
        """What `start` would execute; for `plan()`."""

    def start(self, spec: RunSpec, run: RunDir) -> None:
        """Starts the run's agent(s) and comes back. They outlive this process."""

    def start_node(self, spec: RunSpec, run: RunDir, node: int) -> None:
        """Starts the agent of one node and comes back, after an end was made of what is left of a former one there.

        Asked by the run's controller, by command, when a node is lost; only for runs that have several.
        """
