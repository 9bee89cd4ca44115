"""A node's workers, where the node is fit: its health is looked at before, between and beside generations."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sgpu import settings
from sgpu.agent.hosting import fitness
from sgpu.agent.hosting.fitness import Fitness, sentence
from sgpu.agent.workers import Exit, LocalHost, NodeUnfitError
from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import NodeStatus
from sgpu.health.checkup import Checkup, context_here
from sgpu.health.debounce import Debounce
from sgpu.health.probe import Finding, Verdict

_FIRST_SECONDS = 5.0  # beside the import of torch: it costs a start nothing
_BETWEEN_SECONDS = 0.3  # what a restart may wait for
_EVERY_SECONDS = 60.0
_END_SECONDS = 5.0


class Look(Protocol):
    """A look at this machine that is under way; see Checkup."""

    def poll(self, seconds: float = 0.0) -> bool: ...
    def findings(self) -> list[Finding]: ...
    def pids(self) -> list[int]: ...
    def close(self) -> None: ...


class Examiner:
    """Looks at this machine again and again, and keeps what follows.

    Attributes:
        fitness: what the newest look that was answered says.
        knows: whether any was.

    Args:
        look: starts a look, none of whose probes may take longer than so many seconds.
        tell: is given each new trouble once, as a sentence.
        needed: GPUs that the node's workers use.
        fewest: with so many it is fit; None: with as many as needed.
    """

    def __init__(
        self,
        look: Callable[[float], Look],
        *,
        tell: Callable[[str], None],
        visible: tuple[str, ...] | None,
        needed: int,
        fewest: int | None = None,
    ) -> None:
        self._look, self._tell = look, tell
        self._visible, self._needed = visible, needed
        self._fewest = needed if fewest is None else fewest
        self._under_way: Look | None = None
        self._debounce = Debounce()
        self._told: set[tuple[str, str, Verdict]] = set()
        self._began = float("-inf")
        self.knows = False
        self.fitness = Fitness()

    def begin(self, timeout_seconds: float) -> None:
        if self._under_way is None:
            self._began = time.monotonic()
            self._under_way = self._look(timeout_seconds)

    def due(self) -> bool:
        """Whether the last look is long ago."""
        return self._under_way is None and time.monotonic() - self._began > _EVERY_SECONDS

    def take_in(self, patience_seconds: float = 0.0) -> None:
        """What has been answered, or is within `patience_seconds` of the look's beginning."""
        if self._under_way is None:
            return
        left = self._began + patience_seconds - time.monotonic()
        if self._under_way.poll(max(0.0, left)):
            look, self._under_way = self._under_way, None
            self.knows = True
            self._take(look.findings())

    def pids(self) -> list[int]:
        return self._under_way.pids() if self._under_way is not None else []

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def _take(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            key = finding.probe, finding.scope, finding.verdict
            if finding.verdict is not Verdict.OK and key not in self._told:
                self._told.add(key)
                self._tell(f"{finding.verdict.name}: {sentence(finding)}")
        before = self.fitness
        self.fitness = fitness.decide(
            findings, self._debounce.look(findings), visible=self._visible, needed=self._fewest
        )
        if self.fitness.left_out and self.fitness != before:
            left = f"workers use {', '.join((self.fitness.gpus or ())[: self._needed])}"
            self._tell(f"left out: {'; '.join(self.fitness.left_out)}; {left}")


class HealthyHost:
    """A `LocalHost` around another.

    `ready` waits for the first look; the first `room` or `start` after a `stop_all` waits for the look that this began,
    but not longer than a restart can bear: an answer that comes later counts for the next. Where workers go on in their
    processes, none is waited for. Nothing that runs is stopped.
    `wait`, `room` and `start` raise NodeUnfitError where a node that does not work yet cannot.
    """

    def __init__(self, local: LocalHost, examiner: Examiner, *, acts: bool, needed: int) -> None:
        self._local, self._examiner, self._acts, self._needed = local, examiner, acts, needed
        self._working = self._goes_on = False
        self._visible: dict[str, str | None] = {}

    def open(self) -> None:
        self._local.open()
        self._examiner.begin(_FIRST_SECONDS)

    def reopen(self) -> None:
        if not self._unfit():
            self._local.reopen()

    def fileno(self) -> int:
        return self._local.fileno()

    def ready(self) -> bool:
        self._examiner.take_in()
        return self._local.ready() and self._examiner.knows and not self._unfit()

    def members(self) -> tuple[int, ...]:
        return self._local.members() if self.ready() else ()

    def room(self, wanted: int) -> int:
        self._take_up_work()
        gpus = self._examiner.fitness.gpus
        return min(wanted, len(gpus)) if self._acts and gpus is not None else wanted

    def begin(self, members: tuple[int, ...]) -> None:
        self._local.begin(members)

    def open_store(self, name: str) -> int:
        return self._local.open_store(name)

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path,
        parked: str | None = None,
    ) -> None:  # fmt: skip
        self._take_up_work()
        gpus = self._examiner.fitness.gpus
        if self._acts and gpus is not None:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus[: self._needed])}
        if parked is not None and environment.get("CUDA_VISIBLE_DEVICES") != self._visible.pop(parked, None):
            self._local.end([parked], _END_SECONDS)  # it has a context on a GPU that is left out by now
            parked = None
        self._visible[name] = environment.get("CUDA_VISIBLE_DEVICES")
        self._local.start(
            name, rank=rank, generation=generation, environment=environment, log=log, parked=parked
        )  # fmt: skip

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        self._examiner.begin(_FIRST_SECONDS)
        self._working, self._goes_on = False, True
        self._local.interrupt(names, generation)

    def end(self, names: Sequence[str], seconds: float) -> None:
        self._local.end(names, seconds)

    def wait(self, seconds: float) -> list[Exit]:
        if self._examiner.due():
            self._examiner.begin(_FIRST_SECONDS)
        self._examiner.take_in()
        exits = self._local.wait(seconds)
        if not exits and not self._working:
            self._refuse_if_unfit()
        return exits

    def signal(self, name: str, number: int) -> None:
        self._local.signal(name, number)

    def stopped(self, name: str) -> bool:
        return self._local.stopped(name)

    def examine(self, name: str, into: pathlib.Path) -> None:
        self._local.examine(name, into)

    def nodes(self) -> tuple[NodeStatus, ...]:
        return self._local.nodes()

    def stop_all(self, seconds: float) -> None:
        if self._working:
            self._examiner.begin(_FIRST_SECONDS)
        self._working = self._goes_on = False
        self._visible.clear()
        self._local.stop_all(seconds)

    def close(self) -> None:
        self._examiner.close()
        self._local.close()

    def _take_up_work(self) -> None:
        if not self._working:
            self._examiner.take_in(0.0 if self._goes_on else _BETWEEN_SECONDS)
            self._refuse_if_unfit()
            self._working = True

    def _unfit(self) -> bool:
        return self._acts and self._examiner.fitness.unfit is not None

    def _refuse_if_unfit(self) -> None:
        if self._unfit():
            raise NodeUnfitError(f"this node is not fit: {self._examiner.fitness.unfit}")


def watched(
    host: Callable[[Callable[[], list[int]]], LocalHost], run: RunDir, spec: RunSpec, *, node: int, visible: str | None
) -> LocalHost:
    """The host that `host` makes, under health checks, unless SGPU_HEALTH=off.

    Args:
        host: is given what tells the processes of the checks, which are not to be ended with workers' strays.
        visible: CUDA_VISIBLE_DEVICES of the workers.
    """
    mode = settings.health()
    if mode == "off":
        return host(list)
    names = None if visible is None else tuple(part.strip() for part in visible.split(",") if part.strip())
    looked_at = names if spec.accelerator == "cuda" or settings.health_recorded() else ()
    context = context_here(disks=(str(run.root), tempfile.gettempdir()), gpus=looked_at)

    def tell(sentence: str) -> None:
        emit(run, "warning", generation=max(run.generations(), default=0), message=f"health of node {node}: {sentence}")

    examiner = Examiner(
        lambda seconds: Checkup(context, timeout_seconds=seconds), tell=tell, visible=looked_at,
        needed=spec.gpus_per_node, fewest=spec.restarts.min_gpus if spec.nodes == 1 else None,
    )  # fmt: skip
    return HealthyHost(host(examiner.pids), examiner, acts=mode == "act", needed=spec.gpus_per_node)
