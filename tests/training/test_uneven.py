"""Ranks with unequally many batches: an epoch ends for all when it ends for one, also at a checkpoint."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable

from sgpu import settings
from sgpu.contract.rundir import all_runs
from tests.training.looping import events

TRAIN = """
    import json, pathlib, sys, warnings
    import torch
    from torch.utils.data import IterableDataset
    import sgpu
    from sgpu import TrainLoop
    from sgpu.data import DataLoader

    warnings.simplefilter("ignore")  # the longer rank's
    notes = pathlib.Path(sys.argv[1])
    sgpu.runtime.init()
    rank = sgpu.runtime.rank()

    class Uneven(IterableDataset):
        def __iter__(self):
            yield from range((4, 7)[rank])

    def train(last):
        seen = []
        loop = TrainLoop(
            model=torch.nn.Linear(1, 1), loader=DataLoader(Uneven(), 2, num_workers=0), epochs=3, checkpoint_every=1,
            checkpoints=str(notes / "root"),
        )
        begun = loop.step
        for batch in loop:
            seen.append((loop.epoch, batch.tolist()))
            if loop.step + 1 == last:
                loop.stop()
        return begun, seen

    _, before = train(2)  # where the shorter rank has just ended its epoch, and the longer has not
    begun, after = train(None)
    (notes / f"rank{rank}").write_text(json.dumps([begun, before, after]))
"""


def test_a_checkpoint_where_the_shorter_rank_has_ended_is_gone_on_from(
    script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    done = script(TRAIN, str(tmp_path), launcher=torchrun)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        begun, before, after = json.loads((tmp_path / f"rank{rank}").read_text())
        assert begun == len(before) == 2
        assert before + after == [[epoch, batch] for epoch in range(3) for batch in ([0, 1], [2, 3])]
    told = [each["message"].split(";")[0] for run in all_runs(settings.home()) for each in events(run, "warning")]
    assert sorted(text for text in told if "data of" in text) == [
        "the data of rank 0 ended first in epoch 1",
        "the data of rank 0 ended first in epoch 2",
        "the data of some ranks had ended just where the checkpoint was made: the rest of that epoch, on the other "
        "ranks, is left out",
    ]
