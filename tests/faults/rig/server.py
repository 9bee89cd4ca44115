"""The process that cells are forked from: `python -m tests.faults.rig.server`.

Lines of JSON come in: {"module", "function", "arguments", "folder", "number", "limit_seconds"}. For each a process is
forked that calls the function in the folder, and a line {"number", "code"} goes out when it has ended. What it returns
is in `result.json` there, what it printed in `log`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import selectors
import signal
import threading
from typing import Any

from sgpu.contract import process
from sgpu.worker import zygote
from tests.faults.rig import forking, tracking

MODULES = (
    *zygote._WARM, "sgpu.agent.control", "sgpu.agent.follow", "sgpu.agent.nodes.cluster", "sgpu.checkpoint.helper.desk",
    "sgpu.checkpoint.helper.helper_writer", "sgpu.checkpoint.helper.finish", "sgpu.checkpoint.helper.guests",
    "sgpu.metrics.forwarding", "sgpu.decorator", "fsspec.implementations.local", "sgpu.data.volumes.url",
    "sgpu.checkpoint.stores.remote", "sgpu.launch.local", "sgpu.checkpoint.looking.catalog",
    "torch.nn.parallel.distributed", "tests.faults.rig.cell", "tests.faults.rig.soak",
)  # fmt: skip


def main() -> None:
    import torch

    torch.set_num_threads(1)
    tracking.install()
    for name in MODULES:
        importlib.import_module(name)
    if threading.active_count() > 1 or zygote.threads() > 1:
        raise RuntimeError(f"a process that forks must have one thread; it has {threading.enumerate()}")
    process.adopt_orphans()
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    _serve()


def _serve() -> None:
    wake, waked = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waked)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.fd == wake:
                os.read(wake, 4096)
                _reap(running)
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                _end(running)
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _cell(asked)
                running[pid] = asked["number"]


def _cell(asked: dict[str, Any]) -> None:
    folder = pathlib.Path(asked["folder"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, nothing), (1, log), (2, log)):
        os.dup2(descriptor, number)

    def run() -> None:
        os.setpgid(0, 0)
        signal.alarm(asked["limit_seconds"])  # one that does not end has failed
        process.die_with_parent(os.getppid())
        process.adopt_orphans()
        os.chdir(folder)
        function = getattr(importlib.import_module(asked["module"]), asked["function"])
        found = function(folder, **asked["arguments"])
        (folder / "result.json").write_text(json.dumps(found))

    forking.be(run)


def _reap(running: dict[int, int]) -> None:
    for pid, status in process.ended_children():
        if pid in running:
            print(json.dumps({"number": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _end(running: dict[int, int]) -> None:
    for pid in [*running, *process.descendants(os.getpid())]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
