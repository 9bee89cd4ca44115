"""What a probe is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

from sgpu.contract.errors import InputError

ScopeKind = Literal["node", "gpu", "nic", "disk"]


class Verdict(IntEnum):
    """From best to worst. UNKNOWN is never taken for OK in silence, and never for FAILED."""

    OK = 0
    UNKNOWN = 1
    DEGRADED = 2
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one probe says of one thing.

    Attributes:
        probe: its name.
        kind, name: the scope: of what kind the thing is, and which one ("0" for the first GPU, "mlx5_0", "/dev/shm").
        evidence: what was measured or read, and where there is trouble what was expected.
        at_once: needs no second look: a missing device or a wrong answer is no passing alarm.
    """

    probe: str
    kind: ScopeKind
    name: str
    verdict: Verdict
    evidence: str
    at_once: bool = False

    @property
    def scope(self) -> str:
        """As people read it: "gpu 3"."""
        return f"{self.kind} {self.name}".strip()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.name}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Finding:
        return cls(**{**value, "verdict": Verdict[value["verdict"]]})


@dataclass(frozen=True, kw_only=True)
class Context:
    """What to look at. Tests choose other roots.

    Attributes:
        sys, proc, dev: roots of the kernel's files.
        disks: folders whose disks matter.
        shared_memory: where tensors are passed between processes.
        gpus: the visible GPUs, by index or UUID; None: all; empty: none are used.
        recorded: a file with the figures of GPUs, to be read in place of the driver (see recorded.py).
        paths: where Python finds the driver's package besides.
    """

    sys: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    disks: tuple[str, ...] = ()
    shared_memory: str = "/dev/shm"
    gpus: tuple[str, ...] | None = None
    recorded: str | None = None
    paths: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Context:
        """Raises InputError where `value` has other names."""
        try:
            gpus = value.get("gpus")
            return cls(**{
                **value, "disks": tuple(value.get("disks", ())), "paths": tuple(value.get("paths", ())),
                "gpus": None if gpus is None else tuple(gpus),
            })  # fmt: skip
        except TypeError as error:
            raise InputError(f"a health context takes {sorted(Context.__dataclass_fields__)}; {error}") from None


class Probe(Protocol):
    """Looks at one aspect of the machine. It may hang or crash: it runs in a process that may be killed.

    Attributes:
        name: short, as shown.
        kind: of what it tells.
    """

    name: str
    kind: ScopeKind

    def run(self, ctx: Context, timeout_seconds: float) -> Iterable[Finding]:
        """One finding a thing; none where there is no such thing. `timeout_seconds`: what it may take in all."""


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), default=Verdict.OK)
