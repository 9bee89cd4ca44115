"""The status is told as often as it can be; a disk that fails for a moment does not end a run."""

from __future__ import annotations

import pathlib

import pytest

from sgpu.agent.supervising.report import Report
from sgpu.contract.heartbeat import Page
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import read_status
from sgpu.testing.clock import FakeClock
from sgpu.testing.host import ScriptedHost


def test_a_status_that_cannot_be_written_now_is_written_later(tmp_path: pathlib.Path) -> None:
    run, clock = RunDir(tmp_path / "run"), FakeClock()
    run.create()
    page = Page.create(run.heartbeat, 1)
    report = Report(run, page, ScriptedHost(run, page, clock), clock)
    run.status.mkdir()  # nothing can take this name
    clock.advance(1)
    report.write()
    with pytest.raises(OSError):
        report.write(force=True)
    run.status.rmdir()
    page.slot(0).start(0)
    page.slot(0).beat(3, 0, -1)
    clock.advance(1)
    report.write()
    status = read_status(run)
    assert status is not None
    assert status.step == 3
    page.close()
