"""Which GPUs of a node a generation gets, or why the node cannot take part: a pure function of findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgpu.health.probe import Finding, Verdict

_WORKED_ON = ("gpu", "node")


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What follows from a look at a node.

    Attributes:
        unfit: why it cannot take part; None: it can.
        gpus: what its workers may see, as in CUDA_VISIBLE_DEVICES; None: all, since nothing is wrong with any.
        left_out: each GPU that they may not see, and why.
    """

    unfit: str | None = None
    gpus: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()


def decide(
    findings: Sequence[Finding], counted: Sequence[Finding], *, visible: tuple[str, ...] | None, needed: int
) -> Fitness:
    """What to do about a node.

    Args:
        findings: all of a look.
        counted: the failed ones that are no passing alarm (see Debounce).
        visible: the GPUs that workers would see; None: all there are.
        needed: how many workers, each with a GPU, the node has.
    """
    bad = [finding for finding in counted if finding.verdict is Verdict.FAILED and finding.kind in _WORKED_ON]
    of_node = [finding for finding in bad if finding.kind == "node"]
    if of_node:
        return Fitness(unfit="; ".join(map(sentence, of_node)))
    if not bad:
        return Fitness()
    known = visible
    if known is None:
        known = tuple(dict.fromkeys(f.name for f in findings if f.kind == "gpu" and f.name.isdecimal()))
    out = {finding.name for finding in bad}
    good = tuple(name for name in known if name not in out)
    reasons = tuple(map(sentence, bad))
    if len(good) < needed:
        return Fitness(unfit=f"{'; '.join(reasons)}; {len(good)} of the {needed} GPUs that it needs are fit")
    return Fitness(gpus=good, left_out=reasons)


def sentence(finding: Finding) -> str:
    """One finding for people: "gpu 3: ECC: 2 uncorrectable errors ..."."""
    return f"{finding.scope}: {finding.probe}: {finding.evidence}"
