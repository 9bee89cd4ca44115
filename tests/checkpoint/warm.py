"""Runs scripts in processes that need not import torch: each is forked from this one, which has.

    python warm.py NAME      of an abstract socket

Each connection is for one script: a line of JSON {"script", "environment", "out", "err"} comes in, a line with the pid
goes out, and one with the exit code (negative: the signal) at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import sgpu.checkpoint.engine  # noqa: F401
from sgpu.contract import process


def run(asked: dict[str, Any]) -> int:
    """In the forked process: what `python SCRIPT` would do, and its exit code."""
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    random.seed()
    np.random.seed()
    sys.argv = [asked["script"]]
    code = 0
    try:
        runpy.run_path(asked["script"], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    flush()
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end, in this order
    atexit._run_exitfuncs()
    flush()
    return code


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def main(name: str) -> None:
    signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj == signals:
                    os.read(signals, 4096)
                    reap(running)
                    continue
                link, _ = listener.accept()
                asked = json.loads(link.makefile().readline())
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listener, link, *running.values()):
                        other.close()
                    code = 1
                    try:
                        code = run(asked)
                    finally:
                        os._exit(code & 0xFF)
                running[pid] = link
                link.sendall(f"{pid}\n".encode())


def reap(running: dict[int, socket.socket]) -> None:
    for pid, status in process.ended_children():
        with contextlib.suppress(OSError), running.pop(pid) as link:  # whoever asked may be gone
            link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
