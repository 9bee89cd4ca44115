"""Three ranks in DDP: a run that is stopped and gone on from has the weights, to the bit, of one that is not."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from sgpu.training.buckets import settle

rank, world, meet, settled, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], eval(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=world)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rest = nn.ModuleList([nn.Linear(300, 300) for _ in range(6)])
        self.first = nn.Linear(300, 300)  # declared last, used first: gradients come in another order

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = torch.relu(layer(x))
        return x

def weights(*stretches):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for begin, end in stretches:
        optimizer.zero_grad()
        model = DDP(net, **options)  # as each process makes it anew
        if settled == "settled":
            settle(None, model, optimizer)
            assert all(p.grad is None for p in net.parameters())
        for step in range(begin, end):
            draws = torch.Generator().manual_seed(1000 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 300, generator=draws)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]

whole, parted = weights((0, 10)), weights((0, 5), (5, 10))
if rank == 0:
    print("same" if all(map(torch.equal, whole, parted)) else "different", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads now and then abort a process that ends while a peer does
"""


def _said(tmp_path: pathlib.Path, settled: str, options: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "3", str(tmp_path / "meet"), settled, options],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    outs = [process.communicate(timeout=90)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0]
    return outs[0].strip()


@pytest.mark.parametrize("options", ["{}", "{'gradient_as_bucket_view': True}", "{'find_unused_parameters': True}"])
def test_a_resumed_run_adds_up_as_an_undisturbed_one(tmp_path: pathlib.Path, options: str) -> None:
    assert _said(tmp_path, "settled", options) == "same"


def test_that_is_not_so_by_itself(tmp_path: pathlib.Path) -> None:
    assert _said(tmp_path, "as it comes", "{}") == "different"
