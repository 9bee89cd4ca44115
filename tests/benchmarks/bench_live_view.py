"""Live view: a run of a million metric points, a thousand updates a second, a hundred past runs.

`opens`: from nothing to all charts, of a run whose 100,000 steps of ten metrics are in its spool, and of one whose
spool was cut to its last tenth: the rest comes from a real MLflow server. `load`: eight ranks log a thousand values a
second for a minute, and a real kernel shows it to a browser that answers; messages and their bytes are counted where
they leave the kernel, CPU is the kernel's own. `runs`: what a list of runs needs. Goals: 2 s; 10 messages a second, 5 %
of a core, a saved notebook below 1 MB; 0.5 s.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

import nbclient
import nbformat

from sgpu.contract import atomic
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status
from sgpu.run import Run
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.snapshot import Snapshot
from tests.benchmarks.table import show

METRICS = 10
RANKS = 8
UPDATES_A_SECOND = 1000


def make_run(root: pathlib.Path, world_size: int, state: str = "RUNNING") -> RunDir:
    run, now = RunDir(root), time.time()
    run.create()
    RunSpec(
        id=root.name, name="train", created=now - 100, backend="local", world_size=world_size,
        gpus_per_node=world_size, accelerator="cpu", seed=1, tracking=Tracking(uri="sqlite://", experiment="sgpu"),
        python=sys.executable, working_dir=".",
    ).write(run)  # fmt: skip
    this_process().write(run.agent)
    Status(state=state, updated=now, started=now - 100, step=1, ended=now if state == "SUCCEEDED" else None).write(run)  # type: ignore[arg-type]
    return run


# ---- a million points


def _serve(folder: pathlib.Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return server, url
        except OSError:
            time.sleep(0.2)
    os.killpg(server.pid, signal.SIGKILL)
    raise RuntimeError((folder / "server.log").read_text()[-2000:])


def _fill(database: pathlib.Path, run_id: str, steps: int) -> None:
    """Straight into the server's tables: through its interface it takes minutes."""
    now = int(time.time() * 1000)
    with sqlite3.connect(database) as connection:
        for metric in range(METRICS):
            name = f"metric{metric}"
            rows = ((name, 1.0 / (step + 1), now + step, run_id, step, 0) for step in range(steps))
            connection.executemany(
                "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            connection.execute(
                "INSERT INTO latest_metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)",
                (name, 1.0 / steps, now + steps, run_id, steps - 1, 0),
            )
    connection.close()


def _open(run: RunDir, steps: int) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    feed = Feed(run)
    snapshot = feed.snapshot()
    first, ends = time.perf_counter() - began, 0.0
    while snapshot.behind:
        if not ends and _complete(snapshot, steps):
            ends = time.perf_counter() - began
        snapshot = feed.snapshot()
    whole = time.perf_counter() - began
    feed.close()
    if not _complete(snapshot, steps):
        raise RuntimeError(f"charts are not complete: {[(s.name, s.steps[0]) for s in snapshot.series.values()]}")
    seconds = {"first charts": first, "from end to end": ends or whole, "every point read": whole}
    return {**seconds, "cpu": time.process_time() - cpu}


def _complete(snapshot: Snapshot, steps: int) -> bool:
    """Whether all metrics are charted from the first step to the last."""
    ends = {(series.steps[0], series.steps[-1]) for series in snapshot.series.values()}
    return ends == {(0, steps - 1)} and len(snapshot.series) == METRICS


def opens(folder: pathlib.Path, quick: bool) -> list[dict[str, Any]]:
    from mlflow.tracking import MlflowClient  # a second of importing that is not to be measured

    steps = 10_000 if quick else 100_000
    server, url = _serve(folder)
    try:
        run_id = MlflowClient(url).create_run("0").info.run_id
        _fill(folder / "mlflow.db", run_id, steps)
        run = make_run(folder / "run", 1)
        atomic.write_json(run.mlflow, {"run_id": run_id, "tracking_uri": url, "url": url, "open_command": ""})
        rows = []
        for what, first in (("all in the spool", 0), ("nine tenths in MLflow alone", steps * 9 // 10)):
            with run.spool(0).open("w") as spool:
                for step in range(first, steps):
                    values = {f"metric{metric}": 1.0 / (step + 1) for metric in range(METRICS)}
                    spool.write(json.dumps({"time": step, "step": step, "generation": 0, "values": values}) + "\n")
            found = [_open(run, steps) for _ in range(1 if quick else 3)]
            best = min(found, key=lambda one: one["every point read"])
            rows.append({"what": f"{steps * METRICS:,} points, {what}, s", **best})
        return rows
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# ---- a thousand updates a second

_WRITER = """
import pathlib, sys, time
from sgpu.contract.rundir import RunDir
from sgpu.metrics.recorder import Recorder
run, seconds, ranks, rate = RunDir(pathlib.Path(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
recorders = [Recorder(run, rank=rank, generation=0) for rank in range(ranks)]
steps, began = int(seconds * rate / ranks), time.monotonic()
for step in range(steps):
    for rank, recorder in enumerate(recorders):
        recorder.log(step, {"loss": 1.0 / (step + rank + 1)})
    time.sleep(max(0.0, began + (step + 1) * ranks / rate - time.monotonic()))
for recorder in recorders:
    recorder.close()
print(steps)
"""
_CELL = """
import pathlib, subprocess, sys, time
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status
from sgpu.widgets import show
from sgpu.widgets.channel import ChannelWidget
run = RunDir(pathlib.Path({root!r}))
view = show(run, lambda: None)
view.start()
for widget in list(ChannelWidget._views.values()):
    widget.take({{"kind": "hello"}})
writer = subprocess.Popen([sys.executable, "-c", {writer!r}, {root!r}, "{seconds}", "{ranks}", "{rate}"])
wall, cpu = time.monotonic(), time.process_time()
writer.wait()
wall, cpu = time.monotonic() - wall, time.process_time() - cpu
Status(state="SUCCEEDED", updated=time.time(), started=time.time() - wall, ended=time.time()).write(run)
view.wait_final(60)
print("CPU", cpu / wall)
"""


class _Counting(nbclient.NotebookClient):
    """Counts what the kernel sends to its browser."""

    messages = 0
    sent_bytes = 0

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["header"]["msg_type"].startswith(("comm_", "display_", "update_display")):
            self.messages += 1
            self.sent_bytes += len(json.dumps(msg["content"]))
        return super().process_message(msg, cell, cell_index)


def load(folder: pathlib.Path, quick: bool) -> list[dict[str, Any]]:
    seconds = 8 if quick else 60
    run = make_run(folder / "load", RANKS)
    cell = _CELL.format(root=str(run.root), writer=_WRITER, seconds=seconds, ranks=RANKS, rate=UPDATES_A_SECOND)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client = _Counting(notebook, timeout=seconds + 120, kernel_name="python3", resources={})
    client.execute()
    told = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    steps = seconds * UPDATES_A_SECOND // RANKS
    feed = Feed(run)
    snapshot = feed.snapshot()
    while snapshot.behind:
        snapshot = feed.snapshot()
    lost = sum(steps - series.logged for series in snapshot.series.values())
    if len(snapshot.series) != RANKS or any(series.steps[-1] != steps - 1 for series in snapshot.series.values()):
        raise RuntimeError(f"the last state is not there: {sorted(snapshot.series)}")
    saved = nbformat.writes(notebook)
    if f"<td>{steps:,}</td>" not in saved:
        raise RuntimeError("the saved notebook does not hold the last state")
    return [
        {"what": f"{UPDATES_A_SECOND} updates a second from {RANKS} ranks for {seconds} s",
         "messages a second": client.messages / seconds, "bytes a second": client.sent_bytes / seconds,
         "kernel CPU, of a core": float(told.split("CPU")[1]), "notebook, bytes": len(saved.encode()), "lost": lost}
    ]  # fmt: skip


# ---- a hundred runs


def runs(folder: pathlib.Path, quick: bool) -> list[dict[str, Any]]:
    made = [make_run(folder / f"20261130-{number:06}-train-abcdef", 8, "SUCCEEDED") for number in range(100)]
    began = time.perf_counter()
    told = [repr(Run(run)) for run in made]
    seconds = time.perf_counter() - began
    assert all("SUCCEEDED" in one for one in told)
    return [{"what": "a hundred past runs listed, s", "all": seconds}]


def run(quick: bool) -> list[dict[str, Any]]:
    """One row a thing that is waited for."""
    rows = []
    for part in (runs, opens, load):
        with tempfile.TemporaryDirectory() as folder:
            rows += part(pathlib.Path(folder), quick)
    return rows


if __name__ == "__main__":
    show(run(quick=False))
