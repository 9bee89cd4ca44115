"""The loop's counters and last metrics, as one thing that is checkpointed a rank."""

from __future__ import annotations

from typing import Any

from sgpu.metrics.recorder import number_of


class Progress:
    """Where the loop is.

    Attributes:
        step: optimizer steps completed.
        epoch: of the next batch.
        batch: batches of this epoch that were trained.
        losses: the last good ones of this rank, where the loop checks them; `bad_in_a_row`: batches passed over since.
    """

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.batch = 0
        self.losses: list[float] = []
        self.bad_in_a_row = 0
        self._metrics: dict[str, Any] = {}

    def note(self, values: dict[str, Any]) -> None:
        """Remembers the last value of each name; a tensor as it is, so that nothing waits for a GPU."""
        for name, value in values.items():
            detach = getattr(value, "detach", None)  # a tensor must not keep its graph alive
            self._metrics[name] = value if detach is None else detach()

    def metrics(self) -> dict[str, float]:
        """The last value of each name as a number."""
        return {name: number_of(name, value) for name, value in self._metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "epoch": self.epoch, "batch": self.batch, "metrics": self.metrics(),
            "losses": self.losses, "bad_in_a_row": self.bad_in_a_row,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch, self.batch = int(state["step"]), int(state["epoch"]), int(state["batch"])
        self._metrics = dict(state.get("metrics", {}))
        self.losses, self.bad_in_a_row = list(state.get("losses", [])), int(state.get("bad_in_a_row", 0))
