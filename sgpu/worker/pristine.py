"""What a process was before the user's call: brought back after it, or told to be gone.

A call that is made again in the same process must find what the first one found. What is put back: environment,
folder, import path, arguments, signal handlers, warning filters, torch's global hooks and settings, and the run's local
modules, which are imported anew. What cannot be put back is looked for; where it is found, a fresh process is needed.
"""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sgpu import settings

_THREADS_SECONDS = 0.5
_HARMLESS_THREADS = frozenset({"TMonitor"})  # tqdm's: one a process, it holds nothing
_OWN_THREADS = "sgpu-"  # they end by themselves, with what they have in hand
_LEFT_GPU_BYTES = 256 * 2**20

# What programs replace to change how others train or draw.
_WATCHED = (
    "builtins", "random", "numpy.random", "torch", "torch.nn.functional", "torch.nn.init", "torch.distributed",
    "torch.utils.data",
)  # fmt: skip
_WATCHED_CLASSES = ("torch.nn", "torch.optim", "torch.nn.parallel")
_REPLACEABLE = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, staticmethod, classmethod, property,
)  # fmt: skip
_HOOKED = ("torch.nn.modules.module", "torch.optim.optimizer")


class Pristine:
    """This process as it is when this is made."""

    def __init__(self) -> None:
        self._environment = settings.inherited()
        self._folder, self._path, self._arguments = os.getcwd(), list(sys.path), list(sys.argv)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._warnings = list(warnings.filters)
        self._log = logging.root.level, list(logging.root.handlers)
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._attributes = {name: dict(_callables(space)) for name, space in _spaces()}
        self._hooks = {(name, key): dict(hooks) for name, key, hooks in _hooks()}
        self._settings = [(put, value) for put, value in _torch_settings()]

    def restore(self, code: pathlib.Path) -> None:
        """Puts back what can be. `code`: the folder of the run's local modules."""
        settings.replace(self._environment)
        os.chdir(self._folder)
        sys.path[:], sys.argv[:] = self._path, self._arguments
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._warnings  # type: ignore[index]
        logging.root.setLevel(self._log[0])
        logging.root.handlers[:] = self._log[1]
        for name, key, hooks in _hooks():
            hooks.clear()
            hooks.update(self._hooks.get((name, key), {}))
        for put, value in self._settings:
            put(value)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(f"{code}{os.sep}"):
                del sys.modules[name]

    def lost(self) -> str | None:
        """Why this process is not what it was, and cannot be; None: it is. To be asked after `restore`."""
        return self._replaced() or self._running() or _gpu_memory()

    def _replaced(self) -> str | None:
        for name, space in _spaces():
            before = self._attributes.get(name, {})
            for key, value in _callables(space):
                if before.get(key, value) is not value and not _is_torchs(value):
                    return f"{name}.{key} was replaced"
        return None

    def _running(self) -> str | None:
        deadline = time.monotonic() + _THREADS_SECONDS
        for thread in threading.enumerate():
            harmless = type(thread).__name__ in _HARMLESS_THREADS or thread.name.startswith(_OWN_THREADS)
            if thread.ident not in self._threads and not harmless:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    return f"its thread {thread.name!r} still runs"
        return None


def _spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _WATCHED:
        if name in sys.modules:
            yield name, vars(sys.modules[name])
    for name in _WATCHED_CLASSES:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
            if isinstance(value, type):
                yield f"{name}.{key}", vars(value)
    if "torch" in sys.modules:
        yield "torch.Tensor", vars(sys.modules["torch"].Tensor)


def _callables(space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # By its type: some answer a look at their attributes with a warning.
    return ((key, value) for key, value in list(space.items()) if issubclass(type(value), _REPLACEABLE))


def _is_torchs(value: Any) -> bool:
    """torch replaces some of its own: a step once it is profiled, a function once its compiler is loaded."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(
        os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    )


def _hooks() -> Iterator[tuple[str, str, dict[Any, Any]]]:
    for name in _HOOKED:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
            if key.startswith("_global_") and isinstance(value, dict):
                yield name, key, value


def _torch_settings() -> Iterator[tuple[Callable[[Any], Any], Any]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    yield torch.set_default_dtype, torch.get_default_dtype()
    yield torch.set_default_device, None
    yield torch.set_num_threads, torch.get_num_threads()
    yield torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    yield torch.set_grad_enabled, torch.is_grad_enabled()
    yield torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()
    yield torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32", "enabled"):
        yield _setter(cudnn, name), getattr(cudnn, name)


def _setter(holder: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(holder, name, value)


def _gpu_memory() -> str | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    if left > _LEFT_GPU_BYTES:
        return f"{left / 1e6:,.0f} MB of GPU memory are still held by what the call left"
    return None
