"""Workers forked from a process of their own that has torch imported, see worker/zygote.py."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sgpu.agent.hosting import strays
from sgpu.agent.hosting.oom import AnyOf, CgroupCounter, KernelLog, OomSource
from sgpu.agent.judging import kernel_view
from sgpu.agent.workers import Exit, ZygoteLostError
from sgpu.contract import process
from sgpu.contract.status import NodeStatus

_REPLY_SECONDS = 300.0  # it may be importing torch from a slow file system


class ZygoteHost:
    """Workers forked from `python -m sgpu.worker.zygote`."""

    def __init__(
        self,
        *,
        python: str,
        run: pathlib.Path,
        environment: Mapping[str, str],
        log: pathlib.Path,
        spared: Callable[[], Iterable[int]] = tuple,
        address: str = "127.0.0.1",
        memory: OomSource | None = None,
    ) -> None:
        """`spared` tells which other children of this process stay when strays are ended; `address` is the store's.

        `memory` tells which workers the kernel killed; None: its control group and its log, where they can be read.
        """
        self._memory = memory if memory is not None else AnyOf(CgroupCounter(), KernelLog())
        self._python = python
        self._spared, self._address = spared, address
        self._run = run
        self._environment = dict(environment)
        self._log = log
        self._zygote: subprocess.Popen[bytes] | None = None
        self._commands = self._replies = -1
        self._buffer = b""
        self._backlog: deque[dict[str, Any]] = deque()
        self._names: dict[int, str] = {}
        self._pids: dict[str, int] = {}
        self._exits: list[Exit] = []
        self._ready = False
        self._spies: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def open(self) -> None:
        process.adopt_orphans()
        command_read, self._commands = os.pipe()
        self._replies, reply_write = os.pipe()
        with self._log.open("ab") as log:
            self._zygote = subprocess.Popen(
                [self._python, "-m", "sgpu.worker.zygote", str(command_read), str(reply_write)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(command_read, reply_write),
                env=self._environment,
            )
        os.close(command_read)
        os.close(reply_write)
        self._selector.register(self._replies, selectors.EVENT_READ)

    def reopen(self) -> None:
        self.close()
        self._buffer = b""
        self._backlog.clear()
        self._names.clear()
        self._pids.clear()
        self._exits.clear()
        self._ready = False
        self._selector = selectors.DefaultSelector()
        self.open()

    def fileno(self) -> int:
        return self._replies

    def ready(self) -> bool:
        return self._ready

    def open_store(self, name: str) -> int:
        self._send({"op": "store", "id": name, "log": str(self._log), "address": self._address})
        port = self._await(lambda reply: reply["event"] == "store" and reply["id"] == name)["port"]
        if port is None:
            raise ZygoteLostError(f"the rendezvous store could not start; see {self._log}")
        return int(port)

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path,
        parked: str | None = None,
    ) -> None:  # fmt: skip
        told = {"rank": rank, "generation": generation, "environment": dict(environment), "log": str(log)}
        pid = self._pids.pop(parked, None) if parked is not None else None
        if pid is None:
            self._send({"op": "worker", "id": name, "run": str(self._run), **told})
            return
        self._names[pid], self._pids[name] = name, pid
        self._tell(pid, {"op": "begin", **told})

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        for name in names:
            pid = self._pids.get(name)
            if pid is not None:
                self._tell(pid, {"op": "interrupt", "generation": generation})

    def _tell(self, pid: int, message: dict[str, Any]) -> None:
        self._send({"op": "tell", "pid": pid, "message": message})

    def wait(self, seconds: float) -> list[Exit]:
        deadline = time.monotonic() + seconds
        self._drain()
        while not self._exits:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                break
            self._read()
            self._drain()
        exits, self._exits = self._exits, []
        return exits

    def signal(self, name: str, number: int) -> None:
        pid = self._pids.get(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stopped(self, name: str) -> bool:
        pid = self._pids.get(name)
        return pid is not None and process.state_of(pid) == "T"

    def examine(self, name: str, into: pathlib.Path) -> None:
        pid = self._pids.get(name)
        if pid is not None:
            self._tell(pid, {"op": "answer"})
        self._spies = [spy for spy in self._spies if spy.poll() is None]
        spy = kernel_view.examine(pid, into) if pid is not None else None
        if spy is not None:
            self._spies.append(spy)

    def members(self) -> tuple[int, ...]:
        return (0,) if self._ready else ()

    def room(self, wanted: int) -> int:
        return wanted

    def begin(self, members: tuple[int, ...]) -> None:
        """There is but one node."""

    def nodes(self) -> tuple[NodeStatus, ...]:
        return ()

    def end(self, names: Sequence[str], seconds: float) -> None:
        self._end({pid for pid, name in self._names.items() if name in names}, seconds)
        self._exits = [each for each in self._exits if each.name not in names]

    def stop_all(self, seconds: float) -> None:
        self._end(set(self._names), seconds)
        self._exits.clear()

    def _end(self, pids: set[int], seconds: float) -> None:
        for pid in pids:
            _signal_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ZygoteLostError):  # then they end with it; whoever uses it next is told
            while pids & self._names.keys() and self._selector.select(max(0.0, deadline - time.monotonic())):
                self._read()
                self._drain()
        self._end_strays()

    def _end_strays(self) -> None:
        strays.end(lambda: [*self._spared(), *([self._zygote.pid] if self._zygote is not None else [])])

    def close(self) -> None:
        if self._zygote is None:
            return
        if self._zygote.poll() is None:
            self.stop_all(5.0)
        os.close(self._commands)
        try:
            self._zygote.wait(2.0)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        self._selector.close()
        os.close(self._replies)
        self._zygote = None
        self._end_strays()

    def _send(self, command: dict[str, Any]) -> None:
        try:
            os.write(self._commands, (json.dumps(command) + "\n").encode())
        except BrokenPipeError:
            raise self._lost() from None

    def _read(self) -> None:
        chunk = os.read(self._replies, 65536)
        if not chunk:
            raise self._lost()
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._backlog.extend(json.loads(line) for line in lines)

    def _lost(self) -> ZygoteLostError:
        status = self._zygote.wait() if self._zygote is not None else None
        said = f" with {_last_line(self._log)!r}" if status is not None and status > 0 else ""
        return ZygoteLostError(f"the process that starts workers ended (exit status {status}){said}; see {self._log}")

    def _await(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Reads on until the wanted reply; keeps account of what comes before it."""
        deadline = time.monotonic() + _REPLY_SECONDS
        while True:
            while self._backlog:
                reply = self._backlog.popleft()
                self._account(reply)
                if wanted(reply):
                    return reply
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ZygoteLostError(
                    f"the process that starts workers did not answer within {_REPLY_SECONDS:g} s; see {self._log}"
                )
            self._read()

    def _drain(self) -> None:
        while self._backlog:
            self._account(self._backlog.popleft())

    def _account(self, reply: dict[str, Any]) -> None:
        if reply["event"] == "started":
            self._names[reply["pid"]] = reply["id"]
            self._pids[reply["id"]] = reply["pid"]
        elif reply["event"] == "ready":
            self._ready = True
        elif reply["event"] == "exited":
            name = self._names.pop(reply["pid"], None)
            if name is not None:
                del self._pids[name]
                _end_rest_of_group(reply["pid"])
                status = reply["status"]
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                killed = killed and self._memory.killed(reply["pid"])
                self._exits.append(Exit(name=name, status=status, out_of_memory=killed))


def _signal_group(pid: int, number: int) -> None:
    """To a live worker's process group, or to it alone while it has not made its group yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end_rest_of_group(pid: int) -> None:
    """What an ended worker started and left; its own pid may be another process's by now."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _last_line(log: pathlib.Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else ""
