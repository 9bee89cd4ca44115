"""Fresh processes at the price of a fork: one warm process, torch imported and one thread, forks each of them."""

from __future__ import annotations

import gc
import os
import pathlib
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import BinaryIO

import cloudpickle

from sgpu import settings

_LENGTH = struct.Struct("<q")
FAILED = 70


class FreshProcesses:
    """Runs functions, one after the other, each in a process that has done nothing before.

    Order of calls: `run` as often as wished, `close`. Functions travel by value (cloudpickle).
    """

    def __init__(self) -> None:
        environment = settings.inherited()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgpu.testing.laws.fresh"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip

    def run(self, function: Callable[[], None], *, log: pathlib.Path) -> int:
        """Calls it in a fresh process, which it may kill.

        Args:
            log: gets what the process prints.

        Returns:
            As `subprocess` has it: 0, an exit code, or the negative number of a signal. 70: it raised.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log.touch()
        body = cloudpickle.dumps((str(log), function))
        self._process.stdin.write(_LENGTH.pack(len(body)) + body)
        self._process.stdin.flush()
        answer = self._process.stdout.read(_LENGTH.size)
        if len(answer) < _LENGTH.size:
            raise RuntimeError(f"the process that forks others ended with {self._process.wait()}")
        return int(_LENGTH.unpack(answer)[0])

    def close(self) -> None:
        """Ends the warm process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(asks: BinaryIO, answers: BinaryIO) -> None:
    while head := asks.read(_LENGTH.size):
        body = asks.read(_LENGTH.unpack(head)[0])
        child = os.fork()
        if child == 0:
            _be(body)
        _, status = os.waitpid(child, 0)
        answers.write(_LENGTH.pack(os.waitstatus_to_exitcode(status)))
        answers.flush()


def _be(body: bytes) -> None:
    """The child: never returns."""
    code = FAILED
    try:
        log, function = cloudpickle.loads(body)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, number)
        function()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is told, and the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main() -> None:
    import torch._dynamo  # noqa: F401 - what the first optimizer of each child would import

    import sgpu.training.loop  # noqa: F401

    if threading.active_count() > 1:
        raise RuntimeError(f"a process that forks must have one thread; it has {threading.enumerate()}")
    gc.collect()
    gc.freeze()
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    _main()
