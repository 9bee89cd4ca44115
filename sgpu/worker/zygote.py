"""A warm process from which workers are forked: torch is imported once a node, so a restart costs what the work costs.

    python -m sgpu.worker.zygote COMMAND_FD REPLY_FD

Commands and replies are JSON lines (see `Zygote.obey`). It stays single-threaded and never starts CUDA; where a library
started threads at import all the same, workers are executed afresh instead of forked, and the `ready` reply says so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import selectors
import signal
import sys
import time
from typing import Any, NoReturn

from sgpu import settings
from sgpu.contract.process import die_with_parent, ended_children

# What nearly every training function loads, some of it only when DDP or an optimizer is made.
_WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "numpy",
    "cloudpickle",
    "sgpu.worker.life",
    "sgpu.training.loop",
    "sgpu.checkpoint.engine",
    "sgpu.data.loader",
)


# A scheduler that wants the node back may signal every process of the run: what saves must live on.
_LEFT_TO_THE_AGENT = (signal.SIGTERM, signal.SIGUSR1)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Zygote:
    """Obeys the agent, forks, reaps.

    Commands:
        {"op": "worker", "id", "environment", "log", "run", "rank", "generation"}
        {"op": "store", "id", "log", "address"}
        {"op": "tell", "pid", "message"}       a line for a worker's control pipe, see control.py
    Replies:
        {"event": "ready", "forks", "seconds"}
        {"event": "started", "id", "pid"}
        {"event": "store", "id", "port"}       port None: it could not start
        {"event": "exited", "pid", "status"}   status as os.waitpid gives it
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self._forks = True
        self._controls: dict[int, int] = {}

    def serve(self) -> None:
        started = time.monotonic()
        for name in _WARM:
            importlib.import_module(name)
        self._forks = threads() == 1
        gc.collect()
        gc.freeze()
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._reply(event="ready", forks=self._forks, seconds=time.monotonic() - started)
        selector = selectors.DefaultSelector()
        selector.register(self._commands, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        buffer = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._commands in ready:
                chunk = os.read(self._commands, 65536)
                if not chunk:
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))

    def obey(self, command: dict[str, Any]) -> None:
        if command["op"] == "tell":
            self._tell(command["pid"], command["message"])
            return
        is_store, parent = command["op"] == "store", os.getpid()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _in_child(command, parent, write if is_store else read, fresh=not self._forks)
        os.close(write if is_store else read)
        if not is_store:
            os.set_blocking(write, False)
            self._controls[pid] = write
        self._reply(event="started", id=command["id"], pid=pid)
        if is_store:
            with os.fdopen(read) as file:
                port = file.readline()
            self._reply(event="store", id=command["id"], port=int(port) if port else None)

    def _tell(self, pid: int, message: dict[str, Any]) -> None:
        control = self._controls.get(pid)
        if control is not None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it is gone, or takes no word any more
                os.write(control, (json.dumps(message) + "\n").encode())

    def _reap(self) -> None:
        for pid, status in ended_children():
            control = self._controls.pop(pid, None)
            if control is not None:
                os.close(control)
            self._reply(event="exited", pid=pid, status=status)

    def _reply(self, **reply: Any) -> None:
        os.write(self._replies, (json.dumps(reply) + "\n").encode())


def _in_child(command: dict[str, Any], parent: int, pipe: int, *, fresh: bool) -> NoReturn:
    """A forked child's whole life. It never returns into the zygote's loop."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in _LEFT_TO_THE_AGENT if command["op"] == "worker" else ():
            signal.signal(number, signal.SIG_DFL)
        _take_log(pathlib.Path(command["log"]), keep=pipe)
        if command["op"] == "store":
            _store(pipe, command["address"])
        elif fresh:
            _execute(command, pipe)
        else:
            _worker(command, pipe)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of a process: told in its log, and by its status
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _take_log(log: pathlib.Path, keep: int) -> None:
    """Standard streams become this rank's log; every other descriptor of the zygote is closed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != keep:
            try:
                os.close(number)
            except OSError:
                continue  # the listing's own descriptor
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _worker(command: dict[str, Any], control: int) -> None:
    from sgpu.contract import failpoint
    from sgpu.worker.life import run_worker

    gc.enable()
    settings.adopt(command["environment"])
    failpoint.reset()
    run_worker(pathlib.Path(command["run"]), command["rank"], command["generation"], control)


def _execute(command: dict[str, Any], control: int) -> None:
    arguments = [command["run"], str(command["rank"]), str(command["generation"]), str(control)]
    os.set_inheritable(control, True)
    os.execve(
        sys.executable,
        [sys.executable, "-m", "sgpu.worker", *arguments],
        {**settings.inherited(), **command["environment"]},
    )


def _store(port_to: int, address: str) -> None:
    """Hosts a generation's TCPStore until the zygote ends it."""
    import socket
    from datetime import timedelta

    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    hosted = functools.partial(
        TCPStore, address, port, None, True, timedelta(seconds=60), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    try:
        store = hosted()
    except NotImplementedError:  # torch 2.6: libuv takes no socket that listens already
        store = hosted(use_libuv=False)
    os.write(port_to, f"{port}\n".encode())
    os.close(port_to)
    while store is not None:
        signal.pause()


def main() -> None:
    parent = os.getppid()
    die_with_parent(parent)
    for number in _LEFT_TO_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    Zygote(int(sys.argv[1]), int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
