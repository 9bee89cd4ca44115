"""Work whose answer is known: a device that computes or remembers wrongly is found by it, and by nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict

_SIZE = 1024
_TRIED_BYTES = 256 * 2**20
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)


class KnownAnswers:
    """A product of matrices and patterns in memory, on each GPU that torch sees, or on the CPU if there is none.

    The entries are small whole numbers, so that every sum is exact in float32 (below 2**24) and the answer does not
    depend on the order of additions.
    """

    name = "known answers"
    kind: ScopeKind = "gpu"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        count = torch.cuda.device_count() if ctx.gpus != () else 0
        for device in [f"cuda:{index}" for index in range(count)] or ["cpu"]:
            yield self._try(torch, torch.device(device))

    def _try(self, torch: Any, device: Any) -> Finding:
        on_gpu = device.type == "cuda"
        kind: ScopeKind = "gpu" if on_gpu else "node"
        name = str(device.index) if on_gpu else ""
        began = time.perf_counter()
        try:
            wrong = wrong_products(torch, device) + wrong_bytes(torch, device, _TRIED_BYTES if on_gpu else _SIZE**2)
        except RuntimeError as error:  # torch's own way to say out of memory, no driver, a failed kernel
            full = isinstance(error, torch.OutOfMemoryError)
            verdict = Verdict.UNKNOWN if full else Verdict.FAILED
            told = f"could not compute: {str(error).splitlines()[0]}"
            return Finding(
                probe=self.name, kind=kind, name=name, verdict=verdict, evidence=told, at_once=verdict is Verdict.FAILED
            )
        if wrong:
            told = f"{wrong} wrong values on {device}; expected none: the device computes or remembers wrongly"
            return Finding(
                probe=self.name, kind=kind, name=name, verdict=Verdict.FAILED, evidence=told, at_once=True
            )  # fmt: skip
        told = f"a product of {_SIZE}x{_SIZE} and patterns in memory are right ({time.perf_counter() - began:.2f} s)"
        return Finding(probe=self.name, kind=kind, name=name, verdict=Verdict.OK, evidence=told)


def wrong_products(torch: Any, device: Any) -> int:
    """Entries of a product of two matrices on `device` that are not what closed arithmetic says."""
    left, right, answer = (matrix.to(device) for matrix in _matrices(torch))
    return int((torch.matmul(left, right) != answer).sum())


def _matrices(torch: Any) -> tuple[Any, Any, Any]:
    """Two matrices and their product: the left one has a column pattern a, the right one a row pattern b.

    left[i, k] = r(i) + a(k), right[k, j] = c(j) + b(k): the product is n r c + r sum(b) + c sum(a) + sum(a b).
    """
    steps = torch.arange(_SIZE, dtype=torch.int64)
    rows, columns, a, b = steps % 13, steps % 11, steps % 7, steps % 5
    left, right = rows[:, None] + a[None, :], columns[None, :] + b[:, None]
    answer = (
        _SIZE * rows[:, None] * columns[None, :] + rows[:, None] * b.sum() + columns[None, :] * a.sum() + (a * b).sum()
    )
    return left.float(), right.float(), answer.float()


def wrong_bytes(torch: Any, device: Any, size_bytes: int) -> int:
    """Bytes that did not keep a pattern that was written to them."""
    memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    wrong = 0
    for pattern in _PATTERNS:
        memory.fill_(pattern)
        wrong += int((memory != pattern).sum())
    return wrong
