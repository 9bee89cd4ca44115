"""MLflow keeps what rank 0's loader said last of where the time goes."""

from __future__ import annotations

import pathlib

from sgpu.contract import events
from sgpu.contract.rundir import RunDir
from sgpu.metrics import facts


def test_the_last_sentence_is_the_tag(tmp_path: pathlib.Path) -> None:
    run = RunDir(tmp_path)
    run.events.touch()
    assert facts.bottleneck(run) == {}
    for step, kind in ((20, "latency"), (90, "compute")):
        events.emit(run, "bottleneck", generation=0, rank=0, step=step, bottleneck=kind, message=f"It is {kind}.")
    events.emit(run, "epoch_ended", generation=0, rank=0, epoch=0)
    assert facts.bottleneck(run) == {"sgpu.bottleneck": "It is compute."}
