"""`@distributed`: a function that runs on many workers."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import pathlib
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sgpu import settings, widgets
from sgpu.contract import payload
from sgpu.contract.errors import CheckpointError, InputError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.contract.spec import RunSpec, Tracking, new_run_id
from sgpu.launch import code, plan, registry
from sgpu.run import Run

if TYPE_CHECKING:
    from sgpu.testing.drill import DrillReport
    from sgpu.testing.plan import FaultPlan

_PARAMETER_CHARACTERS = 250


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a call would start; `print(plan)` tells it in words."""

    spec: RunSpec
    run_folder: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    payload_bytes: int

    def __str__(self) -> str:
        where = "GPU" if self.spec.accelerator == "cuda" else "CPU"
        spread = f" on {self.spec.nodes} nodes" if self.spec.nodes > 1 else ""
        lines = [
            f"{self.spec.world_size} {where} worker(s){spread} on {self.spec.backend}, by: {' '.join(self.command)}",
            f"run folder: {self.run_folder}",
            f"checkpoints: {self.spec.checkpoints.root or self.run_folder + '/checkpoints'}",
            f"function and arguments: {self.payload_bytes:,} bytes",
            f"restarts: up to {self.spec.restarts.max_restarts} without a new checkpoint in between",
            f"MLflow: {self.spec.tracking.uri}, experiment {self.spec.tracking.experiment!r}",
            *(f"environment: {key}={value}" for key, value in sorted(self.environment.items())),
        ]
        return "\n".join(lines)


class DistributedFunction:
    """A function under `@distributed`. Calling it plainly runs it here, with world size 1."""

    def __init__(self, function: Callable[..., Any], options: plan.Options) -> None:
        self._function = plan.check_function(function)
        self._options = options
        functools.update_wrapper(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        # Inside a worker the name means the plain function; the launcher does not travel.
        return payload.InWorker, (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in this process with world size 1: for a debugger."""
        return self._function(*args, **kwargs)

    def distributed(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs on every worker and waits, with a live view.

        Returns:
            One result a rank, in rank order.

        Raises:
            InputError: something was refused before anything started.
            and what `Run.result` raises.
        """
        run = self._start(args, kwargs)
        view = widgets.show(RunDir(runs_folder(settings.home()) / run.id), run.cancel)
        try:
            run.wait(each_turn=view.refresh)
        except BaseException:  # an interrupt, or a broken view: no run is left behind a cell that ended
            run.cancel()
            raise
        finally:
            view.finish()
        return run.result()

    def submit(self, *args: Any, **kwargs: Any) -> Run:
        """Starts the same and comes back at once. The run outlives this process."""
        return self._start(args, kwargs)

    def drill(self, plan: FaultPlan, /, *args: Any, **kwargs: Any) -> DrillReport:
        """Runs the same with faults on purpose, and waits: what was lost, and how long it took.

        Args:
            plan: of `sgpu.testing`; the arguments of the call follow.
        """
        from sgpu.testing.drill import fire

        return fire(self, plan, args, kwargs)

    def with_env(self, env: Mapping[str, str]) -> DistributedFunction:
        """The same function, whose workers get these environment variables too."""
        return DistributedFunction(self._function, replace(self._options, env={**self._options.env, **env}))

    def plan(self, *args: Any, **kwargs: Any) -> LaunchPlan:
        """What a call would start, where, with which environment; starts nothing and writes nothing."""
        backend = registry.find(self._options.on)
        spec = self._spec(args, kwargs)
        content = self._payload(args, kwargs)
        run = RunDir(runs_folder(settings.home()) / spec.id)
        return LaunchPlan(
            spec=spec, run_folder=str(run.root), command=tuple(backend.command(spec, run)),
            environment=spec.environment, payload_bytes=len(content),
        )  # fmt: skip

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return payload.pack(self._function, args, kwargs, limit_bytes=settings.max_payload_bytes())

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        if settings.run_dir() is not None:
            raise InputError(f"{self._name}.distributed() was called inside a worker; start runs from the notebook")
        backend = registry.find(self._options.on)
        spec = self._spec(args, kwargs)
        content = self._payload(args, kwargs)
        if spec.checkpoints.root is not None:
            _check_writable(spec.checkpoints.root)
        run = RunDir(runs_folder(settings.home()) / spec.id)
        _write(run, spec, content)
        if spec.accelerator == "cpu":
            print(f"sgpu: no GPU here; {spec.world_size} worker(s) on the CPU with gloo (run {spec.id})", flush=True)
        try:
            failpoint("run.submit")
            backend.start(spec, run)
        except BaseException:  # an interrupt in the middle: whatever has started already ends at once
            run.cancel.touch(mode=0o600)
            raise
        return Run(run)

    @property
    def _name(self) -> str:
        return self._options.name or str(getattr(self._function, "__name__", type(self._function).__name__))

    def _spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunSpec:
        """Checks the call and freezes it."""
        plan.check_arguments(self._function, args, kwargs)
        settings.check_agents()
        backend = registry.find(self._options.on)
        machine = backend.machine()
        world = plan.world_size(self._options.gpus, machine, self._options.restarts.min_gpus)
        working_dir = settings.working_dir()
        return RunSpec(
            id=new_run_id(self._name), name=self._name, created=time.time(), backend=backend.name,
            world_size=world, gpus_per_node=world // machine.nodes, accelerator="cuda" if machine.gpus else "cpu",
            seed=secrets.randbits(31), tracking=_tracking(working_dir), python=sys.executable, working_dir=working_dir,
            sys_path=tuple(dict.fromkeys(path or working_dir for path in sys.path)),
            environment=self._options.env, checkpoints=self._options.checkpoints, restarts=self._options.restarts,
            timeout_seconds=self._options.timeout_seconds, launcher=vars(this_process()),
            on_launcher_exit=settings.on_kernel_exit(), parameters=_parameters(self._function, args, kwargs),
            spares=machine.spares,
            tags=_tags(working_dir),
        )  # fmt: skip


def distributed(
    gpus: int | None = None,
    *,
    on: Any = "local",
    name: str | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointPolicy | None = None,
    restarts: int | RestartPolicy | None = None,
    timeout_seconds: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], DistributedFunction]:
    """Decorates a function so that `.distributed(...)` runs it on many workers.

    Args:
        gpus: how many; None: every visible one. Where the machine has no GPU, so many workers run on the CPU.
        on: a back-end's name or object.
        name: of the runs; None: the function's.
        checkpoints: a folder, a URL or a `CheckpointPolicy`; None: in the run's own folder.
        restarts: a number or a `RestartPolicy`.
        timeout_seconds: the run is ended after so long; None: no limit.
        env: environment variables of the workers.

    Raises:
        InputError: an argument, or the kind of function, is not supported; says what to write.
    """
    if callable(gpus):
        raise InputError(f"write @distributed() with parentheses above {getattr(gpus, '__name__', gpus)!s}")
    options = plan.check_options(
        gpus=gpus,
        on=on,
        name=name,
        checkpoints=checkpoints,
        restarts=restarts,
        timeout_seconds=timeout_seconds,
        env=env,
    )
    registry.find(on)

    def decorate(function: Callable[..., Any]) -> DistributedFunction:
        return DistributedFunction(function, options)

    return decorate


def _write(run: RunDir, spec: RunSpec, content: bytes) -> None:
    try:
        run.create()
        run.payload.write_bytes(content)
        run.payload.chmod(0o600)
        code.snapshot(run.code)
        spec.write(run)
    except OSError as error:
        shutil.rmtree(run.root, ignore_errors=True)
        raise InputError(
            f"the run's folder cannot be written to {run.root}: {type(error).__name__}: {error}. Free some space, or "
            "set SGPU_HOME to a folder that this user may write to",
            path=str(run.root),
        ) from error


def _check_writable(root: str) -> None:
    from sgpu.checkpoint.stores.opening import check_writable
    from sgpu.checkpoint.writing.ownership import check_free

    try:
        check_writable(root)
        check_free(root)
    except CheckpointError as error:
        raise InputError(f"checkpoints={root!r}: {error}", path=root) from error


def _tracking(working_dir: str) -> Tracking:
    from sgpu.metrics.mlflow_reader import choose_tracking

    return choose_tracking(settings.home(), pathlib.Path(working_dir))


def _parameters(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """The call's arguments as short texts, defaults included."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return {name: _short(value) for name, value in bound.arguments.items()}


def _short(value: Any) -> str:
    if isinstance(value, (str, int, float, bool, type(None))):
        return str(value)[:_PARAMETER_CHARACTERS]
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__}{tuple(shape)}"
    return repr(value)[:_PARAMETER_CHARACTERS]


def _tags(working_dir: str) -> dict[str, str]:
    tags = {"sgpu.python": platform.python_version()}
    for package in ("sgpu", "torch", "numpy", "mlflow"):
        try:
            tags[f"sgpu.{package}" if package != "sgpu" else "sgpu.version"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        done = subprocess.run(
            ["git", "-C", working_dir, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return tags
    if done.returncode == 0:
        tags["mlflow.source.git.commit"] = done.stdout.strip()
    return tags
