"""Loaders that can be resumed in the middle of an epoch, each as its documentation says; and a rank that uses one.

python -m tests.benchmarks.resume_peers '{"peer": ..., ...}' is one rank of one life (see `Life`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

BATCH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """What one rank does: it takes batches from where the states say, keeps its own state, and is killed.

    Attributes:
        folder: of states, sample numbers and the peer's data.
        name: of this life; `after`: of the one whose states are gone on with, with `former` ranks.
        stop: batches until the state is taken; two more are made then, for nobody. None: to the end.
    """

    peer: str
    folder: str
    name: str
    samples: int
    world: int
    rank: int
    workers: int
    stop: int | None
    after: str | None = None
    former: int = 1

    def path(self, what: str, rank: int | None = None) -> pathlib.Path:
        return pathlib.Path(self.folder) / f"{self.name}.{what}.{self.rank if rank is None else rank}"

    def states(self) -> list[Any]:
        """Of all ranks of the life before."""
        before = dataclasses.replace(self, name=self.after or "")
        return [pickle.loads(before.path("state", rank).read_bytes()) for rank in range(self.former)]


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return number


class Peer:
    """A way to resume. `package`: what has to be installed for it."""

    package = "torch"

    def prepare(self, folder: str, samples: int) -> None:
        """Writes the data in the peer's format."""

    def open(self, life: Life) -> Any:
        raise NotImplementedError

    def state(self, loader: Any, batches: int) -> Any:
        """After so many batches of this rank."""
        return loader.state_dict()

    def resume(self, loader: Any, states: list[Any], life: Life) -> Iterable[Any]:
        """The rest of the epoch."""
        loader.load_state_dict(states[life.rank % len(states)])
        rest: Iterable[Any] = loader
        return rest


class Sgpu(Peer):
    def open(self, life: Life) -> Any:
        from sgpu.data import DataLoader

        return DataLoader(Numbers(life.samples), BATCH, shuffle=True, seed=1, num_workers=life.workers)


class Skipping(Peer):
    """torch alone: the batches before are drawn from the sampler and dropped, as many as make the same samples."""

    def open(self, life: Life) -> Any:
        sampler = DistributedSampler(Numbers(life.samples), num_replicas=life.world, rank=life.rank, seed=1)
        return TorchLoader(Numbers(life.samples), BATCH, sampler=sampler, num_workers=life.workers)

    def state(self, loader: Any, batches: int) -> Any:
        return batches

    def resume(self, loader: Any, states: list[Any], life: Life) -> Iterable[Any]:
        return itertools.islice(loader, states[0] * len(states) // life.world, None)


class Accelerate(Skipping):
    package = "accelerate"

    def open(self, life: Life) -> Any:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, set_seed

        set_seed(1)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        loader: Any = TorchLoader(Numbers(life.samples), BATCH, shuffle=True, num_workers=life.workers)
        return accelerator.prepare(loader)

    def resume(self, loader: Any, states: list[Any], life: Life) -> Iterable[Any]:
        from accelerate import skip_first_batches

        rest: Iterable[Any] = skip_first_batches(loader, states[0] * len(states) // life.world)
        return rest


class Torchdata(Peer):
    package = "torchdata"

    def open(self, life: Life) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        data = Numbers(life.samples)
        sampler = StatefulDistributedSampler(data, life.world, life.rank, shuffle=True, seed=1)
        return StatefulDataLoader(data, batch_size=BATCH, num_workers=life.workers, sampler=sampler)


class Streaming(Peer):
    package = "mosaicml-streaming"

    def prepare(self, folder: str, samples: int) -> None:
        from streaming import MDSWriter
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        with MDSWriter(out=f"{folder}/mds", columns={"id": "int"}, size_limit=max(4000, samples // 3)) as writer:
            for number in range(samples):
                writer.write({"id": number})

    def open(self, life: Life) -> Any:
        from streaming import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(local=f"{life.folder}/mds", shuffle=True, batch_size=BATCH, num_canonical_nodes=1)
        return StreamingDataLoader(data, batch_size=BATCH, num_workers=life.workers)

    def resume(self, loader: Any, states: list[Any], life: Life) -> Iterable[Any]:
        loader.load_state_dict(states[0])
        rest: Iterable[Any] = loader
        return rest


class LitData(Peer):
    package = "litdata"

    def prepare(self, folder: str, samples: int) -> None:
        import litdata

        litdata.optimize(
            fn=_as_record, inputs=list(range(samples)), output_dir=f"{folder}/lit", chunk_size=max(1, samples // 40),
            num_workers=1,
        )  # fmt: skip

    def open(self, life: Life) -> Any:
        import litdata

        data = litdata.StreamingDataset(f"{life.folder}/lit", shuffle=True, drop_last=False)
        return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=life.workers)


def _as_record(number: int) -> dict[str, int]:
    return {"id": number}


PEERS: dict[str, Peer] = {
    "sgpu": Sgpu(), "DistributedSampler, skipping": Skipping(), "accelerate, skip_first_batches": Accelerate(),
    "torchdata StatefulDataLoader": Torchdata(), "MosaicML Streaming": Streaming(), "LitData": LitData(),
}  # fmt: skip


def versions() -> dict[str, str | None]:
    """Of each peer's package; None: it is not installed."""
    found: dict[str, str | None] = {}
    for name, peer in PEERS.items():
        try:
            found[name] = "this" if name == "sgpu" else importlib.metadata.version(peer.package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def numbers(batch: Any) -> list[int]:
    values = batch["id"] if isinstance(batch, dict) else batch
    return [int(value) for value in values]


def be(life: Life) -> None:
    torch.set_num_threads(1)
    if life.world > 1:
        meet = f"file://{life.folder}/{life.name}.meet"
        dist.init_process_group("gloo", init_method=meet, rank=life.rank, world_size=life.world)
    peer = PEERS[life.peer]
    importlib.import_module({"MosaicML Streaming": "streaming", "sgpu": "sgpu.data.loader"}.get(life.peer, "torch"))
    states = life.states() if life.after is not None else []
    began = time.perf_counter()
    loader = peer.open(life)
    batches = peer.resume(loader, states, life) if life.after is not None else loader
    seen: list[int] = []
    first = None
    for count, batch in enumerate(batches, start=1):
        first = time.perf_counter() - began if first is None else first
        if life.stop is None or count <= life.stop:
            seen += numbers(batch)
        if count == life.stop:
            life.path("state").write_bytes(pickle.dumps(peer.state(loader, count)))
            life.path("seen").write_text(json.dumps([first, seen]))
        if life.stop is not None and count == life.stop + 2:
            os.kill(os.getpid(), signal.SIGKILL)
    life.path("seen").write_text(json.dumps([first, seen]))
    os._exit(0)  # some peers' threads do not end


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if "rank" in told:
        be(Life(**told))
    elif "prepare" in told:
        PEERS[told["prepare"]].prepare(told["folder"], told["samples"])
    else:
        print("VERSIONS " + json.dumps(versions()))
