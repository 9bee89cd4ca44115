"""Every test gets a home of its own, and must leave no process behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import psutil
import pytest

from sgpu.contract import failpoint

# A shell ignores it for what it starts in the background, and then no test's processes could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """SGPU_HOME for this test alone; nothing of the machine's own settings leaks in."""
    for name in list(os.environ):
        if name.startswith(("SGPU_", "SGC_", "MLFLOW_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    failpoint.reset()  # what an earlier test had armed
    folder = tmp_path / "home"
    monkeypatch.setenv("SGPU_HOME", str(folder))
    monkeypatch.setenv("SGPU_ON_KERNEL_EXIT", "stop")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def _family() -> dict[int, psutil.Process]:
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child of its own running, and ends that child."""
    before = _family()
    yield
    left = [child for pid, child in _family().items() if pid not in before and not _stays(child)]
    _, alive = psutil.wait_procs(left, timeout=30)  # on a busy machine, a run that has ended is still clearing up
    told = [f"{child.pid} {' '.join(_command(child))[:200]}" for child in alive]
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert not told, f"processes left behind: {told}"


def _stays(child: psutil.Process) -> bool:
    """Whether it is multiprocessing's own, one a session, or a session's fixture, asked for in the middle of a test."""
    try:
        kept = child.ppid() == os.getpid() and "KEPT_FOR_THE_SESSION" in child.environ()
    except psutil.NoSuchProcess:
        return False
    return kept or any("resource_tracker" in word for word in _command(child))


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A handler left behind would take the signals of every test after it."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    left = {number.name: now for number in _SIGNALS if (now := signal.getsignal(number)) != before[number]}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not left, f"signal handlers left behind: {left}"


@pytest.fixture
def agents_end(no_process_left: None) -> Iterator[None]:
    """A run's agent still brings the last metrics to MLflow when the result is there: waits for it."""
    yield
    agents = [child for child in psutil.Process().children() if "sgpu.agent" in _command(child)]
    psutil.wait_procs(agents, timeout=60)


def _command(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def without_mlflow(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics part has tests of its own; here its process ends at once, which each run must survive anyway."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "mlflow.py").write_text("raise ImportError('switched off for this test')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left alone with them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# In CI all is installed: a test that skips was not run, and fails the run, unless the machine cannot have what it
# needs.
_ALLOWED_SKIPS = ("needs a GPU", "needs a network namespace", "needs a mount namespace", "needs a control group")
_skipped: dict[str, str] = {}


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(_ALLOWED_SKIPS):
            _skipped[report.nodeid] = reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") == "true" and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") == "true" and _skipped:
        terminalreporter.section("skipped, but should have run", red=True)
        for nodeid, reason in sorted(_skipped.items()):
            terminalreporter.line(f"{nodeid}: {reason}")
        terminalreporter.line(f"in CI a skip's reason must start with one of {_ALLOWED_SKIPS}")
