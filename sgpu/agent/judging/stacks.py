"""Which of several silent ranks holds the others up, and what it does: from their stacks and from the kernel. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgpu.agent.judging.kernel_view import KernelView

# Where a rank waits for others: in a collective, in DDP's forward, or in the backward pass that runs DDP's collectives.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/sgpu/worker/collectives.py")
_TURNS = 20  # of a thread that waits for the interpreter's lock, 5 ms each: whoever runs Python gives it up by then
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one rank.

    Attributes:
        stack: as `faulthandler` writes it; "": it wrote none.
        kernel: None: nothing is known.
        begun: it has come up, so that it could be asked.
        answered: it has said that it hears the agent.
    """

    stack: str = ""
    kernel: KernelView | None = None
    begun: bool = True
    answered: bool = True

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

    @property
    def holds_lock(self) -> bool:
        """Whether a thread of it holds the interpreter's lock and will not give it up, so that no other runs.

        The one that hears the agent was asked, and has had its turns since, but not the lock: the machine is not slow.
        Nor is the thread that holds it: none of this process waits for a core, or they have had one for long enough.
        """
        view = self.kernel
        return self.unheard and view is not None and (view.turns or 0) >= _TURNS and not view.starved

    @property
    def unheard(self) -> bool:
        """Whether it can be asked, and has not answered."""
        return self.kernel is not None and self.kernel.turns is not None and not self.answered

    @property
    def undecided(self) -> bool:
        """Whether it may yet answer, as far as is known."""
        return self.unheard and not (self.stopped or self.holds_lock)


def to_blame(suspects: Sequence[int], evidence: Mapping[int, Evidence]) -> int | None:
    """The rank at fault, or None where all wait for one another.

    One that is stopped, wherever it is; then one that wrote no stack, which is stuck in the kernel; then one that holds
    the interpreter's lock; then one whose main thread is not waiting for others. A call that waits for others while it
    holds that lock is the last to be blamed.

    Args:
        suspects: in the order of suspicion.
        evidence: of all ranks.
    """
    stopped = [rank for rank in sorted(evidence) if evidence[rank].stopped]
    frozen = [rank for rank in suspects if evidence[rank].frozen]
    busy = [rank for rank in suspects if not evidence[rank].waits]
    held = [rank for rank in suspects if evidence[rank].holds_lock]
    guilty = stopped or frozen or [rank for rank in held if rank in busy] or busy or held
    if guilty:
        return guilty[0]
    return suspects[0] if len(evidence) == 1 else None


def deed(evidence: Evidence) -> str:
    """What the rank does, in words: `it sleeps or waits (do_nanosleep), in train at cell.py:7`."""
    kernel = evidence.kernel
    words = []
    if evidence.stopped:
        words.append("it was stopped by a signal (SIGSTOP)")
    elif not evidence.begun:
        words.append("its process has not come up")
    elif evidence.frozen:
        place = f" ({kernel.place})" if kernel is not None and kernel.place else ""
        words.append(f"it answers no signal: it is stuck in the kernel{place}")
    elif evidence.waits and not evidence.holds_lock:
        words.append("it waits for other ranks")
    elif kernel is not None and kernel.busy_share is not None:
        waiting = f"it sleeps or waits{f' ({kernel.place})' if kernel.place else ''}"
        words.append("it keeps a core busy" if kernel.busy else waiting)
    if place := _where(evidence):
        words.append(f"in {place}")
    return ", ".join(words)


def lock_held(evidence: Evidence) -> str:
    """How one that `holds_lock` does: `holds the GIL in train at cell.py:7 (native code that does not release it)`."""
    elsewhere = evidence.kernel is not None and evidence.kernel.main_turns >= _TURNS  # the main thread waits for it too
    place = "one of its threads" if elsewhere else _where(evidence)
    return f"holds the GIL{f' in {place}' if place else ''} (native code that does not release it)"


def _where(evidence: Evidence) -> str:
    """The line of Python that its main thread is in; "": not known."""
    innermost = _innermost(evidence.stack)
    return f"{innermost['function']} at {innermost['file']}:{innermost['line']}" if innermost is not None else ""


def _innermost(text: str) -> re.Match[str] | None:
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    return _FRAME.search(main)
