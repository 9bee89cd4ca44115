"""Which of several silent ranks holds the others up, from the stacks that they wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Where a rank waits for others: in a collective, or in the backward pass that runs DDP's.
_WAITING = ("/torch/distributed/", "/torch/autograd/")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in ', re.MULTILINE)


def to_blame(stacks: Mapping[int, str]) -> int:
    """The rank at fault.

    One that wrote no stack is frozen (stopped, or stuck in the kernel); then one whose main thread is not waiting for
    others; where all wait, the first.

    Args:
        stacks: by rank, in the order of suspicion; as `faulthandler` writes them.
    """
    frozen = [rank for rank, text in stacks.items() if not text.strip()]
    busy = [rank for rank, text in stacks.items() if text.strip() and not waits(text)]
    return (frozen or busy or list(stacks))[0]


def waits(text: str) -> bool:
    """Whether the main thread (faulthandler writes it last) waits for other ranks."""
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    innermost = _FRAME.search(main)
    return innermost is not None and any(mark in innermost["file"] for mark in _WAITING)
