"""The two-method protocol by which anything takes part in a checkpoint."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Checkpointable(Protocol):
    """What can say where it stands and go back there.

    `load_state_dict` may be called at any time before the next use; what `state_dict` gave earlier is not changed by
    later use.
    """

    def state_dict(self) -> dict[str, Any]:
        """A plain copy of the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Goes back to `state`."""
