"""From what the user wrote and what the machine has to a RunSpec, or a refusal by name. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgpu import settings
from sgpu.contract.errors import InputError
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy

MOST_CPU_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """What stands in the decorator."""

    gpus: int | None
    on: Any
    name: str | None
    checkpoints: CheckpointPolicy
    restarts: RestartPolicy
    timeout_seconds: float | None
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a back-end has: GPUs in all (0: workers run on the CPU), on how many nodes, and nodes in reserve."""

    gpus: int
    nodes: int = 1
    spares: int = 0


def check_function(function: object) -> Callable[..., Any]:
    """What may be decorated: plain functions, lambdas, callable objects and partials.

    Raises:
        InputError: for the others, with what to write instead.
    """
    if isinstance(function, (staticmethod, classmethod, property)):
        raise InputError(
            f"@distributed on a {type(function).__name__}: decorate a plain function; call it with the class or the "
            "object as an argument"
        )
    if inspect.isclass(function):
        raise InputError(f"@distributed on the class {function.__qualname__}: decorate a function that makes one")
    if not callable(function):
        raise InputError(f"@distributed needs a function; found {function!r} ({type(function).__name__})")
    if hasattr(function, "submit") and hasattr(function, "distributed"):
        raise InputError(f"@distributed twice on {_name(function)}(): once is enough")
    kinds = (function, getattr(type(function), "__call__", None))  # noqa: B004 - an object's call counts as itself
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in kinds):
        raise InputError(
            f"@distributed on the async function {_name(function)}(): workers call plain functions; "
            "write def, and asyncio.run(...) inside it"
        )
    if any(inspect.isgeneratorfunction(each) for each in kinds):
        raise InputError(
            f"@distributed on the generator {_name(function)}(): a worker returns one value; "
            "return a list, or log with loop.log(...) while it runs"
        )
    if type(function).__name__ == "builtin_function_or_method":
        raise InputError(f"@distributed on the built-in {_name(function)}: wrap it in a function of yours")
    parameters, owner = _parameters(function), _name(function).rpartition(".")[0]
    if parameters and parameters[0] in ("self", "cls") and owner and not owner.endswith("<locals>"):
        raise InputError(
            f"@distributed on the method {_name(function)}(): decorate a plain function and pass it the object"
        )
    return function


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Arguments that the function would refuse are refused here, not on eight workers."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{_name(function)}{_plain(signature)} cannot be called so: {error}") from None


def _plain(signature: inspect.Signature) -> str:
    """Names and defaults, without annotations."""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


def check_gpus(gpus: object) -> int | None:
    """A whole number of 1 or more, or None for every GPU there is."""
    if gpus is None:
        return None
    if isinstance(gpus, bool) or not isinstance(gpus, int):
        raise InputError(
            f"gpus must be a whole number (1, 2, ...) or None for every GPU; found {gpus!r} ({type(gpus).__name__})"
        )
    if gpus < 1:
        raise InputError(f"gpus must be 1 or more, or None for every GPU; found {gpus}")
    return gpus


def check_options(
    *,
    gpus: object,
    on: object,
    name: object,
    checkpoints: object,
    restarts: object,
    timeout_seconds: object,
    env: object,
) -> Options:
    """The decorator's arguments, each checked."""
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise InputError(f"name must be a text, or None for the function's own; found {name!r}")
    if timeout_seconds is not None and (
        isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0
    ):
        raise InputError(f"timeout_seconds must be a number above 0, or None; found {timeout_seconds!r}")
    return Options(
        gpus=check_gpus(gpus),
        on=on,
        name=name,
        checkpoints=_checkpoints(checkpoints),
        restarts=_restarts(restarts),
        timeout_seconds=float(timeout_seconds) if timeout_seconds is not None else None,
        env=_variables(env),
    )


def _variables(env: object) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InputError(f"env must be a mapping of text to text; found {env!r}")
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(
                f"env must map text to text; found {key!r}: {value!r} (write {str(key)!r}: {str(value)!r})"
            )
        if not key or "=" in key or "\0" in key + value:
            raise InputError(f"env: {key!r}: {value!r} cannot be an environment variable; expected NAME: value")
        if key in settings.WORKER_NAMES:
            raise InputError(f"env: {key!r} is set by the agent, for each worker; remove it")
    return dict(env)


def _checkpoints(value: object) -> CheckpointPolicy:
    if value is None:
        return CheckpointPolicy()
    if isinstance(value, CheckpointPolicy):
        return replace(value, root=str(value.root) if value.root is not None else None)
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return CheckpointPolicy(root=str(value))
    raise InputError(f"checkpoints must be a path, a URL or a CheckpointPolicy; found {value!r}")


def _restarts(value: object) -> RestartPolicy:
    if value is None:
        return RestartPolicy()
    if isinstance(value, RestartPolicy):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return RestartPolicy(max_restarts=value)
    raise InputError(f"restarts must be a whole number or a RestartPolicy; found {value!r}")


def world_size(gpus: int | None, machine: Machine, fewest: int | None = None) -> int:
    """How many workers start, over all nodes.

    Args:
        fewest: the policy's `min_gpus`.

    Raises:
        InputError: more were asked for than there can be, they cannot be dealt out evenly, or are below `fewest`.
    """
    count = _worker_count(gpus, machine)
    if count % machine.nodes:
        below = count - count % machine.nodes
        raise InputError(
            f"{count} workers on {machine.nodes} nodes: each node gets as many as the others; ask for "
            f"gpus={below + machine.nodes}" + (f" or gpus={below}" if below else "")
        )
    if fewest is not None and fewest > count:
        raise InputError(f"min_gpus={fewest} is more than the run has: {count}; it is what a run may shrink to")
    return count


def _worker_count(gpus: int | None, machine: Machine) -> int:
    if machine.gpus == 0:
        if gpus is not None and gpus > MOST_CPU_WORKERS:
            raise InputError(
                f"gpus={gpus}, but this machine has no GPU; on the CPU at most {MOST_CPU_WORKERS} workers are started"
            )
        return gpus or machine.nodes
    if gpus is not None and gpus > machine.gpus:
        raise InputError(
            f"gpus={gpus}, but there are {machine.gpus} (CUDA_VISIBLE_DEVICES counted); "
            f"ask for {machine.gpus} or fewer, or gpus=None for all"
        )
    return gpus or machine.gpus


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
