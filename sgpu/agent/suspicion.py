"""A rank that may hang: its stacks are asked for, read, and the blame is laid."""

from __future__ import annotations

from sgpu.agent import stacks
from sgpu.agent.failure import Failure
from sgpu.agent.watchdog import Silence
from sgpu.contract.rundir import RunDir


class Suspicion:
    """From the moment that ranks were told to write their stacks.

    Args:
        until: when the stacks are taken for written (monotonic seconds).
    """

    def __init__(self, run: RunDir, generation: int, *, until: float) -> None:
        self.until = until
        self._run, self._generation = run, generation

    def failure(self, silence: Silence, *, time: float) -> Failure:
        """The hang of the rank at fault, with where its stack can be read."""
        written = {rank: self._stack(rank) for rank in silence.alike or (silence.rank,)}
        rank = stacks.to_blame(written)
        section, limit = silence.section.name.lower(), silence.limit_seconds
        where = self._run.stacks(self._generation, rank)
        told = (
            f"stacks: {where}" if written[rank].strip() else "it wrote no stack: it is stopped, or stuck in the kernel"
        )
        return Failure(
            kind="hang", rank=rank, generation=self._generation, step=silence.step, cause=f"no step for {limit:g} s",
            message=f"rank {rank} completed no step for {silence.silent_seconds:.1f} s (limit {limit:g} s) in section "
            f"'{section}' after step {silence.step}; {told}",
            time=time, traceback=written[rank].strip() or None,
        )  # fmt: skip

    def _stack(self, rank: int) -> str:
        try:
            return self._run.stacks(self._generation, rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""
