"""Who writes the staged bytes: a helper process of its own (so that the trainer's Python does not), or this thread."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from typing import IO, Protocol

import sgpu
from sgpu import settings
from sgpu.checkpoint.segment import Segment
from sgpu.checkpoint.storage import Store
from sgpu.checkpoint.write import WriteJob, WrittenFile, write_share
from sgpu.contract.errors import CheckpointSaveError

END_SECONDS = 60.0


class Writer(Protocol):
    def write(self, job: WriteJob) -> list[WrittenFile]:
        """Blocks until the files are durable."""

    def close(self) -> None:
        """Ends what this writer started."""


class ThreadWriter:
    """Writes in the calling (background) thread: for stores that only this process has."""

    def __init__(self, store: Store, segment: Segment) -> None:
        self._store = store
        self._segment = segment

    def write(self, job: WriteJob) -> list[WrittenFile]:
        return write_share(self._store, self._segment.view(), job)

    def close(self) -> None:
        return


class HelperWriter:
    """Hands jobs to a helper process, started with the first one. One that died is replaced for the next."""

    def __init__(self, store: Store, segment: Segment) -> None:
        self._store = store
        self._segment = segment
        self._process: subprocess.Popen[str] | None = None

    def write(self, job: WriteJob) -> list[WrittenFile]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None  # for the type checker: both are pipes
        try:
            process.stdin.write(json.dumps(job.to_json()) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died(process, job) from error
        answer = process.stdout.readline()
        if not answer.endswith("\n"):
            raise self._died(process, job)
        value = json.loads(answer)
        if "error" in value:
            raise CheckpointSaveError(f"rank {job.rank} could not write its share: {value['error']}", rank=job.rank)
        return [WrittenFile.from_json(file) for file in value["files"]]

    def _start(self) -> subprocess.Popen[str]:
        package_parent = str(pathlib.Path(sgpu.__file__).parent.parent)
        environment = settings.inherited()
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{package_parent}:{known}" if known else package_parent
        descriptor = self._segment.descriptor
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgpu.checkpoint.helper", self._store.url, str(descriptor)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=(descriptor,),
            start_new_session=True,  # an interrupt of the notebook must not tear a write
        )  # fmt: skip
        return self._process

    def _died(self, process: subprocess.Popen[str], job: WriteJob) -> CheckpointSaveError:
        self._process = None
        _close(process.stdin)
        code = process.wait(END_SECONDS)
        _close(process.stdout)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CheckpointSaveError(
            f"the checkpoint writer of rank {job.rank} ended with {how} before its share was written. "
            "The next save starts a new one.",
            rank=job.rank,
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _say_end(process.stdin)
        _close(process.stdin)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process.stdout)


def _say_end(pipe: IO[str] | None) -> None:
    """Closing alone does not end its input: processes forked since (a loader's workers) hold the pipe open too."""
    try:
        if pipe is not None:
            pipe.write("\n")
    except BrokenPipeError:
        return


def _close(pipe: IO[str] | None) -> None:
    if pipe is None:
        return
    try:
        pipe.close()
    except BrokenPipeError:
        return  # the process is gone; what was left to be told to it does not matter
