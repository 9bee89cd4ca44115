"""What the end of a run is to whoever started its command: an exit status a kind of end, so that schedulers can act."""

from __future__ import annotations

from enum import IntEnum

from sgpu.contract.status import Status


class ExitCode(IntEnum):
    """Exit statuses of `sgpu agent` and of `sgpu resume --wait`; 69 and 75 are those of sysexits.h."""

    SUCCEEDED = 0
    FAILED = 1
    CANCELLED = 2
    CRASH_LOOP = 3
    INFRASTRUCTURE = 69
    PREEMPTED = 75

    @property
    def goes_on(self) -> bool:
        """Whether the same command, started again, goes on with the run."""
        return self in (ExitCode.INFRASTRUCTURE, ExitCode.PREEMPTED)


def exit_code(status: Status) -> ExitCode:
    """Of a run that has ended."""
    if status.state == "LOST":
        return ExitCode.INFRASTRUCTURE
    if status.state != "FAILED":
        return ExitCode[status.state]
    failure = status.failure or {}
    if failure.get("kind") == "infrastructure":
        return ExitCode.INFRASTRUCTURE
    return ExitCode.CRASH_LOOP if failure.get("error") == "crash_loop" else ExitCode.FAILED
