"""VolumeWriter and VolumeReader alone: each way of saving, on each kind of place, with stock readers and writers."""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from sgpu.checkpoint import Catalog, VolumeReader, VolumeWriter
from sgpu.contract.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:unclosed"),  # torch's own: the socket of its process for asynchronous saves
]
PLACES = ("file", "memory", "s3")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One rank, as `dcp.async_save` needs it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest, tmp_path: pathlib.Path, s3_server: Any) -> str:
    if request.param == "s3":
        found: str = request.getfixturevalue("s3")
        return found
    return str(tmp_path) if request.param == "file" else f"memory://{uuid.uuid4()}"


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"w": torch.randn(50, 3), "b": torch.randn(7).bfloat16(), "step": seed, "deep": {"list": [1, "two"]}}


def check(saved: dict[str, Any], url: str, reader: Any) -> None:
    live = {"w": torch.zeros(50, 3), "b": torch.zeros(7, dtype=torch.bfloat16), "step": 0, "deep": {"list": [0, ""]}}
    dcp.load(live, storage_reader=reader(url))
    assert all(torch.equal(live[name], saved[name]) for name in ("w", "b"))
    assert (live["step"], live["deep"]) == (saved["step"], saved["deep"])


def save(saved: dict[str, Any], url: str) -> None:
    dcp.save(saved, storage_writer=VolumeWriter(url))


def save_by_thread(saved: dict[str, Any], url: str) -> None:
    """What is changed after the call is not saved."""
    copy = {**saved, "w": saved["w"].clone()}
    future = dcp.async_save(copy, storage_writer=VolumeWriter(url))
    copy["w"].zero_()
    future.result()


def save_by_process(saved: dict[str, Any], url: str) -> None:
    writer = VolumeWriter(url)
    dcp.async_save(saved, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()


@pytest.mark.parametrize("way", [save, save_by_thread])
def test_saved_and_loaded(way: Callable[[dict[str, Any], str], None], root: str, group: None) -> None:
    for step in (1, 2):
        way(state(step), f"{root}/step-{step}")
    assert Catalog(root).steps() == [1, 2]
    assert all(Catalog(root).verify(step, deep=True).ok for step in (1, 2))
    for step in (1, 2):
        check(state(step), f"{root}/step-{step}", VolumeReader)


def test_stock_readers_load_ours_and_ours_load_theirs(root: str, group: None) -> None:
    saved = state(3)
    theirs = FileSystemReader if "://" not in root else FsspecReader
    save(saved, f"{root}/ours")
    check(saved, f"{root}/ours", theirs)
    writer = FileSystemWriter if "://" not in root else FsspecWriter
    dcp.save(saved, storage_writer=writer(f"{root}/theirs"))
    check(saved, f"{root}/theirs", VolumeReader)


SPAWNED = """
import os, sys, uuid
if __name__ == "__main__":
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from sgpu.checkpoint import Catalog, VolumeReader, VolumeWriter
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo")
    for root in (os.environ["FILES"], os.environ["OBJECTS"]):
        saved = {"w": torch.arange(1000.), "n": 5}
        process = AsyncCheckpointerType.PROCESS
        dcp.async_save(saved, storage_writer=VolumeWriter(root + "/step-1"), async_checkpointer_type=process).result()
        live = {"w": torch.zeros(1000), "n": 0}
        dcp.load(live, storage_reader=VolumeReader(root + "/step-1"))
        assert torch.equal(live["w"], saved["w"]) and live["n"] == 5
        assert Catalog(root).verify(1, deep=True).ok
    try:
        writer = VolumeWriter("memory://" + uuid.uuid4().hex)
        dcp.async_save(saved, storage_writer=writer, async_checkpointer_type=process).result()
    except BaseException as error:
        assert "memory of this process" in str(error), error
        print("refused")
    dist.destroy_process_group()
"""


def test_saved_by_a_process_of_torch_s(
    run_ok: Callable[..., list[str]], tmp_path: pathlib.Path, s3_server: Any, s3: str, free_port: int
) -> None:
    """What only this process could read again is refused."""
    (out,) = run_ok(SPAWNED, FILES=str(tmp_path / "files"), OBJECTS=s3, PORT=str(free_port))
    assert out == "refused\n"


def test_a_writer_is_not_sent_away_from_memory_that_only_this_process_has() -> None:
    import pickle

    with pytest.raises(CheckpointError, match="memory of this process"):
        pickle.dumps(VolumeWriter("memory://x"))


SHARED = """
import torch.distributed.checkpoint as dcp
from sgpu.checkpoint.restoring import sources
read = 0
real = sources.Sources.read_into

def counted(self, file, offset, target, name):
    global read
    read += target.nbytes if file.endswith(".distcp") else 0
    return real(self, file, offset, target, name)

sources.Sources.read_into = counted
state = {"w": torch.arange(1_500_000.), "v": torch.arange(500_000.), "n": 7, f"own.{rank}": torch.full((9,), rank * 1.)}
dcp.save(state, storage_writer=VolumeWriter(ROOT + "/step-1"))
told = []
for share in (False, True):
    read = 0
    live = {"w": torch.zeros(1_500_000), "v": torch.zeros(500_000), "n": 0, f"own.{rank}": torch.zeros(9)}
    dcp.load(live, storage_reader=VolumeReader(ROOT + "/step-1", share=share))
    assert all(torch.equal(live[name], state[name]) for name in ("w", "v", f"own.{rank}")) and live["n"] == 7
    told.append(read)
print(*told)
dist.barrier()
if rank == 0:
    (file,) = [path for path in pathlib.Path(ROOT, "step-1").glob("*.distcp") if path.stat().st_size > 5_000_000]
    content = bytearray(file.read_bytes())
    content[3_000_000] ^= 1
    file.write_bytes(content)
dist.barrier()
live = {"w": torch.zeros(1_500_000), "v": torch.zeros(500_000), "n": 0, f"own.{rank}": torch.zeros(9)}
try:
    dcp.load(live, storage_reader=VolumeReader(ROOT + "/step-1", share=True))
except BaseException as error:
    assert "w in __" in str(error) and not live["w"].any() and not live["v"].any(), error
    print("refused")
dist.destroy_process_group()
"""


def test_what_all_ranks_need_is_read_once_where_they_share(run_ok: Callable[..., list[str]]) -> None:
    alone, shared = 0, 0
    for out in run_ok(SHARED, 2):
        first, refused = out.splitlines()
        mine_alone, mine_shared = map(int, first.split())
        alone, shared = alone + mine_alone, shared + mine_shared
        assert refused == "refused"
    size = 2_000_000 * 4
    assert shared < 1.1 * size  # once, by all ranks together
    assert alone > 3.9 * size  # by each rank, to check and to load
