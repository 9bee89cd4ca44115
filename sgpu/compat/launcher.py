"""`@distributed` with the parameters of the published guides."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from sgpu.compat.compute import GPUType
from sgpu.contract.errors import InputError
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
from sgpu.decorator import DistributedFunction
from sgpu.launch import plan, registry

_NO_GPU_OF_THAT_KIND = "this machine's own GPUs are used, or its CPU where it has none"


class CompatFunction(DistributedFunction):
    """A function under this module's `@distributed`; with `run_async=True`, `.distributed(...)` does not wait."""

    def __init__(self, function: Callable[..., Any], options: plan.Options, *, run_async: bool) -> None:
        super().__init__(function, options)
        self._run_async = run_async

    def distributed(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on every worker.

        Returns:
            One result a rank, in rank order; with `run_async=True` the `Run`, whose `result()` waits for that list.
        """
        if self._run_async:
            return self.submit(*args, **kwargs)
        return super().distributed(*args, **kwargs)


def distributed(
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool | None = None,
    run_async: bool = False,
    timeout: float | timedelta | None = None,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    name: str | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointPolicy | None = None,
    restarts: int | RestartPolicy | None = None,
    env: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], CompatFunction]:
    """Decorates a function so that `.distributed(...)` runs it on many workers of this machine.

    Args:
        gpus: how many; None: every visible one. Where the machine has no GPU, so many workers run on the CPU.
        gpu_type: has no meaning here; accepted with a warning.
        remote: `True` has no meaning here; accepted with a warning.
        run_async: `.distributed(...)` comes back at once with a `Run`.
        timeout: seconds (or a `timedelta`) after which the run is ended; None: no limit.
        num_accelerators: another name of `gpus`.
        accelerator_type: another name of `gpu_type`.
        name: as for `sgpu.distributed`, and so are `checkpoints`, `restarts` and `env`.

    Raises:
        InputError: an argument, or the kind of function, is not supported; says what to write.
    """
    if callable(gpus):
        raise InputError(f"write @distributed() with parentheses above {getattr(gpus, '__name__', gpus)!s}")
    for option, value in (("remote", remote), ("run_async", run_async)):
        if not isinstance(value, bool) and not (option == "remote" and value is None):
            raise InputError(f"{option} must be True or False; found {value!r}")
    options = plan.check_options(
        gpus=_count(gpus, num_accelerators),
        on="local",
        name=name,
        checkpoints=checkpoints,
        restarts=restarts,
        timeout_seconds=_seconds(timeout),
        env=env,
    )
    registry.find(options.on)
    _tell_ignored(gpu_type=gpu_type, accelerator_type=accelerator_type, remote=remote)

    def decorate(function: Callable[..., Any]) -> CompatFunction:
        return CompatFunction(function, options, run_async=run_async)

    return decorate


def _count(gpus: int | None, num_accelerators: int | None) -> int | None:
    if gpus is None or num_accelerators is None:
        return gpus if num_accelerators is None else num_accelerators
    if gpus != num_accelerators:
        raise InputError(
            f"gpus={gpus!r} and num_accelerators={num_accelerators!r} are two names of one number; give one of them"
        )
    return gpus


def _seconds(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise InputError(f"timeout must be a number of seconds above 0, a timedelta, or None; found {timeout!r}")
    return float(timeout)


def _tell_ignored(*, gpu_type: object, accelerator_type: object, remote: bool | None) -> None:
    """One warning for all that was accepted and has no meaning."""
    for option, value in (("gpu_type", gpu_type), ("accelerator_type", accelerator_type)):
        if value is not None and not (isinstance(value, str) and value):
            raise InputError(f'{option} must be a text as "H100", or None; found {value!r} ({type(value).__name__})')
    given = [
        f"{option}={str(value)!r}"
        for option, value in (("gpu_type", gpu_type), ("accelerator_type", accelerator_type))
        if value is not None
    ]
    if remote:
        given.append("remote=True")
    if given:
        warnings.warn(f"{', '.join(given)} has no effect: {_NO_GPU_OF_THAT_KIND}", UserWarning, stacklevel=3)


__all__ = ["CompatFunction", "distributed"]
