"""Buffers that each rank has of its own: batch norm's statistics where nothing makes them equal."""

from __future__ import annotations

from typing import Any

import torch


class OwnBuffers:
    """A model's persistent buffers on this rank, where several ranks may hold different ones.

    The checkpoint's shared part keeps rank 0's, which is right for another world size; for the same one, each rank gets
    its own back. Under DDP that broadcasts its buffers they are rank 0's anyway.
    """

    def __init__(self, model: Any, *, world_size: int) -> None:
        self._model = model if world_size > 1 and isinstance(model, torch.nn.Module) else None

    def _found(self) -> dict[str, torch.Tensor]:
        if self._model is None:
            return {}
        return {
            f"{prefix}.{name}": buffer
            for prefix, module in self._model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and not hasattr(buffer, "to_local")  # or it is sharded
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().to("cpu", copy=True) for name, buffer in self._found().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Names and shapes were compared with the shared part before; what was not kept for this rank stays."""
        with torch.no_grad():
            for name, buffer in self._found().items():
                if name in state:
                    buffer.copy_(state[name])
