"""Every error that sgpu raises on purpose.

    SgpuError
    ├── InputError (also ValueError)    refused before anything started: what was expected, found, and what to do
    │   └── PayloadError                the function or an argument cannot be shipped; names the variable
    ├── RunError                        a run ended without its results
    │   ├── UserCodeError               the user's code raised something that could not be rebuilt here
    │   ├── ResultError                 a rank's return value could not be brought back
    │   ├── WorkerLostError             a worker vanished: exit code, signal, out of memory
    │   ├── HangError                   no step was completed within the limit
    │   ├── DivergenceError             a loss is not finite, or has exploded
    │   ├── CrashLoopError              the same failure at the same step again: restarting cannot help
    │   ├── AgentLostError              the supervisor vanished
    │   └── RunCancelledError
    ├── CheckpointError                 (each names the folder, and the file or tensor where there is one)
    │   ├── CheckpointNotFoundError
    │   ├── CheckpointCorruptError
    │   ├── CheckpointMismatchError     the checkpoint and the live objects do not fit each other
    │   │   └── CheckpointFormatError   a newer sgpu wrote it, in a form that this one does not know
    │   ├── UnsafeCheckpointError       a pickle asks for code that is not on the allow-list
    │   └── CheckpointSaveError
    └── DataError
        ├── VolumeError (also InputError)  a volume does not exist, is empty or cannot be read
        ├── FetchError                  a file could not be brought here
        ├── ListingChangedError         the volume is not the one that the checkpoint was made with
        └── PositionError               a saved data position cannot be honoured exactly

A user's own exception is raised as itself, with a `RemoteTraceback` as its cause.
"""

from __future__ import annotations

from typing import Any


class SgpuError(Exception):
    """Base of all. Keyword facts given at construction become attributes and survive pickling."""

    _recurs = False

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    @property
    def unrecoverable(self) -> bool:
        """Whether the same would happen again, whatever is restarted: as the fact of this name says, or its kind."""
        return bool(self.facts.get("unrecoverable", self._recurs))

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no fact {name!r}; it has {sorted(facts)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.facts)


def _rebuild(kind: type[SgpuError], message: str, facts: dict[str, Any]) -> SgpuError:
    return kind(message, **facts)


class InputError(SgpuError, ValueError):
    """An argument was refused before anything started."""


class PayloadError(InputError):
    """The function or one of its arguments cannot be shipped. Facts: `variable`, `size_bytes`."""

    _recurs = True


class RunError(SgpuError):
    """A run ended without its results. Facts: `run_id`, `rank`, `step`."""


class UserCodeError(RunError):
    """The user's code raised an exception that could not be rebuilt in this process."""


class ResultError(RunError):
    """A rank's return value could not be pickled. Facts: `rank`."""


class WorkerLostError(RunError):
    """A worker ended without a result. Facts: `rank`, `exit_code`, `signal`, `cause`."""


class HangError(RunError):
    """A rank completed no step within its limit. Facts: `rank`, `step`, `section`, `limit_seconds`."""


class DivergenceError(RunError):
    """A loss is not finite, or has exploded. Facts: `rank`, `step`."""


class CrashLoopError(RunError):
    """The same failure happened again at the same step. Facts: `rank`, `step`, `attempts`."""


class AgentLostError(RunError):
    """The supervisor of a run vanished."""


class RunCancelledError(RunError):
    """The run was cancelled."""


class CheckpointError(SgpuError):
    """Base of checkpoint errors. Facts: `path`, and `file` or `tensor` where one is to blame."""


class CheckpointNotFoundError(CheckpointError):
    """There is no valid checkpoint where one was asked for."""


class CheckpointCorruptError(CheckpointError):
    """Bytes of a checkpoint are missing or not those that were written."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint and the live objects do not fit each other. Facts: `missing`, `unexpected`, `different`."""

    _recurs = True


class CheckpointFormatError(CheckpointMismatchError):
    """A checkpoint of a newer format. Facts: `found`, `known`."""


class UnsafeCheckpointError(CheckpointError):
    """A pickle inside a checkpoint asks for a name that is not on the allow-list. Facts: `name`."""

    _recurs = True


class CheckpointSaveError(CheckpointError):
    """A save failed. Facts: `step`, `rank`; where storage is the cause, `errno`, `needed_bytes` and `free_bytes`."""


class DataError(SgpuError):
    """Base of data errors."""


class VolumeError(DataError, InputError):
    """A volume does not exist, is empty, or cannot be read. Facts: `url`."""


class FetchError(DataError):
    """A file could not be brought here. Facts: `url`, `path`."""


class ListingChangedError(DataError):
    """The volume's listing is not the one of the checkpoint. Facts: `added`, `removed`, `changed`."""

    _recurs = True


class PositionError(DataError):
    """A saved data position cannot be honoured exactly. Facts name what differs."""

    _recurs = True


class RemoteTraceback(Exception):
    """The traceback of a worker, as text; shown as the cause of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text
