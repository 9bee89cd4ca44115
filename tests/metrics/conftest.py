"""A real MLflow server for the session, run folders made by hand, and forwarders as real processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgpu.contract import events, forwarding
from sgpu.contract.heartbeat import Category, Page
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import State, Status
from sgpu.metrics import mlflow_reader, store
from sgpu.metrics.recorder import Recorder
from sgpu.metrics.writer import Link, read_link

ROOT = pathlib.Path(__file__).parents[2]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The condition's first true value; fails with `what` after a deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(home: pathlib.Path | None = None, **more: str) -> dict[str, str]:
    """Of a child process that must find this checkout's sgpu."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **({"SGPU_HOME": str(home)} if home else {}), **more}


class MlflowServer:
    """`mlflow server` on loopback, over a SQLite file; can be ended and started again on the same port."""

    def __init__(self, folder: pathlib.Path, database: pathlib.Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._database = folder, database
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "SGPU_"))}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self._database}",
                    "--artifacts-destination", str(self._folder / "artifacts"), "--host", "127.0.0.1",
                    "--port", str(self.port), "--workers", "1",
                ],
                env={**kept, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()


@pytest.fixture(scope="session")
def template_database(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A store whose tables are made already: making them takes seconds."""
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    with warnings.catch_warnings():  # mlflow's own imports warn of each other
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, template_database: pathlib.Path) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("mlflow-server")
    shutil.copy(template_database, folder / "mlflow.db")
    made = MlflowServer(folder, folder / "mlflow.db")
    made.start()
    wait_for(made.healthy, "a healthy mlflow server")
    yield made
    made.stop()


class Proxy:
    """A TCP relay in front of a server: up, refusing, answering 503, or swallowing everything."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.mode = "up"
        self.turned_away = 0
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        """Connections of the mode before are cut."""
        self.mode = mode
        for each in list(self._open):
            self._drop(each)

    def close(self) -> None:
        _shut(self._listener)
        self._listener.close()
        self.set("closed")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(client)
            if self.mode == "up":
                upstream = socket.create_connection(("127.0.0.1", self._target))
                self._open.add(upstream)
                for one, other in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()
                continue
            self.turned_away += 1
            if self.mode == "503":
                threading.Thread(target=self._unavailable, args=(client,), daemon=True).start()
            elif self.mode == "refuse":
                self._drop(client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        self._drop(source)
        self._drop(sink)

    def _unavailable(self, client: socket.socket) -> None:
        try:
            client.recv(65536)
            client.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy")
        except OSError:
            pass
        self._drop(client)

    def _drop(self, one: socket.socket) -> None:
        _shut(one)
        one.close()
        self._open.discard(one)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The user's project, under git."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text("lr = 0.1\n")
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "train.py"], [*who, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


class HandMadeRun:
    """A run folder as agent and workers would write it."""

    def __init__(
        self, home: pathlib.Path, uri: str, *, working_dir: pathlib.Path, world_size: int = 2, **spec: Any
    ) -> None:
        self.uri, self.world_size, self.home = uri, world_size, home
        name = f"20260101-000000-train-{os.urandom(3).hex()}"
        self.dir = RunDir(home / "runs" / name)
        self.dir.create()
        tracking = Tracking(uri=uri, experiment=spec.pop("experiment", "sgpu"), parent_run_id=spec.pop("parent", None))
        RunSpec(
            id=name, name="train", created=time.time(), backend="local", world_size=world_size,
            gpus_per_node=world_size, accelerator="cpu", seed=7, tracking=tracking, python=sys.executable,
            working_dir=str(working_dir), parameters={"lr": "0.001"}, tags={"team": "vision"}, **spec,
        ).write(self.dir)  # fmt: skip
        self.page = Page.create(self.dir.heartbeat, world_size)
        self._processes: list[subprocess.Popen[bytes]] = []

    def supervised(self) -> None:
        """This test process is the agent."""
        this_process().write(self.dir.agent)

    def status(self, state: State, **facts: Any) -> None:
        Status(state=state, updated=time.time(), **facts).write(self.dir)

    def event(self, kind: str, generation: int = 0, rank: int | None = None, **facts: Any) -> None:
        events.emit(self.dir, kind, generation=generation, rank=rank, **facts)

    def generation(self, number: int, steps: range, *, sign: float = 1.0) -> None:
        """Each rank logs `loss` at `steps`; `sign` tells the values of a replay from the first ones."""
        self.event("generation_started", generation=number, cause="signal 9" if number else None)
        for rank in range(self.world_size):
            slot = self.page.slot(rank)
            slot.start(number, pid=os.getpid())
            slot.account(Category.PRODUCTIVE)
            recorder = Recorder(self.dir, rank=rank, generation=number)
            for step in steps:
                slot.beat(step)
                recorder.log(step, {"loss": sign * (step + rank / 10), "step_seconds": 0.01})
            recorder.close()
        log = self.dir.log(number, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"hello of generation {number}\n")

    def finish(self, state: State = "SUCCEEDED", **facts: Any) -> None:
        for rank in range(self.world_size):
            self.page.slot(rank).finish()
        self.event("run_ended", state=state, message="")
        self.status(state, ended=time.time(), **facts)

    def forward(self, *more: str, parent_pid: int | None = None, **variables: str) -> subprocess.Popen[bytes]:
        """Starts the real forwarder process."""
        with self.dir.forwarder_log.open("ab") as log:
            process = subprocess.Popen(
                [*forwarding.command(self.dir.root, parent_pid=parent_pid), "--period-seconds", "0.1", *more],
                env=environment(self.home, **variables), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.dir.root,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def forward_to_end(self, *more: str) -> None:
        process = self.forward(*more)
        assert process.wait(60) == 0, self.log()

    def log(self) -> str:
        return self.dir.forwarder_log.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        from sgpu.contract import records

        return [event for event in records.read_all(self.dir.events) if event["kind"] == kind]

    @property
    def link(self) -> Link:
        link = read_link(self.dir)
        assert link is not None, self.log()
        return link

    def held(self) -> Any:
        """The run as MLflow has it."""
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri).get_run(self.link.run_id)

    def raw_steps(self, key: str) -> list[int]:
        """Every entry that MLflow holds, also if a step were there twice."""
        from mlflow.tracking import MlflowClient

        return [m.step for m in MlflowClient(tracking_uri=self.uri).get_metric_history(self.link.run_id, key)]

    def values(self, key: str) -> dict[int, float]:
        return {p.step: p.value for p in mlflow_reader.history(self.uri, self.link.run_id, key)}

    def artifacts(self) -> list[str]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        found = client.list_artifacts(self.link.run_id)
        return sorted(f.path for a in found for f in ([a] if not a.is_dir else client.list_artifacts(
            self.link.run_id, a.path)))  # fmt: skip

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.page.close()


MakeRun = Callable[..., HandMadeRun]


@pytest.fixture
def make_run(home: pathlib.Path, repository: pathlib.Path, template_database: pathlib.Path) -> Iterator[MakeRun]:
    """`make_run(uri=None, ...)`: None is the default SQLite store of this test's home, its tables made already."""
    made: list[HandMadeRun] = []

    def make(uri: str | None = None, **options: Any) -> HandMadeRun:
        home.mkdir(exist_ok=True)
        if uri is None:
            uri = mlflow_reader.default_tracking(home)
            file = store.sqlite_file(uri)
            if file is not None and not file.exists():
                shutil.copy(template_database, file)
        made.append(HandMadeRun(home, uri, working_dir=repository, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()
