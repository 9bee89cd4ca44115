"""Which view a run gets, and that it ends in the form that stays; in a real kernel too."""

from __future__ import annotations

import base64
import io
import pathlib
import subprocess
import sys
import threading
import types
from typing import Any

import nbclient
import nbformat
import pytest

from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir
from sgpu.widgets import show
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.snapshot import Snapshot
from sgpu.widgets.showing.view import LiveView

GROWING_RUN = pathlib.Path(__file__).parent / "growing_run.py"


class Paper:
    """A screen that keeps what was drawn."""

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []
        self.finished: list[Snapshot] = []
        self.drawn = threading.Event()

    def show(self, snapshot: Snapshot) -> None:
        assert not self.finished
        self.shown.append(snapshot)
        self.drawn.set()

    def finish(self, snapshot: Snapshot) -> None:
        self.finished.append(snapshot)


def test_refresh_as_often_as_one_likes_draws_five_times_a_second(run: Any, clock: Any) -> None:
    paper = Paper()
    view = LiveView(Feed(run.dir, clock=clock), paper, clock=clock)
    for _ in range(1000):
        view.refresh()
        clock.now += 0.01
    assert 45 <= len(paper.shown) <= 51
    assert not view.wait_final(0)


def test_finish_reads_to_the_end_draws_once_and_ends_the_view(run: Any) -> None:
    line = '{"time": 1, "step": %d, "generation": 0, "values": {"loss": 1.0}}\n'
    run.dir.spool(0).write_text("".join(line % step for step in range(45_000)))
    paper = Paper()
    view = LiveView(Feed(run.dir), paper)
    view.finish()
    view.finish()
    view.refresh()
    view.close()
    assert view.wait_final(0)
    assert paper.shown == []
    assert [snapshot.series["loss"].steps[-1] for snapshot in paper.finished] == [44_999]


def test_in_the_background_it_follows_to_the_final_state(run: Any) -> None:
    paper = Paper()
    view = LiveView(Feed(run.dir), paper)
    view.start()
    view.start()
    assert paper.drawn.wait(10)
    run.status("CANCELLED", step=3, ended=run.created + 1)
    assert view.wait_final(10)
    assert [snapshot.state for snapshot in paper.finished] == ["CANCELLED"]


def test_close_ends_the_background_of_a_run_that_goes_on(run: Any) -> None:
    paper = Paper()
    view = LiveView(Feed(run.dir), paper)
    view.start()
    view.close()
    assert view.wait_final(0)
    assert len(paper.finished) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "sgpu-view"]


def test_a_view_that_breaks_is_told_once_and_the_run_goes_on(run: Any, clock: Any, capsys: Any) -> None:
    class Broken(Paper):
        def show(self, snapshot: Snapshot) -> None:
            super().show(snapshot)
            raise ZeroDivisionError("in a browser far away")

        finish = show

    paper = Broken()
    view = LiveView(Feed(run.dir, clock=clock), paper, clock=clock)
    for _ in range(5):
        view.refresh()
        clock.now += 1
    assert len(paper.shown) == 5
    view.finish()
    assert view.wait_final(0)
    told = capsys.readouterr().err
    assert told.count("the run goes on. ZeroDivisionError: in a browser far away") == 1


def test_outside_a_notebook_it_prints(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run.status("SUCCEEDED", step=3, ended=run.created + 1)
    view = show(run.dir, lambda: None)
    view.finish()
    assert capsys.readouterr().out.splitlines()[-1].startswith("train: finished on 2 CPU workers")


def test_a_folder_without_a_run_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SgpuError, match="no run at"):
        show(RunDir(tmp_path), lambda: None)


def test_a_whole_life_as_text(growing: types.ModuleType, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    run = RunDir(tmp_path / "run")
    growing.make(run)
    view = show(run, lambda: None)
    view.start()
    growing.grow(run, 2.0, fail=True)
    assert view.wait_final(20)
    told = stream.getvalue()
    assert "rank 1 lost (SIGSEGV, signal 11)" in told
    assert "root cause: rank 1 raised RuntimeError" in told
    assert "\r" not in told


HEAD = """
import pathlib, subprocess, sys
from sgpu.contract.rundir import RunDir
from sgpu.widgets import show
run = RunDir(pathlib.Path({root!r}))
writer = subprocess.Popen([sys.executable, {script!r}, {root!r}, "1.5", *{options!r}])
while not run.spec.exists() and writer.poll() is None:
    pass
"""
BLOCK = """
import time
view = show(run, lambda: None)
while writer.poll() is None:
    view.refresh()
    time.sleep(0.1)
view.finish()
"""
FOLLOW = "view = show(run, lambda: None)\nview.start()"
WAIT = "print('another cell')\nprint(view.wait_final(30), writer.wait())"
WITHOUT_WIDGETS = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "anywidget" else found(name, package)
"""


def head(root: pathlib.Path, *options: str) -> str:
    return HEAD.format(root=str(root), script=str(GROWING_RUN), options=list(options))


def execute(cells: list[str]) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources={}).execute()
    return notebook


def check_static(output: Any, headline: str) -> None:
    assert output.output_type == "display_data"
    assert set(output.data) == {"image/png", "text/html", "text/plain"}
    assert output.data["text/plain"].startswith(headline)
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
    assert "<img alt=" in output.data["text/html"]


def test_a_blocking_cell_leaves_the_static_form(tmp_path: pathlib.Path) -> None:
    notebook = execute([head(tmp_path / "run", "--fail"), BLOCK])
    (output,) = notebook.cells[1].outputs
    check_static(output, "train: failed on 2 GPUs")
    assert "root cause: rank 1 raised RuntimeError" in output.data["text/html"]


@pytest.mark.parametrize("widgets", [True, False])
def test_of_two_runs_in_the_background_each_cell_keeps_its_own_output(tmp_path: pathlib.Path, widgets: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    before = "" if widgets else WITHOUT_WIDGETS
    follow_both = [head(first), FOLLOW.replace("view", "view1"), head(second, "--fail"), FOLLOW]
    notebook = execute([before, *follow_both, "print(view1.wait_final(60))\n" + WAIT])
    for at, root, headline in ((2, first, "train: finished on 2 GPUs"), (4, second, "train: failed on 2 GPUs")):
        (output,) = notebook.cells[at].outputs
        check_static(output, headline)
        assert f"folder: {root}" in output.data["text/plain"]
    assert [cell.outputs for cell in notebook.cells[:2] + notebook.cells[3:4]] == [[], [], []]
    after = notebook.cells[5].outputs
    assert {one.output_type for one in after} == {"stream"}
    assert "".join(one.text for one in after) == "True\nanother cell\nTrue 0\n"


def test_the_script_runs_by_itself(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(GROWING_RUN), str(tmp_path / "run"), "1"]
    subprocess.run(command, check=True)
    assert Feed(RunDir(tmp_path / "run")).snapshot().state == "SUCCEEDED"
