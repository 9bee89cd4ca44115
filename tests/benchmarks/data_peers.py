"""How other libraries read the volume of bench_data: what is not installed is left out.

Those marked "converted" read shards of a hundred files that were made of the volume beforehand, with a cache on the
local disk where they have one; the others read the files themselves. Where the volume is on S3 so are the shards, and
who has no client of its own reads by fsspec.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any

import fsspec

from tests.benchmarks.data_cases import Reader, cut

BATCH = 16
SHARD_FILES = 100
THREADS = 32
Passes = Iterator[Iterator[Any]]

PEERS: dict[str, tuple[str, str]] = {  # name: module, distribution
    "torchdata.nodes, 32 threads": ("torchdata", "torchdata"),
    "Grain": ("grain", "grain"),
    "LitData, raw files": ("litdata", "litdata"),
    "LitData, converted": ("litdata", "litdata"),
    "MosaicML Streaming, converted": ("streaming", "mosaicml-streaming"),
    "WebDataset, converted": ("webdataset", "webdataset"),
}


def installed() -> dict[str, str]:
    """Peers that can be imported, with their versions."""
    return {
        name: importlib.metadata.version(distribution)
        for name, (module, distribution) in PEERS.items()
        if importlib.util.find_spec(module) is not None
    }


def convert(name: str, volume: pathlib.Path, shards: pathlib.Path) -> None:
    """Makes what a peer reads instead of the files; nothing for those that read the files."""
    paths = sorted(volume.iterdir())
    if name.startswith("WebDataset"):
        shards.mkdir()
        for start in range(0, len(paths), SHARD_FILES):
            with tarfile.open(shards / f"{start:06}.tar", "w") as tar:
                for path in paths[start : start + SHARD_FILES]:
                    tar.add(path, path.name)
    elif name.startswith("MosaicML"):
        from streaming import MDSWriter

        size = SHARD_FILES * (paths[0].stat().st_size + 16)
        with MDSWriter(out=str(shards), columns={"body": "bytes"}, size_limit=size) as writer:
            for path in paths:
                writer.write({"body": path.read_bytes()})
    elif name == "LitData, converted":
        import litdata

        litdata.optimize(
            _read, [str(path) for path in paths], str(shards), chunk_size=SHARD_FILES, num_workers=1, verbose=False
        )


def _read(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


def passes(name: str, volume: str, shards: str, home: str, workers: int) -> Passes:
    """An iterator over batches for each epoch, endlessly."""
    return {
        "torchdata.nodes, 32 threads": _torchdata, "Grain": _grain, "LitData, raw files": _litdata_raw,
        "LitData, converted": _litdata, "MosaicML Streaming, converted": _mosaic, "WebDataset, converted": _webdataset,
    }[name](volume, shards, home, workers)  # fmt: skip


class _Tenth:
    """A batch as it is, each body cut as bench_data cuts those it reads itself."""

    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, items: Any) -> list[bytes]:
        return [cut(bytes(item if self.key is None else item[self.key])) for item in items]


def _torchdata(volume: str, shards: str, home: str, workers: int) -> Passes:
    from torch.utils.data import RandomSampler
    from torchdata import nodes

    made = Reader(volume)
    source: Any = nodes.SamplerWrapper(RandomSampler(made.names))
    read = nodes.ParallelMapper(source, lambda number: made(made.names[number]), num_workers=THREADS, method="thread")
    loader = nodes.Loader(nodes.Prefetcher(nodes.Batcher(read, BATCH, drop_last=False), 4))
    while True:
        yield iter(loader)


def _grain(volume: str, shards: str, home: str, workers: int) -> Passes:
    import grain

    made = Reader(volume)
    epoch = 0
    while True:
        read = grain.MapDataset.source(made.names).seed(epoch).shuffle().map(made).batch(BATCH, batch_fn=list)
        steps = read.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=64))
        if workers:
            steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        yield iter(steps)
        epoch += 1


def _allow_http() -> None:
    """LitData's own client of S3 refuses the server here, which has no certificate."""
    clients: Any = importlib.import_module("litdata.streaming.downloader")
    clients._OBSTORE_CLIENT_OPTIONS = {**clients._OBSTORE_CLIENT_OPTIONS, "allow_http": True}


def _litdata_raw(volume: str, shards: str, home: str, workers: int) -> Passes:
    import litdata
    from torch.utils.data import DataLoader

    _allow_http()
    data = litdata.StreamingRawDataset(volume, cache_dir=f"{home}/litdata", cache_files=True)
    loader: Any = DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, collate_fn=_Tenth(None), persistent_workers=workers > 0
    )
    while True:
        yield iter(loader)


def _litdata(volume: str, shards: str, home: str, workers: int) -> Passes:
    import litdata

    _allow_http()
    source = shards if "://" in shards else f"local:{shards}"
    data = litdata.StreamingDataset(source, cache_dir=f"{home}/litdata", shuffle=True)
    loader = litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, collate_fn=_Tenth(None), persistent_workers=workers > 0
    )
    while True:
        yield iter(loader)


def _mosaic(volume: str, shards: str, home: str, workers: int) -> Passes:
    import streaming
    from torch.utils.data import DataLoader

    data = streaming.StreamingDataset(remote=shards, local=f"{home}/mosaic", shuffle=True, batch_size=BATCH)
    loader: Any = DataLoader(
        data, BATCH, num_workers=workers, collate_fn=_Tenth("body"), persistent_workers=workers > 0
    )
    while True:
        yield iter(loader)


def _webdataset(volume: str, shards: str, home: str, workers: int) -> Passes:
    import webdataset

    pathlib.Path(home, "web").mkdir(exist_ok=True)
    schemes: Any = importlib.import_module("webdataset.gopen")
    schemes.gopen_schemes["s3"] = _opened
    urls = Reader(shards).urls
    suffix = pathlib.PurePath(Reader(volume).names[0]).suffix[1:]
    data = webdataset.WebDataset(urls, shardshuffle=len(urls), cache_dir=f"{home}/web").shuffle(SHARD_FILES)
    batches = data.batched(BATCH, collation_fn=_Tenth(suffix))
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield iter(loader)


def _opened(url: str, *_: Any, **__: Any) -> io.BytesIO:
    """A shard by fsspec: WebDataset's own way is a command-line tool of each store."""
    return io.BytesIO(fsspec.filesystem("s3").cat_file(url))
