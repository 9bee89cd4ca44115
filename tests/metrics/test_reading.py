"""The reading side: spools that grow and are cut, events, the ledger, the machine, URIs, the notebook's side."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.contract.heartbeat import Category, Page
from sgpu.contract.process import ProcessId, this_process
from sgpu.contract.rundir import RunDir
from sgpu.metrics import derive, facts, gpus, keepsakes, ledger, machine, mlflow_reader, names, store
from sgpu.metrics.progress import Point, Position, Progress
from sgpu.metrics.recorder import Recorder
from sgpu.metrics.spool import read_chunk, read_spool, series
from sgpu.metrics.supervisor import Parent, agent_alive

from .conftest import MakeRun, wait_for

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


# ---- spools and events


def record(run: RunDir, steps: range, rank: int = 0) -> None:
    recorder = Recorder(run, rank=rank, generation=0)
    for step in steps:
        recorder.log(step, {"a": float(step), "b": -float(step)})
    recorder.close()


def test_a_spool_is_read_on_from_where_it_was_left_while_it_grows(run: RunDir) -> None:
    record(run, range(10))
    first = read_spool(run.spool(0), 0, Position(), limit_points=7)
    assert [p.step for p in first.points] == [0, 0, 1, 1, 2, 2, 3, 3], "whole lines, the limit or a line more"
    assert first.more
    with run.spool(0).open("a") as spool:
        spool.write('{"time": 1, "step": 10, "gener')
    second = read_spool(run.spool(0), 0, first.position, limit_points=1000)
    assert [p.step for p in second.points if p.key == "a"] == list(range(4, 10)), "a torn line waits"
    with run.spool(0).open("a") as spool:
        spool.write('ation": 0, "values": {"a": 10.0}}\n')
    third = read_spool(run.spool(0), 0, second.position, limit_points=1000)
    assert [(p.key, p.step) for p in third.points] == [("a", 10)]


def test_a_spool_that_was_cut_is_read_from_its_start(run: RunDir) -> None:
    record(run, range(10))
    first = read_spool(run.spool(0), 0, Position(), limit_points=1000)
    rest = run.spool(0).read_bytes().splitlines(keepends=True)[8:]
    atomic.write_bytes(run.spool(0), b"".join(rest))
    record(run, range(10, 12))
    second = read_spool(run.spool(0), 0, first.position, limit_points=1000)
    progress = Progress(marks={"a": 9, "b": 9})
    assert [p.step for p in second.points if p.key == "a"] == [8, 9, 10, 11]
    assert [p.step for p in progress.fresh(second.points) if p.key == "a"] == [10, 11]


@pytest.mark.parametrize(
    "line",
    [
        "[]", "nonsense", "{}", '{"step": "1", "time": 1, "values": {"a": 1}}', '{"step": 1, "time": 1, "values": 3}',
        '{"step": 1, "time": null, "values": {"a": 1}}', '{"step": 1, "time": 1, "values": {"a": "x"}}',
    ],
)  # fmt: skip
def test_lines_that_are_none_are_passed_over(run: RunDir, line: str) -> None:
    run.spool(0).write_text(line + "\n")
    record(run, range(1))
    assert [p.key for p in read_spool(run.spool(0), 0, Position(), 100).points] == ["a", "b"]


def test_ranks_share_a_chunk(run: RunDir) -> None:
    for rank in range(3):
        record(run, range(1000), rank)
    chunk = read_chunk(run, 3, Progress(), limit_points=100)
    assert {p.key for p in chunk.points} == {"a", "b", "rank1/a", "rank1/b", "rank2/a", "rank2/b"}
    assert len(chunk.points) <= 110
    assert chunk.more
    found = series(run)
    assert found["rank2/b"] == [(step, -float(step)) for step in range(1000)]


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=40), st.integers(1, 7))
def test_each_key_and_step_is_fresh_once_however_the_points_are_cut(points: list[tuple[str, int]], cut: int) -> None:
    progress, seen = Progress(), []
    for at in range(0, len(points), cut):
        some = [Point(key=k, value=0.0, step=s, time_seconds=0.0) for k, s in points[at : at + cut]]
        fresh = progress.fresh(some)
        progress.raise_marks({p.key: p.step for p in fresh})
        seen += [(p.key, p.step) for p in fresh]
    whole = [
        (p.key, p.step) for p in Progress().fresh([Point(key=k, value=0, step=s, time_seconds=0) for k, s in points])
    ]
    assert seen == whole
    assert len(set(seen)) == len(seen)
    for key in "ab":
        mine = [step for k, step in seen if k == key]
        assert mine == sorted(mine)


def test_events_without_figures_give_no_points() -> None:
    event = {"time": 5.0, "kind": "checkpoint_committed", "generation": 1, "rank": 2, "step": 7, "save_seconds": 1}
    assert derive.points_of(event) == [Point(key="rank2/checkpoint_save_seconds", value=1.0, step=7, time_seconds=5.0)]
    for broken in ({}, {**event, "step": None}, {**event, "time": "x"}, {**event, "kind": "warning"}):
        assert derive.points_of(broken) == []


# ---- the ledger


def test_goodput_is_the_productive_share_of_all_ranks(run: RunDir) -> None:
    page = Page.create(run.heartbeat, 2)
    for rank in range(2):
        page.slot(rank).start(0)
    assert ledger.from_page(run.heartbeat).goodput == 0
    page.slot(0).account(Category.PRODUCTIVE)
    hour = time.monotonic_ns() + 3600 * 10**9
    report = ledger.from_page(run.heartbeat, hour)
    assert report.ranks == 2
    assert report.goodput == pytest.approx(0.5, abs=1e-3), "one rank trains, one starts"
    assert report.wall_seconds == pytest.approx(3600, abs=60)
    assert sum(report.seconds.values()) == pytest.approx(2 * 3600, abs=60)
    assert set(report.seconds) == {c.name.lower() for c in Category}
    page.close()
    with pytest.raises(FileNotFoundError):
        ledger.from_page(run.root / "none")


def test_goodput_by_step_gives_each_step_its_last_value(run: RunDir) -> None:
    page = Page.create(run.heartbeat, 2)
    slots = [page.slot(rank) for rank in range(2)]
    goodput, given = ledger.GoodputSeries(every_seconds=10), []
    start = time.monotonic_ns()
    for second in range(100):
        for slot in slots:
            slot.beat(second // 5)
        given += goodput.look(page.beats(), now_ns=start + second * 10**9, time_seconds=second)
    given += goodput.last(page.beats(), until_ns=start + 100 * 10**9, time_seconds=100)
    assert len(given) % 9 == 0, "goodput and eight parts"
    assert {p.key for p in given} == {"goodput", *(names.for_ledger(c.name.lower()) for c in Category)}
    steps = [p.step for p in given if p.key == "goodput"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 19
    assert 9 <= len(steps) <= 11
    assert goodput.look([], now_ns=0, time_seconds=0) == []
    page.close()


# ---- the machine


class ScriptedNvml:
    """The part of nvidia-ml-py that is used; GPU 1 does not tell its power."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        self._driver = driver

    def nvmlInit(self) -> None:
        if not self._driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 3:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-b": 2}[name]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=handle * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=10 * handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError
        return 350_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60 + handle


def told_of(handle: int) -> dict[str, float]:
    told = {"gpu_percent": 10.0 * handle, "gpu_celsius": 60.0 + handle}
    return told | {"gpu_memory_bytes": handle * 2.0**30, "gpu_memory_total_bytes": 80 * 2.0**30}


@pytest.mark.parametrize(
    ("visible", "local_rank", "told"),
    [
        (None, 0, told_of(0) | {"gpu_watts": 350.0}),
        (None, 1, told_of(1)),
        ("3,GPU-b", 0, told_of(3) | {"gpu_watts": 350.0}),
        ("3,GPU-b", 1, told_of(2) | {"gpu_watts": 350.0}),
        ("3,GPU-b", 2, {}),
        (None, 9, {}),
    ],
)
def test_figures_of_the_gpu_that_a_rank_sees(visible: str | None, local_rank: int, told: dict[str, float]) -> None:
    assert gpus.NvmlGpus(ScriptedNvml(), visible).read(local_rank) == told
    assert set(told) <= {*names.SYSTEM, "gpu_memory_total_bytes"}


def test_where_the_driver_does_not_answer_there_are_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): ...\ndef nvmlInit(): raise NVMLError('no driver')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert isinstance(gpus.find_gpus(None), gpus.NoGpus)
    monkeypatch.delitem(sys.modules, "pynvml")


def test_a_sample_of_each_rank_that_runs(run: RunDir) -> None:
    page = Page.create(run.heartbeat, 4)
    busy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for rank, pid in enumerate((os.getpid(), busy.pid, os.getpid())):
            page.slot(rank).start(0, pid=pid)
        page.slot(2).finish()
        sampler = machine.Sampler(
            page.beats, ranks=range(0, 4), created_seconds=100, period_seconds=60, open_gpus=gpus.NoGpus
        )
        first = {p.key for p in sampler.sample(gpus.NoGpus(), 105.5).points()}
        assert first == {"system/rank0/rss_bytes", "system/rank1/rss_bytes"}, "a CPU share needs two looks"
        second = sampler.sample(gpus.NoGpus(), 110.5).points()
        assert {p.key for p in second} == first | {"system/rank0/cpu_percent", "system/rank1/cpu_percent"}
        assert {p.step for p in second} == {10}
    finally:
        busy.kill()
        busy.wait()
    assert set(sampler.sample(gpus.NoGpus(), 116).ranks) == {0}, "the dead one is left out"
    page.close()


def test_a_driver_that_hangs_blocks_nobody(run: RunDir) -> None:
    page = Page.create(run.heartbeat, 1)
    page.slot(0).start(0)
    entered: list[int] = []

    class Wedged:
        def read(self, local_rank: int) -> dict[str, float]:
            entered.append(local_rank)
            wait_for(lambda: released, "released", 30)
            return {}

    released: list[int] = []
    sampler = machine.Sampler(page.beats, ranks=range(1), created_seconds=0, period_seconds=0.01, open_gpus=Wedged)
    sampler.start()
    wait_for(lambda: entered, "the driver is asked")
    began = time.monotonic()
    assert sampler.take(10) == []
    sampler.stop(timeout_seconds=0.1)
    assert time.monotonic() - began < 25, "it waited for the driver"
    released.append(1)
    sampler.stop(timeout_seconds=30)
    page.close()


# ---- the supervisor


def test_whether_the_agent_lives(run: RunDir) -> None:
    assert not agent_alive(run)
    this_process().write(run.agent)
    assert agent_alive(run)
    ProcessId(pid=os.getpid(), started=1).write(run.agent)
    assert not agent_alive(run), "another process has its number now"


def test_a_parent_that_ends_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent = Parent(child.pid)
    parent.look()
    assert not parent.gone
    assert parent.fileno() is not None
    child.communicate(b"\n")
    parent.look()
    assert parent.gone
    assert parent.fileno() is None
    assert Parent(child.pid).gone, "it had ended before"
    parent.close()


# ---- facts, keepsakes, URIs


def test_logs_are_cut_to_their_end(run: RunDir) -> None:
    for rank in (0, 10, 2):
        log = run.log(1, rank)
        log.parent.mkdir(parents=True)
        log.write_bytes(b"\xff start " + b"x" * 100_000 + b" end")
    run.log(0, 0).parent.mkdir(parents=True)
    run.log(0, 0).write_text("older")
    told = dict(keepsakes.texts(run))
    assert list(told) == ["logs/rank0.txt", "logs/rank2.txt", "logs/rank10.txt"]
    assert told["logs/rank0.txt"].startswith("[the last 65536 of 100012 bytes]\n")
    assert told["logs/rank0.txt"].endswith(" end")


def test_no_repository_no_commit(
    tmp_path: pathlib.Path, repository: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts._git(tmp_path) == {}
    assert facts._git(tmp_path / "none") == {}
    told = facts._git(repository)
    assert (len(told["mlflow.source.git.commit"]), told["sgpu.git.dirty"]) == (40, "false")
    assert told["mlflow.source.git.branch"] == "trunk"
    monkeypatch.setenv("PATH", "")
    assert facts._git(repository) == {}, "no git at all"


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////a/b.db", "/a/b.db"), ("sqlite:///b.db", "b.db"), ("sqlite+pysqlite:////a/b.db?x=1", "/a/b.db"),
        ("sqlite:///:memory:", None), ("http://h:1", None), ("databricks", None), ("postgresql://u@h/d", None),
        ("./mlruns", None),
    ],
)  # fmt: skip
def test_the_file_of_a_local_store(uri: str, file: str | None) -> None:
    assert store.sqlite_file(uri) == (pathlib.Path(file) if file else None)


@pytest.mark.parametrize(
    ("uri", "same"),
    [
        ("sqlite:///b.db", "sqlite:////work/b.db"), ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("sqlite:///b.db?timeout=5", "sqlite:////work/b.db?timeout=5"), ("./mlruns", "/work/mlruns"),
        ("http://h:1", "http://h:1"), ("databricks://profile", "databricks://profile"), ("databricks", "databricks"),
    ],
)  # fmt: skip
def test_a_store_is_the_same_from_another_folder(uri: str, same: str) -> None:
    assert store.absolute(uri, pathlib.Path("/work")) == same


def test_a_runs_page_shows_no_password() -> None:
    assert store.run_url("https://me:secret@host:8/ml/", "1", "r") == "https://host:8/ml/#/experiments/1/runs/r"
    assert store.run_url("sqlite:////a.db", "1", "r") is None
    assert store.open_command("sqlite:////a b.db") == "mlflow ui --backend-store-uri 'sqlite:////a b.db'"
    assert store.open_command("http://h") is None
    assert store.open_command("databricks") is None


# ---- the notebook's side


def in_a_notebook(code: str, folder: pathlib.Path, **variables: str) -> str:
    """What the code prints in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_asking_what_is_active_loads_no_mlflow(tmp_path: pathlib.Path) -> None:
    told = in_a_notebook(
        "import pathlib, sys\n"
        "from sgpu.metrics.mlflow_reader import choose_tracking\n"
        "print(choose_tracking(pathlib.Path('/h'), pathlib.Path('/w')).uri, 'mlflow' in sys.modules)",
        tmp_path,
    )
    assert told == "sqlite:////h/mlflow.db False"


def test_the_environment_beats_the_default_and_an_active_run_beats_both(
    tmp_path: pathlib.Path, template_database: pathlib.Path
) -> None:
    code = (
        "import pathlib, mlflow\n"
        "from sgpu.metrics.mlflow_reader import choose_tracking\n"
        "here = lambda: choose_tracking(pathlib.Path('/h'), pathlib.Path.cwd())\n"
        "print(here().uri, here().experiment, here().parent_run_id)\n"
        f"mlflow.set_tracking_uri('sqlite:///{template_database}')\n"
        "chosen = mlflow.set_experiment('mine').experiment_id\n"
        "print(here().uri, here().experiment_id == chosen)\n"
        "with mlflow.start_run() as run:\n"
        "    print(here().parent_run_id == run.info.run_id, here().experiment_id == chosen)\n"
    )
    told = in_a_notebook(code, tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_EXPERIMENT_NAME="named")
    assert told.splitlines() == [
        "http://127.0.0.1:9 named None", f"sqlite:///{template_database} True", "True True",
    ]  # fmt: skip


def test_history_counts_a_step_once_and_says_what_cannot_be_read(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    from mlflow.tracking import MlflowClient

    run = make_run()
    client = MlflowClient(run.uri)
    made = client.create_run("0").info.run_id
    for step, value, stamp in ((1, 1.0, 1000), (2, 2.0, 2000), (1, 1.5, 3000), (3, 3.0, 2500)):
        client.log_metric(made, "loss", value, timestamp=stamp, step=step)
    points = mlflow_reader.history(run.uri, made, "loss")
    assert [(p.step, p.value, p.time_seconds) for p in points] == [(1, 1.5, 3.0), (2, 2.0, 2.0), (3, 3.0, 2.5)]
    assert [p.step for p in mlflow_reader.history(run.uri, made, "loss", most_points=2)] == [1, 3]
    assert mlflow_reader.history(run.uri, made, "none") == []
    for ask in (mlflow_reader.latest, lambda uri, run_id: mlflow_reader.history(uri, run_id, "x")):
        assert_unreadable(ask, f"sqlite:///{tmp_path}/none.db", "r", "there is no MLflow store at")
    assert_unreadable(mlflow_reader.latest, run.uri, "0" * 32, "cannot read MLflow run")


def assert_unreadable(ask: Callable[[str, str], object], uri: str, run_id: str, why: str) -> None:
    with pytest.raises(SgpuError, match=why):
        ask(uri, run_id)


def test_a_goodput_report_prints_as_a_sentence() -> None:
    seconds = {"starting": 4.0, "productive": 15.0, "data": 1.0, "idle": 0.0}
    report = ledger.GoodputReport(seconds=seconds, wall_seconds=10.0, goodput=0.75, ranks=2)
    assert str(report) == "goodput 75.0% of 2 rank(s) x 10.0 s: productive 15.0 s, starting 4.0 s, data 1.0 s"
    nothing = ledger.GoodputReport(seconds={"idle": 0.0}, wall_seconds=0.0, goodput=0.0, ranks=1)
    assert str(nothing).endswith("nothing yet")
