"""Which of several silent ranks holds the others up, and what it does: from their stacks and from the kernel. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgpu.agent.kernel_view import KernelView

# Where a rank waits for others: in a collective, in DDP's forward, or in the backward pass that runs DDP's collectives.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/sgpu/worker/collectives.py")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one rank.

    Attributes:
        stack: as `faulthandler` writes it; "": it wrote none.
        kernel: None: nothing is known.
        begun: it has come up, so that it could be asked.
    """

    stack: str = ""
    kernel: KernelView | None = None
    begun: bool = True

    @property
    def stopped(self) -> bool:
        return self.kernel is not None and self.kernel.state == "T"

    @property
    def frozen(self) -> bool:
        return not self.stack

    @property
    def waits(self) -> bool:
        """Whether its main thread (faulthandler writes it last) waits for other ranks."""
        innermost = _innermost(self.stack)
        return innermost is not None and any(mark in innermost["file"] for mark in _WAITING)


def to_blame(suspects: Sequence[int], evidence: Mapping[int, Evidence]) -> int | None:
    """The rank at fault, or None where all wait for one another.

    One that is stopped, wherever it is; then one that wrote no stack, which is stuck in the kernel; then one whose main
    thread is not waiting for others.

    Args:
        suspects: in the order of suspicion.
        evidence: of all ranks.
    """
    stopped = [rank for rank in sorted(evidence) if evidence[rank].stopped]
    frozen = [rank for rank in suspects if evidence[rank].frozen]
    busy = [rank for rank in suspects if not evidence[rank].waits]
    guilty = stopped or frozen or busy
    if guilty:
        return guilty[0]
    return suspects[0] if len(evidence) == 1 else None


def deed(evidence: Evidence) -> str:
    """What the rank does, in words: `it sleeps or waits (do_nanosleep), in train at cell.py:7`."""
    kernel, innermost = evidence.kernel, _innermost(evidence.stack)
    words = []
    if evidence.stopped:
        words.append("it was stopped by a signal (SIGSTOP)")
    elif not evidence.begun:
        words.append("its process has not come up")
    elif evidence.frozen:
        place = f" ({kernel.place})" if kernel is not None and kernel.place else ""
        words.append(f"it answers no signal: it is stuck in the kernel{place}")
    elif evidence.waits:
        words.append("it waits for other ranks")
    elif kernel is not None and kernel.busy_share is not None:
        waiting = f"it sleeps or waits{f' ({kernel.place})' if kernel.place else ''}"
        words.append("it keeps a core busy" if kernel.busy else waiting)
    if innermost is not None:
        words.append(f"in {innermost['function']} at {innermost['file']}:{innermost['line']}")
    return ", ".join(words)


def _innermost(text: str) -> re.Match[str] | None:
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    return _FRAME.search(main)
