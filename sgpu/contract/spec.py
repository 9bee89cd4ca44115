"""What was asked for: frozen, versioned, written once, read by every process of the run."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
from sgpu.contract.rundir import RunDir

VERSION = 1
Accelerator = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where MLflow keeps the run.

    `parent_run_id` is the run that was active in the notebook. `experiment_id`, where known, beats the name.
    """

    uri: str
    experiment: str
    parent_run_id: str | None = None
    experiment_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One call of a decorated function.

    `spares` are agents besides those of `nodes`, with the numbers from there on; they wait to take a lost one's place.
    `launcher` is the calling process ({"pid", "started"}, see process.py), watched where `on_launcher_exit` is "stop".
    """

    id: str
    name: str
    created: float
    backend: str
    world_size: int
    gpus_per_node: int
    accelerator: Accelerator
    seed: int
    tracking: Tracking
    python: str
    working_dir: str
    sys_path: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    timeout_seconds: float | None = None
    launcher: dict[str, int] | None = None
    on_launcher_exit: Literal["leave", "stop"] = "leave"
    parameters: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    spares: int = 0
    version: int = VERSION

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def ranks_of(self, node: int) -> range:
        """Of a spare: none."""
        first = node * self.gpus_per_node
        return range(first, min(first + self.gpus_per_node, self.world_size))

    def write(self, run: RunDir) -> None:
        atomic.write_json(run.spec, asdict(self))


def read_spec(run: RunDir) -> RunSpec:
    value = atomic.read_json(run.spec)
    if value is None:
        raise SgpuError(f"no run at {run.root}: it has no {run.spec.name}", path=str(run.root))
    if value.get("version") != VERSION:
        raise SgpuError(
            f"{run.spec} has version {value.get('version')!r}; this sgpu reads version {VERSION}. "
            "Open it with the sgpu that made it.",
            path=str(run.root),
        )
    known = {f.name for f in fields(RunSpec)}
    value = {key: item for key, item in value.items() if key in known}
    value["tracking"] = Tracking(**value["tracking"])
    value["checkpoints"] = CheckpointPolicy(**value["checkpoints"])
    value["restarts"] = RestartPolicy(**value["restarts"])
    value["sys_path"] = tuple(value["sys_path"])
    return RunSpec(**value)


def new_run_id(name: str, now: float | None = None) -> str:
    """Sorts by time, is readable, and never collides: 20261130-140501-train-3f9c2a."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now if now is not None else time.time()))
    slug = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:40].strip("-") or "run"
    return f"{stamp}-{slug}-{secrets.token_hex(3)}"
