"""Programs of sgpu as forks of a process that has imported them all: the same processes, without seconds of imports.

Whoever calls `subprocess.Popen([python, "-m", "sgpu.agent", ...])` below `take_over()` gets a real child, with its
streams, environment, folder and session as asked for; only instead of an interpreter that starts anew, it is a fork
that runs the module.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from sgpu.contract import failpoint

PROGRAMS = ("sgpu.agent", "sgpu.worker.zygote", "sgpu.checkpoint.helper", "sgpu.metrics.forwarder")
_PR_SET_NAME = 15
_start = subprocess.Popen.__init__


def named(pid: int) -> str:
    """Which program a process is: the end of its module's name."""
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def take_over() -> None:
    """From now on, in this process and those below it."""
    subprocess.Popen.__init__ = _init  # type: ignore[method-assign]


def _init(self: Any, args: Any, *rest: Any, **options: Any) -> None:
    if isinstance(args, list) and args[1:2] == ["-m"] and args[2] in PROGRAMS:
        keep = options.get("pass_fds", ())
        options["preexec_fn"] = functools.partial(_become, args[2], args[3:], options.get("env"), keep)
    _start(self, args, *rest, **options)


def _become(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None, keep: Collection[int]
) -> None:
    """In the forked child, after its streams, folder and session are set, and in place of exec."""

    def run() -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, module.encode()[-15:], 0, 0, 0)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    be(run, keep=keep)


def be(run: Callable[[], object], *, keep: Collection[int] = ()) -> NoReturn:
    """The rest of a forked process' life, as an interpreter of its own would have it."""
    code = 0
    try:
        _forget_parent(keep)
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        _leave(code)


def _forget_parent(keep: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:
                continue  # the listing's own
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    atexit._clear()
    gc.enable()
    failpoint.reset()


def _leave(code: int) -> NoReturn:
    """As the interpreter does at its end, in this order."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code & 0xFF)


def log_pids(path: pathlib.Path) -> None:
    """Every process that is forked below this one leaves its number in a file."""

    def note() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.close(descriptor)

    os.register_at_fork(after_in_child=note)
