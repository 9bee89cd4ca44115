"""Network adapters of InfiniBand, RoCE and EFA: the state of their ports, as sysfs tells it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict


class Ports:
    """A port that is switched off is nobody's loss; one that should have a link and has none is."""

    name = "ports"
    kind: ScopeKind = "nic"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        for state in sorted(pathlib.Path(ctx.sys, "class/infiniband").glob("*/ports/*/state")):
            port = state.parent
            name = f"{port.parent.parent.name}:{port.name}"
            told, physical = _word(state), _word(port / "phys_state")
            evidence = f"state {told or 'not told'}, physical state {physical or 'not told'}{_rate(port)}"
            if told is None:
                verdict = Verdict.UNKNOWN
            elif told == "ACTIVE" or physical == "Disabled":
                verdict = Verdict.OK
            else:
                verdict = Verdict.DEGRADED
                evidence += "; expected ACTIVE"
            yield Finding(probe=self.name, kind=self.kind, name=name, verdict=verdict, evidence=evidence)


def _word(path: pathlib.Path) -> str | None:
    """The word of "4: ACTIVE"; None where the file cannot be read."""
    try:
        return path.read_text().partition(":")[2].strip() or None
    except OSError:
        return None


def _rate(port: pathlib.Path) -> str:
    try:
        return f", {(port / 'rate').read_text().strip()}"
    except OSError:
        return ""
