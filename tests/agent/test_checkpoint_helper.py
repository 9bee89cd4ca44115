"""The process that finishes checkpoints is replaced when it ends, but not for ever."""

from __future__ import annotations

import pathlib
import shutil
import time

from sgpu.agent.checkpoint_helper import CheckpointHelper
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking


def test_one_that_ends_at_once_is_replaced_three_times(tmp_path: pathlib.Path) -> None:
    run, false = RunDir(tmp_path / "run"), shutil.which("false")
    assert false is not None
    run.create()
    spec = RunSpec(
        id=run.id, name="test", created=time.time(), backend="local", world_size=1, gpus_per_node=1, accelerator="cpu",
        seed=1, tracking=Tracking(uri="", experiment="test"), python=false, working_dir=str(tmp_path),
    )  # fmt: skip
    helper = CheckpointHelper(run, spec, node=0, address="127.0.0.1", log=run.agent_log, environment={})
    helper.open()
    helper._watcher.join(60)
    told = [event["message"] for event in read_all(run.events)]
    assert len(told) == 4, told
    assert all("ended with exit status 1" in message for message in told)
    assert [message.endswith("another is started") for message in told] == [True, True, True, False]
    assert "each worker starts one of its own" in told[-1]
    helper.close(5)
