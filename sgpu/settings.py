"""The only reader of the environment. An explicit argument beats it; it beats the default.

| variable | meaning | default |
|---|---|---|
| SGPU_HOME | runs, cache, MLflow store | ~/.sgpu |
| SGPU_MIN_FREE_DISK_BYTES | what the cache leaves free (also SGC_FSLAYER_MIN_FREE_DISK_BYTES) | 10 % |
| SGPU_MAX_PAYLOAD_BYTES | a function that captures more is refused, by the variable's name | 268435456 |
| SGPU_ON_KERNEL_EXIT | leave or stop: what a run does when the process that called it dies | leave |
| SGPU_NODE_TIMEOUT_SECONDS | a node whose agent is silent for so long is lost; the agents of nodes likewise | 10 |
| SGPU_HANG_FLOOR_SECONDS | no learned limit of a step is below it | 60 |
| SGPU_PEER_BYTES_PER_SECOND | the most that a node sends when it copies checkpoints to its neighbour's memory | 1e9 |
| SGPU_PREEMPT_SECONDS | how long a run that is to give its nodes back may take to save, where no notice tells | 30 |
| SGPU_NOTICES | auto, off, aws, gcp, azure or file: where a node hears that it is to go, as `kind@address` | auto |
| SGPU_HEALTH | act, warn or off: what agents do about a GPU or node that fails its health checks | act |
| SGPU_HEALTH_RECORDED | a file with the figures of GPUs, read in place of the driver; for drills | none |
| SGPU_FAILPOINT | faults to inject, `name[@rank][#nth]=action` | none |
| SGPU_FAILPOINT_LOG | a file where each fault that fired leaves a line | none |
| MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME | where metrics go | sqlite in SGPU_HOME, "sgpu" |
| RANK, LOCAL_RANK, WORLD_SIZE, ... | what torchrun sets; the agent sets the same | one process |
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from sgpu.contract.errors import InputError

NAMES: tuple[str, ...] = (
    "SGPU_HOME", "SGPU_MIN_FREE_DISK_BYTES", "SGC_FSLAYER_MIN_FREE_DISK_BYTES", "SGPU_MAX_PAYLOAD_BYTES",
    "SGPU_ON_KERNEL_EXIT", "SGPU_NODE_TIMEOUT_SECONDS", "SGPU_HANG_FLOOR_SECONDS",
    "SGPU_PEER_BYTES_PER_SECOND", "SGPU_PREEMPT_SECONDS",
    "SGPU_NOTICES", "SGPU_HEALTH", "SGPU_HEALTH_RECORDED", "SGPU_FAILPOINT", "SGPU_FAILPOINT_LOG",
    "SGPU_RUN_DIR", "SGPU_GENERATION", "SGPU_NODE", "SGPU_STORE", "SGPU_CHECKPOINT_HELPER",
    "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "TORCHELASTIC_RESTART_COUNT",
    "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

# What the agent sets for each worker.
WORKER_NAMES: frozenset[str] = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "SGPU_STORE", "SGPU_RUN_DIR", "SGPU_GENERATION", "SGPU_NODE",
    "SGPU_CHECKPOINT_HELPER",
})  # fmt: skip


def _whole_number(name: str, default: int | None, least: int = 0) -> int | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"environment variable {name} must be a whole number; found {text!r}") from None
    if value < least:
        raise InputError(f"environment variable {name} must be at least {least}; found {value}")
    return value


def home() -> pathlib.Path:
    text = os.environ.get("SGPU_HOME") or "~/.sgpu"
    try:
        return pathlib.Path(text).expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:  # a user without a home, a working folder that is gone
        raise InputError(f"no place for runs: {text!r} leads nowhere ({error}). Set SGPU_HOME to a full path") from None


def working_dir() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InputError(
            "the working folder of this process was removed, so that workers cannot begin there: os.chdir(...) first"
        ) from None


def min_free_disk_bytes() -> int | None:
    """None means: a tenth of the disk."""
    ours = _whole_number("SGPU_MIN_FREE_DISK_BYTES", None)
    return ours if ours is not None else _whole_number("SGC_FSLAYER_MIN_FREE_DISK_BYTES", None)


def max_payload_bytes() -> int:
    return cast(int, _whole_number("SGPU_MAX_PAYLOAD_BYTES", 256 * 2**20, least=1))


def on_kernel_exit() -> Literal["leave", "stop"]:
    value = os.environ.get("SGPU_ON_KERNEL_EXIT") or "leave"
    if value not in ("leave", "stop"):
        raise InputError(f'environment variable SGPU_ON_KERNEL_EXIT must be "leave" or "stop"; found {value!r}')
    return cast(Literal["leave", "stop"], value)


def _number(name: str, default: float, least: float, unit: str) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise InputError(f"environment variable {name} must be {unit}, {least:g} or more; found {text!r}")
    return value


def node_timeout_seconds() -> float:
    return _number("SGPU_NODE_TIMEOUT_SECONDS", 10.0, 0.5, "seconds")


def hang_floor_seconds() -> float:
    return _number("SGPU_HANG_FLOOR_SECONDS", 60.0, 0.1, "seconds")


def peer_bytes_per_second() -> float:
    return _number("SGPU_PEER_BYTES_PER_SECOND", 1e9, 1.0, "bytes")


def preempt_seconds() -> float:
    return _number("SGPU_PREEMPT_SECONDS", 30.0, 0.0, "seconds")


def notices() -> tuple[str, str]:
    """What tells that a node is to be given back, and where; "": in its usual place."""
    text = os.environ.get("SGPU_NOTICES") or "auto"
    kind, _, where = text.partition("@")
    fits = {"file": where.startswith("/"), "auto": not where, "off": not where}
    fits |= dict.fromkeys(("aws", "gcp", "azure"), not where or where.startswith("http"))
    if not fits.get(kind, False):
        raise InputError(
            'environment variable SGPU_NOTICES must be "auto", "off", "aws", "gcp", "azure" (or as in '
            f'"aws@http://host:port"), or "file@/absolute/path"; found {text!r}'
        )
    return kind, where


def firmware_vendor() -> pathlib.Path:
    """Where the kernel tells who made this (virtual) machine."""
    return pathlib.Path("/sys/class/dmi/id/sys_vendor")


def health() -> Literal["act", "warn", "off"]:
    value = os.environ.get("SGPU_HEALTH") or "act"
    if value not in ("act", "warn", "off"):
        raise InputError(f'environment variable SGPU_HEALTH must be "act", "warn" or "off"; found {value!r}')
    return cast(Literal["act", "warn", "off"], value)


def check_agents() -> None:
    """Refuses, before anything starts, what agents would refuse when they read it."""
    for read in (health, node_timeout_seconds, hang_floor_seconds, peer_bytes_per_second, preempt_seconds, notices):
        read()


def health_recorded() -> pathlib.Path | None:
    text = os.environ.get("SGPU_HEALTH_RECORDED")
    return pathlib.Path(text).absolute() if text else None


def failpoints() -> str:
    return os.environ.get("SGPU_FAILPOINT", "")


def failpoint_log() -> pathlib.Path | None:
    text = os.environ.get("SGPU_FAILPOINT_LOG")
    return pathlib.Path(text) if text else None


def tracking_uri() -> str | None:
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def experiment_name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "sgpu"


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """Who this process is, as its launcher said (torchrun's names)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int


def worker_environment() -> WorkerEnvironment | None:
    """None where no launcher set anything."""
    rank, world = _whole_number("RANK", None), _whole_number("WORLD_SIZE", None, least=1)
    if rank is None or world is None:
        return None
    if rank >= world:
        raise InputError(f"RANK is {rank} but WORLD_SIZE is {world}; ranks count from 0")
    return WorkerEnvironment(
        rank=rank,
        world_size=world,
        local_rank=cast(int, _whole_number("LOCAL_RANK", rank)),
        local_world_size=cast(int, _whole_number("LOCAL_WORLD_SIZE", world, least=1)),
        node_rank=cast(int, _whole_number("GROUP_RANK", 0)),
    )


def node() -> int:
    """This machine's number in the run; another than its rank among the nodes where an earlier one is lost."""
    return cast(int, _whole_number("SGPU_NODE", 0))


def run_dir() -> pathlib.Path | None:
    """The folder of the run that this process belongs to; set by the agent."""
    text = os.environ.get("SGPU_RUN_DIR")
    return pathlib.Path(text) if text else None


def generation() -> int:
    return cast(int, _whole_number("SGPU_GENERATION", 0))


def torchrun_restart() -> int | None:
    """How often torchrun has restarted its workers; None where torchrun did not start this process."""
    return _whole_number("TORCHELASTIC_RESTART_COUNT", None)


def store_address() -> tuple[str, int] | None:
    """Host and port of the supervisor's store; set by the agent."""
    text = os.environ.get("SGPU_STORE")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    return host, int(port)


def checkpoint_helper() -> str | None:
    """Name of the socket of the process that finishes this node's checkpoints; set by the agent."""
    return os.environ.get("SGPU_CHECKPOINT_HELPER") or None


def master_address() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), _whole_number("MASTER_PORT", None)
    return (host, port) if host and port else None


def cuda_visible_devices() -> list[str] | None:
    """None where nobody chose; an empty list hides all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return [part for part in (part.strip() for part in text.split(",")) if part not in ("", "-1", "NoDevFiles")]


def device_names() -> list[str]:
    """Names in /dev."""
    return sorted(os.listdir("/dev"))


def inherited() -> dict[str, str]:
    """The whole environment, for a child process."""
    return dict(os.environ)


def adopt(values: Mapping[str, str]) -> None:
    """Takes over an environment that the agent wrote for this worker (a forked worker inherits its zygote's)."""
    os.environ.update(values)


def replace(values: Mapping[str, str]) -> None:
    """The whole environment becomes this one (a worker begins anew in the same process)."""
    os.environ.clear()
    os.environ.update(values)
