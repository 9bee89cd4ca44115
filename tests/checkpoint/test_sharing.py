"""What all ranks need is read once, whatever machine they are on: real processes, machines told apart by a patch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sgpu.checkpoint import Catalog

SCRIPT = """
import torch.distributed as dist
from torch import nn
from sgpu.checkpoint.restoring import sharing, sources
from sgpu.contract.errors import CheckpointError

PER_MACHINE = int(os.environ["PER_MACHINE"])
pids = [None] * world
dist.all_gather_object(pids, os.getpid())
machine = {pid: at // PER_MACHINE for at, pid in enumerate(pids)}
real_look, looked = sharing.look_into, []

def look_into(offer):
    looked.append(offer.pid)
    return real_look(offer) if machine[offer.pid] == machine[os.getpid()] else None

sharing.look_into = look_into
read = 0
real_read = sources.Sources.read_into

def counted(self, file, offset, target, name):
    global read
    if file.endswith(".distcp"):
        read += target.nbytes
    return real_read(self, file, offset, target, name)

sources.Sources.read_into = counted
sent = 0
real_broadcast = sharing._broadcast

def broadcast(memory, source, group):
    global sent
    sent += memory.nbytes
    real_broadcast(memory, source, group)
    if os.environ.get("DAMAGE") == "network" and source != rank:
        memory[len(memory) // 2] ^= 1

sharing._broadcast = broadcast

def make(value):
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])
    with torch.no_grad():
        for at, p in enumerate(net.parameters()):
            p.copy_((torch.arange(p.numel()) % 997).reshape(p.shape) * 1e-5 * (at + 1) + value * 1e-3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer

def values(net, optimizer):
    moments = [t.clone() for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return [t.clone() for t in net.state_dict().values()] + moments

def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
"""

ROUND = (
    SCRIPT
    + """
net, optimizer = make(1.0)
first = values(net, optimizer)
with Checkpointer(CheckpointPolicy(ROOT), {"model": net, "optimizer": optimizer}) as c:
    c.save(1)
net, optimizer = make(7.0)
if os.environ.get("FRESH"):
    optimizer = torch.optim.Adam(net.parameters())  # its state is made by the restore
with Checkpointer(CheckpointPolicy(ROOT), {"model": net, "optimizer": optimizer}) as c:
    assert c.restore().source == "volume"
    assert same(values(net, optimizer), first)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    c.save(2)
    second = values(net, optimizer)
    c.wait()
    net.load_state_dict(make(3.0)[0].state_dict())
    c.restore()
    assert same(values(net, optimizer), second)
size = sum(t.numel() * t.element_size() for t in second)
told = [None] * world
dist.all_gather_object(told, (read, sent))
if rank == 0:
    print(sum(r for r, _ in told) / size / 2, max(s for _, s in told) / size / 2, len(looked))
"""
)


@pytest.mark.parametrize(("world", "per_machine", "fresh"), [(2, 2, ""), (2, 1, "1"), (3, 2, "1"), (4, 2, "")])
def test_the_volume_is_read_once(
    run_ok: Callable[..., list[str]], tmp_path: pathlib.Path, world: int, per_machine: int, fresh: str
) -> None:
    out = run_ok(ROUND, world, PER_MACHINE=str(per_machine), FRESH=fresh)
    read, sent, looked = map(float, out[0].split())
    assert looked > 0
    assert 1.0 <= read < 1.1  # of the state, by all ranks together, in each restore (and what is not a tensor)
    assert sent == 0.0 if per_machine >= world else 0.99 < sent < 1.1
    assert Catalog(tmp_path / "root").verify(2, deep=True).ok


DAMAGED = (
    SCRIPT
    + """
net, optimizer = make(1.0)
with Checkpointer(CheckpointPolicy(ROOT), {"model": net, "optimizer": optimizer}) as c:
    c.save(1)
    c.wait()
    first = values(net, optimizer)
    net.load_state_dict(make(2.0)[0].state_dict())
    c.save(2)
if rank == 0 and os.environ["DAMAGE"] == "volume":
    shard = pathlib.Path(ROOT) / "step-00000002" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
dist.barrier()
net, optimizer = make(7.0)
before = values(net, optimizer)
with Checkpointer(CheckpointPolicy(ROOT), {"model": net, "optimizer": optimizer}) as c:
    try:
        restored = c.restore()
        assert restored.step == 1 and "__1_0.distcp" in restored.skipped[0].reason, restored
        assert same(values(net, optimizer), first)
        print("fell back")
    except CheckpointError as error:
        assert same(values(net, optimizer), before)
        print(error)
"""
)


def test_damage_is_found_before_anything_live_is_touched(run_ok: Callable[..., list[str]]) -> None:
    assert [out.strip() for out in run_ok(DAMAGED, 2, PER_MACHINE="2", DAMAGE="volume")] == ["fell back"] * 2


def test_damage_on_the_way_to_another_machine_is_found(run_ok: Callable[..., list[str]]) -> None:
    for out in run_ok(DAMAGED, 2, PER_MACHINE="1", DAMAGE="network"):
        assert "was damaged on its way from rank" in out
