"""Takes an alarm seriously when it comes back: counters and link states flicker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sgpu.contract.errors import InputError
from sgpu.health.probe import Finding, Verdict


class Debounce:
    """A finding counts when it was bad in `needed` of the last `looks` looks; one that is `at_once`, at once."""

    def __init__(self, *, needed: int = 2, looks: int = 3) -> None:
        if not 1 <= needed <= looks:
            raise InputError(f"Debounce needs 1 <= needed <= looks; found needed={needed}, looks={looks}")
        self._needed = needed
        self._past: deque[frozenset[tuple[str, str, str]]] = deque(maxlen=looks)

    def look(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those of a new look that count."""
        bad = [finding for finding in findings if finding.verdict is Verdict.FAILED]
        self._past.append(frozenset(map(_key, bad)))
        return [f for f in bad if f.at_once or sum(_key(f) in past for past in self._past) >= self._needed]


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.probe, finding.kind, finding.name
