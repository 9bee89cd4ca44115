"""Real runs in a notebook that nobody looks at, as in CI: each cell keeps its own output, and a hang ends in time."""

from __future__ import annotations

import pathlib
from typing import Any

import nbclient
import nbformat
import pytest
from nbclient.exceptions import CellTimeoutError

import sgpu

START = """
import pathlib, time, sgpu
from sgpu import distributed

@distributed(gpus=2, restarts=0)
def train(folder, hang):
    import pathlib, time
    from sgpu import runtime
    if hang and runtime.get_global_rank() == 1:
        pathlib.Path(folder, "hanging").touch()
        time.sleep(3600)
    while not hang and not pathlib.Path(folder, "printed").exists():
        time.sleep(0.01)
    for number in range(8):
        print(f"worker line {number}")

run = train.submit(FOLDER, False)
run
"""
PRINT = """
print("mine")
pathlib.Path(FOLDER, "printed").touch()
print(run.wait(100))
"""
HANG = """
stuck = train.submit(FOLDER, True)
while not pathlib.Path(FOLDER, "hanging").exists():
    assert stuck.state in ("STARTING", "RUNNING"), stuck.state
    time.sleep(0.01)
"""
WAIT = "print(stuck.result())"
LONGEST_SECONDS, HANG_SECONDS = 100, 8


@pytest.mark.timeout(300)  # a kernel, two runs, and the time that a hang is given
def test_a_hung_rank_fails_its_cell_in_time_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    cells = [f"FOLDER = {str(tmp_path)!r}", START, PRINT, HANG, WAIT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={},
        timeout_func=lambda cell: HANG_SECONDS if cell.source == WAIT else LONGEST_SECONDS,
    )  # fmt: skip
    with pytest.raises(CellTimeoutError, match=r"stuck\.result") as told:
        client.execute()
    assert f"timed out while it was being executed, after {HANG_SECONDS} seconds" in str(told.value)
    hung, done = sgpu.runs()
    assert (hung.wait(60), done.state) == ("CANCELLED", "SUCCEEDED"), "its kernel is gone, and it with it"
    check_outputs([cell.outputs for cell in notebook.cells], done.logs(0))


def check_outputs(outputs: list[Any], log: str) -> None:
    """Each cell has its own: the run's lines stand where it was started, whatever was printed meanwhile."""
    lines = [f"worker line {number}" for number in range(8)]
    assert log.splitlines() == lines
    *notices, shown = outputs[1]
    assert "worker line" not in str(notices)
    assert [line.strip() for line in shown.data["text/plain"].splitlines() if "worker line" in line] == lines
    assert "".join(output.text for output in outputs[2]) == "mine\nSUCCEEDED\n"
    assert "worker line" not in str([outputs[0], *outputs[3:]])
