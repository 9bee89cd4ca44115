"""A volume as a torch dataset: an iterable of local paths, split over ranks and workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from sgpu import runtime, settings
from sgpu.contract.errors import InputError, PositionError
from sgpu.data.fetching.warming import Warming
from sgpu.data.ordering.order import fold, order
from sgpu.data.source import Source, options_of
from sgpu.data.volumes.credentials import Provider

_BLOCK = 1024


class Run:
    """The files that a loader asked for next, and how many of them were taken."""

    def __init__(self, numbers: Sequence[int], epoch: int) -> None:
        self.numbers, self.epoch = numbers, epoch
        self.handed = 0


class VolumeDataset(IterableDataset[Any]):
    """Local paths of the files of a volume, each fetched once a node and kept in a cache.

    Under `sgpu.data.DataLoader`, alone or wrapped in datasets that give one sample a file, its position is exact, and
    any other world size and number of workers continues from it. Under any other loader it splits its files over all
    ranks and workers: none twice, none missing. There the epoch is the one that `set_epoch` told (workers that live on
    see it); iterated directly, each pass that ends is followed by the next epoch's order.

    Args:
        url: a folder (a mount, too), or a URL that fsspec opens.
        pattern: which files, relative to the volume; "**/" stands for any folders, "{jpg,png}" for either.
        yield_metadata: give (local path, FileInfo) instead of local paths alone.
        shuffle: a new order each epoch, a function of seed and epoch alone.
        cache_dir: None: "cache" in SGPU_HOME. Relative paths are kept below it.
        cache_limit_bytes: of all that is in the cache folder; None: only the disk limits it.
        min_free_disk_bytes: the cache leaves so much of its disk free; None: the setting, or a tenth.
        credentials: a function of a module (or its name), which gives fsspec's storage options; asked at the beginning
            and whenever the store refuses. None: the usual means of each store, looked up anew then.

    Raises:
        VolumeError: the volume does not exist, is empty, or cannot be read.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        pattern: str = "**/*",
        shuffle: bool = False,
        seed: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit_bytes: int | None = None,
        min_free_disk_bytes: int | None = None,
        yield_metadata: bool = False,
        credentials: Provider | str | None = None,
    ) -> None:
        self._begin(
            Source(options_of(url, pattern, cache_dir, cache_limit_bytes, min_free_disk_bytes, credentials)),
            shuffle,
            seed,
        )
        self.yield_metadata = yield_metadata

    def _begin(self, source: Source, shuffle: bool, seed: int) -> None:
        self.source = source
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed must be a whole number; found {seed!r}")
        if not isinstance(shuffle, bool | int):  # "False" would be true
            raise InputError(f"shuffle must be True or False; found {shuffle!r}")
        self.url, self.pattern = source.volume.url, source.options.pattern
        self.shuffle, self.seed = bool(shuffle), seed
        self._shared_epoch = shared_numbers(1)
        self.told = 0, 0  # how often somebody called set_epoch, and with what
        self._start = self._taken = 0  # where a pass begins; how far the present one is
        self._stream: tuple[int, int] | None = None
        self._world: tuple[int, int] | None = None
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, pattern={self.pattern!r}): {len(self.source)} files"

    def __len__(self) -> int:
        """Files in the volume, whoever reads them."""
        return len(self.source)

    # what a number stands for, and what is given for it: a file and its path, unless a subclass divides files
    def file_of(self, number: int) -> int:
        return number

    def item_of(self, number: int, path: str, epoch: int) -> Any:
        return (path, self.source.info(number)) if self.yield_metadata else path

    @property
    def epoch(self) -> int:
        return int(self._shared_epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """The order of `epoch` from the next pass on; its files that were taken stay taken if it is the present one."""
        self.told = self.told[0] + 1, epoch
        self.follow(epoch)

    def follow(self, epoch: int) -> None:
        """The same, said by a loader; others that read this data set too stay in their own epochs."""
        if epoch != self.epoch:
            self._start = self._taken = 0
        self._shared_epoch[0] = epoch

    def relative_path(self, local: str | os.PathLike[str]) -> str:
        """The path inside the volume of a path that this data set gave (labels are in the folders' names)."""
        return self.source.relative_path(local)

    def prefetch(self, *, wait: bool = True, progress: bool = True) -> Warming:
        """Brings all files into this node's cache, as far as there is room, in the order of the present epoch.

        Args:
            wait: until they are here; else a process of its own goes on beside the training, for as long as the handle
                is kept.
            progress: draws a bar on standard error.

        Returns:
            A handle with `progress`, `wait(timeout_seconds)` and `cancel()`. Ranks of a node share the work.

        Raises:
            FetchError: files could not be read; the others are here.
        """
        here = settings.worker_environment()
        first = here.local_rank / here.local_world_size if here else 0.0
        warming = Warming(
            self.source, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, first=first, shown=progress
        )
        if wait:
            warming.wait()
        return warming

    # ---- what a loader's worker says

    def set_world(self, rank: int, world: int) -> None:
        """Who reads, for processes that cannot know it by themselves."""
        self._world = rank, world

    def restart(self, epoch: int) -> None:
        """The next pass is a whole one over `epoch`."""
        self._start, self._taken, self._stream = 0, 0, None
        self._shared_epoch[0] = epoch

    # ---- one run of files, as a loader's worker asks for them

    def begin_run(self, numbers: Sequence[int], epoch: int) -> Run:
        self._run = Run(numbers, epoch)
        return self._run

    def continue_run(self, run: Run) -> None:
        self._run = run

    def end_run(self) -> None:
        self._run = None

    # ---- iteration

    def __getitem__(self, number: Any) -> Any:
        raise InputError(
            f"VolumeDataset is gone over, as in `for path in data`; found [{number!r}]. For files by number use "
            f"sgpu.data.VolumeFiles({self.url!r})."
        )

    def __iter__(self) -> Iterator[Any]:
        return self._of_stream() if self._run is None else self._of_run(self._run)

    def _of_run(self, run: Run) -> Iterator[Any]:
        worker = get_worker_info()
        first = worker is None or worker.id == 0  # its batch is the first; the others' would compete with it
        source = self.source
        while run.handed < len(run.numbers):
            number = run.numbers[run.handed]
            run.handed += 1
            then = [self.file_of(later) for later in run.numbers[run.handed :]] if first and source.is_cold else ()
            yield self.item_of(number, source.obtain(self.file_of(number), then), run.epoch)

    def _of_stream(self) -> Iterator[Any]:
        stream, streams = self._whose()
        if self._stream is not None and self._stream != (stream, streams):
            raise PositionError(
                f"the saved position is of stream {self._stream[0]} of {self._stream[1]} (rank x worker); "
                f"this is {stream} of {streams}. Resume with the same world size and workers, or use "
                "sgpu.data.DataLoader, which continues exactly with any.",
                saved=list(self._stream), found=[stream, streams],
            )  # fmt: skip
        epoch, count = self.epoch, len(range(stream, len(self), streams))
        taken = self._taken = self._start  # its own, since another pass may go over this data set in between
        while taken < count:
            block = stream + streams * np.arange(taken, min(count, taken + _BLOCK), dtype=np.int64)
            for number in self._order(block, epoch):
                taken += 1
                self._taken = taken
                yield self.item_of(int(number), self.source.obtain(self.file_of(int(number))), epoch)
        self._start, self._taken, self._stream = 0, 0, None
        if get_worker_info() is None:
            self._shared_epoch[0] = epoch + 1

    def _order(self, positions: Any, epoch: int) -> Any:
        return order(positions, samples=len(self), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _whose(self) -> tuple[int, int]:
        """The first of the places in the order that this process reads, and how far apart they are.

        Each rank has every so-many-th, and its workers share these: ranks may have different numbers of workers.
        """
        rank, world = runtime.rank(), runtime.world_size()
        if world == 1 and self._world is not None:
            rank, world = self._world
        worker = get_worker_info()
        return (rank, world) if worker is None else (rank + world * worker.id, world * worker.num_workers)

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """The position of this process' own stream, plain values."""
        stream, streams = self._whose()
        return {
            "version": 1, "epoch": self.epoch, "taken": self._taken, "stream": stream, "streams": streams,
            "seed": fold(self.seed), "shuffle": self.shuffle, "listing": self.source.listing_state(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues there at the next `iter`.

        Raises:
            ListingChangedError: the volume holds other files now.
            PositionError: seed or shuffle differ; another number of streams is refused at `iter`.
        """
        if not isinstance(state, dict) or not {"epoch", "taken", "stream", "streams"} <= state.keys():
            raise PositionError(
                f"expected a state of VolumeDataset.state_dict; found {type(state).__name__} {state!r:.80}"
            )
        self.source.check_listing(state)
        if (state["seed"], state["shuffle"]) != (fold(self.seed), self.shuffle):
            raise PositionError(
                f"the saved order has seed {state['seed']} and shuffle {state['shuffle']}; this data set has "
                f"seed {self.seed} and shuffle {self.shuffle}. Make it as it was, or start without this state.",
                saved=[state["seed"], state["shuffle"]], found=[self.seed, self.shuffle],
            )  # fmt: skip
        self._shared_epoch[0] = state["epoch"]
        self._start = self._taken = state["taken"]
        self._stream = (state["stream"], state["streams"]) if self._taken else None

    def __getstate__(self) -> dict[str, Any]:
        world = (runtime.rank(), runtime.world_size())
        return {**self.__dict__, "_run": None, "_world": world if world[1] > 1 else self._world}


def shared_numbers(count: int) -> torch.Tensor:
    """Whole numbers that worker processes see change, however they were started."""
    numbers = torch.zeros(count, dtype=torch.int64)
    numbers.share_memory_()  # type: ignore[no-untyped-call]
    return numbers
