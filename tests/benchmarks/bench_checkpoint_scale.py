"""Metadata of a 405-billion-parameter model on 16,384 ranks: bytes, and seconds to plan, commit, list, check and open.

Llama 3.1 405B (126 layers, hidden 16,384, feed-forward 53,248, 8 key and value heads of 128, vocabulary 128,256) with
bfloat16 weights and float32 master weights, both moments of Adam and their steps, sharded by FSDP over 2,048 and by
tensor parallelism over 8: 4,548 sharded tensors, about 41 million shards. Data files are sparse, and ranks that hold
alike share one index file (they differ in offsets only); everything else is written and read as for real, by the code
that does it in a run. `--quick`: 512 ranks.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from sgpu.checkpoint import Catalog
from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import choose
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.writing import commit, ownership, shard_index, told
from sgpu.checkpoint.writing.commit import Patience
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.told import Told
from tests.benchmarks import large_model

REPOSITORY = pathlib.Path(__file__).parents[2]


class Timer:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def time(self, what: str, action: Callable[[], Any], **facts: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = action()
        self.note(what, time.perf_counter() - wall, time.process_time() - cpu, **facts)
        return result

    def note(self, what: str, wall: float | None = None, cpu: float | None = None, **facts: Any) -> None:
        self.rows.append({"what": what, "wall s": wall, "CPU s": cpu, **facts})


def run(quick: bool = False) -> list[dict[str, Any]]:
    world_size = 512 if quick else 16_384
    timer = Timer()
    timer.note("plan one rank's share", *_plan(), ranks=16_384)
    with tempfile.TemporaryDirectory(prefix="sgpu-scale-") as folder:
        root = pathlib.Path(folder)
        _save(root, world_size, timer)
        _look(root, timer)
    for row in timer.rows:
        row["ranks"] = row.get("ranks", world_size)
    return timer.rows


def _save(root: pathlib.Path, world_size: int, timer: Timer) -> None:
    store = PosixStore(root)
    attempt = ownership.claim(store, 0)
    (root / names.folder_name(1000, attempt)).mkdir()
    inside = root / names.folder_name(1000, attempt)
    kinds: dict[tuple[Any, ...], tuple[Told, SaveJob]] = {}
    shards = wall = cpu = 0.0
    for rank in range(world_size):
        kind = large_model.kind_of(rank, world_size)
        if kind in kinds:
            first, of = kinds[kind]
            mine = large_model.like(first, rank, world_size)
            (inside / names.index_file(rank)).hardlink_to(inside / names.index_file(first.rank))
            (inside / names.done_name(rank)).write_text(json.dumps(mine.to_json(), separators=(",", ":")))
        else:
            of = large_model.job(rank, world_size, attempt)
            began = time.perf_counter(), time.process_time()
            told.tell_done(store, of, large_model.written(of))
            wall, cpu = wall + time.perf_counter() - began[0], cpu + time.process_time() - began[1]
            mine = Told.from_json(json.loads((inside / names.done_name(rank)).read_text()))
            kinds[kind] = mine, of
        shards += len(of.layout.rows)
        for file in mine.files:
            with (inside / file.name).open("wb") as sparse:
                sparse.truncate(file.size_bytes)
    first = large_model.job(0, world_size, attempt)
    timer.note("a rank tells what it has written", wall / len(kinds), cpu / len(kinds), ranks=1)
    timer.rows[-1]["shards"] = f"{shards:,.0f} in all, {len(kinds)} kinds of rank"
    sizes = store.sizes(first.folder)
    handed = len(json.dumps(first.to_json()).encode())
    again = len(json.dumps(first.to_json(with_layout=False)).encode())
    for what, size in (
        ("to its helper, with the layout", handed), ("to its helper, later saves", again),
        ("its done-file", sizes[names.done_name(0)]), ("its index file", sizes[names.index_file(0)]),
    ):  # fmt: skip
        timer.note(what, ranks=1, MB=size / 1e6)
    timer.time("rank 0 merges and commits", lambda: commit.commit(store, first, Patience(seconds=lambda: 60.0)))
    sizes = store.sizes(first.folder)
    index = sum(size for name, size in sizes.items() if name.endswith(".index"))
    for name, size in ((".metadata", sizes[names.METADATA]), ("manifest.json", sizes[names.MANIFEST])):
        timer.note(name, MB=size / 1e6)
    timer.note("index files of all ranks", MB=index / 1e6)
    for copy in range(2, 5):  # a root with four of them
        target = root / names.folder_name(1000 * copy, attempt)
        shutil.copytree(inside, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    pathlib.Path(target).hardlink_to(source)


def _look(root: pathlib.Path, timer: Timer) -> None:
    catalog, store = Catalog(root), PosixStore(root)
    entries = timer.time("list a root with four such checkpoints", catalog.entries)
    assert [entry.state for entry in entries] == ["valid"] * 4, entries
    assert timer.time("find the newest valid one", lambda: choose.newest_valid(store)) is not None
    assert timer.time("check one, every file's size", lambda: catalog.verify(1000)).ok
    told_of = timer.time("open its names, shapes and dtypes", lambda: catalog.inspect(1000))
    timer.rows[-1]["shards"] = (
        f"{sum(tensor.shards for tensor in told_of.tensors):,} of {len(told_of.tensors):,} tensors"
    )
    folder = entries[-1].folder
    opened = choose.open_checkpoint(store, folder, shards=False)
    assert opened.manifest is not None
    world_size = opened.manifest.world_size

    def few() -> None:
        """What a rank of the same world needs: its own shards, and the norms that a neighbour wrote."""
        finder = shard_index.ShardFinder(
            store, folder, opened.manifest, opened.path, near=(world_size // 2 + 1, world_size)
        )
        for _ in range(2):
            finder.more(opened.index)

    timer.time("one rank that restores learns where its shards lie", few, ranks=1)


PLAN = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sgpu.checkpoint.live import share
from sgpu.checkpoint.live.parts import Held
from tests.benchmarks import large_model as scale

WORLD = 16_384
dist.init_process_group("fake", rank=5000, world_size=WORLD, store=FakeStore())
mesh = init_device_mesh("cpu", (WORLD // 8, 8), mesh_dim_names=("data", "tensors"))
cuts = {"rows": (_StridedShard(0, split_factor=8), Shard(0)), "columns": (Shard(0), Shard(1)),
        "not": (Shard(0), Replicate())}
held = {}
for name, shape, cut, dtype in scale.all_tensors():
    kind = getattr(torch, dtype)
    whole = torch.empty(shape, device="meta", dtype=kind)
    found = scale.shard_of(shape, cut, 625, WORLD // 8, 0)
    local = torch.empty(found[1] if found else (0, *shape[1:]), device="meta", dtype=kind)
    meta = TensorMeta(torch.Size(shape), whole.stride(), kind)
    spec = DTensorSpec(mesh, cuts[cut], tensor_meta=meta)
    held[name] = Held(tensor=DTensor(local, spec, requires_grad=False), spread=True)
for name, _, _ in scale.parameters():
    held[f"optimizer.state.model.{name}.step"] = Held(tensor=torch.zeros(()), spread=True)
wall, cpu = time.perf_counter(), time.process_time()
planned = share.plan(held, 5000, WORLD)
print(time.perf_counter() - wall, time.process_time() - cpu)
assert {row.names[0]: (row.offsets, row.sizes) for row in planned.layout.rows if row.shape} == {
    row.names[0]: (row.offsets, row.sizes) for row in scale.layout(5000, WORLD).rows if row.shape
}
"""


def _plan() -> tuple[float, float]:
    """In a process of its own, whose process group is of 16,384 ranks that do not exist."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAN], capture_output=True, text=True, check=False, cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wall, cpu = done.stdout.split()
    return float(wall), float(cpu)
