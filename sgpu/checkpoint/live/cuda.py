"""Copies out of CUDA tensors: into pinned memory, on a stream beside the training's. Does nothing for other tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch

from sgpu.checkpoint.format.envelope import flat_bytes

log = logging.getLogger("sgpu.checkpoint")


class SideStreams:
    """Copies that begin when what is queued on the current streams now is done, and hold up nothing queued later.

    Order of calls: made by the training's thread; then, from any thread, `copy` as often as needed, and `finish`.
    """

    def __init__(self, sources: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {source.device for source in sources if source.is_cuda}:
            stream = _stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """`target`: bytes in host memory."""
        stream = self._streams.get(source.device)
        if stream is None:
            target.copy_(flat_bytes(source))
            return
        with torch.cuda.stream(stream):
            target.copy_(flat_bytes(source), non_blocking=True)

    def finish(self) -> None:
        """Waits until all is copied."""
        for stream in self._streams.values():
            stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Pinned:
    """Registers memory with the driver, so that devices copy straight into it; one stretch at a time."""

    def __init__(self) -> None:
        self._address = 0

    def pin(self, memory: torch.Tensor) -> None:
        """Where the driver refuses, copies are slower, and nothing else is different."""
        self.release()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        answer = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if answer == 0:
            self._address = memory.data_ptr()
        else:
            log.warning("checkpoints are staged in memory that is not pinned: cudaHostRegister answered %d", answer)

    def release(self) -> None:
        if self._address:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._address)
            self._address = 0
