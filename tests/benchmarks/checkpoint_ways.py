"""The ways to save a checkpoint that bench_checkpoint compares, behind one set of methods.

save(state, step)   returns when training may go on
before_step()       is called before each optimizer step
done()              whether it is durable on this rank; does not wait
wait()              until it is
load(state, step)   back into the live tensors
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from sgpu.checkpoint import Checkpointer, CheckpointPolicy


class Way:
    name = ""

    def __init__(self, root: str, rank: int, group: Any) -> None:
        self.root = pathlib.Path(root) / self.name.replace(" ", "-").replace(",", "")
        self.rank = rank
        self.group = group

    def save(self, state: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def before_step(self) -> None:
        return

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def load(self, state: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


class TorchSave(Way):
    """Rank 0 writes everything, and everybody waits: what scripts do."""

    name = "torch.save"

    def save(self, state: dict[str, Any], step: int) -> None:
        if self.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            with open(self.root / "new", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self.root / "new", self.root / f"{step}.pt")
        dist.barrier()

    def load(self, state: dict[str, Any], step: int) -> None:
        loaded = torch.load(self.root / f"{step}.pt", weights_only=True, map_location="cpu")
        for live, saved in zip(tensors_of(state), tensors_of(loaded), strict=True):
            live.copy_(saved)


class Dcp(Way):
    name = "dcp.save"

    def save(self, state: dict[str, Any], step: int) -> None:
        dcp.save(state, storage_writer=FileSystemWriter(self.root / str(step)), process_group=self.group)

    def load(self, state: dict[str, Any], step: int) -> None:
        reader = FileSystemReader(self.root / str(step))
        dcp.load(state, storage_reader=reader, process_group=self.group)


class Async(Dcp):
    """`dcp.async_save` as it is by default: a thread, and fresh memory each time."""

    name = "async_save"
    kind = AsyncCheckpointerType.THREAD
    staging: StagingOptions | None = None

    def __init__(self, root: str, rank: int, group: Any) -> None:
        super().__init__(root, rank, group)
        self._stager = DefaultStager(self.staging) if self.staging is not None else None
        self._future: Any = None
        self._staged: Any = None

    def save(self, state: dict[str, Any], step: int) -> None:
        found: Any = dcp.async_save(
            state, storage_writer=FileSystemWriter(self.root / str(step)), process_group=self.group,
            async_checkpointer_type=self.kind, async_stager=self._stager,
        )  # fmt: skip
        # With staging in the background it answers with two futures.
        self._staged = getattr(found, "staging_completion", None)
        self._future = getattr(found, "upload_completion", found)

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self) -> None:
        self.before_step()
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def options(*, shared: bool, background: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False, use_shared_memory=shared, use_async_staging=background, use_non_blocking_copy=False
    )


class AsyncReused(Async):
    name = "async_save, reused memory"
    staging = options(shared=False, background=False)


class AsyncShared(Async):
    name = "async_save, process, shared"
    kind = AsyncCheckpointerType.PROCESS
    staging = options(shared=True, background=False)


class AsyncBackground(Async):
    name = "async_save, process, background"
    kind = AsyncCheckpointerType.PROCESS
    staging = options(shared=True, background=True)


class Sgpu(Way):
    name = "sgpu"
    staging = "background"

    def __init__(self, root: str, rank: int, group: Any) -> None:
        super().__init__(root, rank, group)
        self._draws = f"rng.rank{rank}"
        self._box: dict[str, Any] = {}
        self._own = _Value()
        self._reports: list[Any] = []
        self._saved = 0
        self.reopen()

    def reopen(self) -> None:
        """As a restarted trainer would."""
        self.checkpointer = Checkpointer(
            CheckpointPolicy(keep_last=2), {"state": self._box}, per_rank={"rng": self._own}, root=str(self.root),
            replicated={"state"}, staging=self.staging,  # type: ignore[arg-type]
        )  # fmt: skip

    def _take(self, state: dict[str, Any]) -> None:
        self._box.clear()
        self._box.update({key: value for key, value in state.items() if key != self._draws})
        self._own.value = state.get(self._draws)

    def save(self, state: dict[str, Any], step: int) -> None:
        self._take(state)
        self.checkpointer.save(step)
        self._saved += 1

    def before_step(self) -> None:
        self.checkpointer.before_optimizer_step()

    def done(self) -> bool:
        self._reports += self.checkpointer.poll()
        return len(self._reports) == self._saved

    def wait(self) -> None:
        self.checkpointer.wait()
        self.done()

    def load(self, state: dict[str, Any], step: int) -> None:
        self._take(state)
        restored = self.checkpointer.restore()
        assert restored is not None
        assert restored.step == step
        self.source = restored.source

    def close(self) -> None:
        self.checkpointer.close()


class SgpuForeground(Sgpu):
    name = "sgpu, foreground"
    staging = "foreground"


class _Value:
    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


WAYS = (TorchSave, Dcp, Async, AsyncReused, AsyncShared, AsyncBackground, SgpuForeground, Sgpu)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
