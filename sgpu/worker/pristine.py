"""What a process was before the user's call: brought back after it, or told to be gone.

A call that is made again in the same process must find what the first one found. What is put back: environment,
folder, import path, arguments, signal handlers, warning filters, torch's global hooks, settings (see knobs.py), and
modules and classes of the user's own, which are made anew. What cannot be put back is looked for; where it is found, a
fresh process is needed.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from sgpu import settings
from sgpu.contract import installed
from sgpu.worker.knobs import Knobs

_THREADS_SECONDS = 0.5
_HARMLESS_THREADS = frozenset({"TMonitor"})  # tqdm's: one a process, it holds nothing
_OWN_THREADS = "sgpu-"  # they end by themselves, with what they have in hand
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_NATIVE = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LEFT_GPU_BYTES = 256 * 2**20

# What programs replace to change how others train or draw.
_WATCHED = (
    "builtins", "random", "numpy.random", "torch", "torch.nn.functional", "torch.nn.init", "torch.distributed",
    "torch.utils.data",
)  # fmt: skip
_WATCHED_CLASSES = ("torch.nn", "torch.optim", "torch.optim.lr_scheduler", "torch.nn.parallel", "torch.utils.data")
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
        self._modules, self._installed = frozenset(sys.modules), installed.folders()
        self._knobs = Knobs()
        self._stuck: str | None = None

    def restore(self, code: pathlib.Path) -> None:
        """Puts back what can be. `code`: the folder of the run's local modules."""
        self._stuck = self._knobs.put_back()
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
        self._forget_modules(code)
        _forget_classes()

    def _forget_modules(self, code: pathlib.Path) -> None:
        """The user's own, also such as did not travel with the run: found in the working folder, or too large.

        Native ones are imported once a process, as installed ones are.
        """
        new = {name: file for name, file in _files() if name not in self._modules}
        native = {name.partition(".")[0] for name, file in new.items() if file.endswith(_NATIVE)}
        for name, file in _files():
            travelled = file.startswith(f"{code}{os.sep}")
            if travelled or (name in new and name.partition(".")[0] not in native and not self._is_installed(file)):
                del sys.modules[name]

    def _is_installed(self, file: str) -> bool:
        place = pathlib.Path(file).resolve()
        return not _PACKAGES.isdisjoint(place.parts) or any(place.is_relative_to(each) for each in self._installed)

    def lost(self) -> str | None:
        """Why this process is not what it was, and cannot be; None: it is. To be asked after `restore`."""
        return self._stuck or self._replaced() or self._running() or _gpu_memory()

    def _replaced(self) -> str | None:
        for name, space in _spaces():
            before = self._attributes.get(name, {})
            for key, value in before.items():
                now = space.get(key)
                if now is not value and not _is_torchs(now):
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


def _files() -> list[tuple[str, str]]:
    """Of all modules that have one."""
    files = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.copy().items()]
    return [(name, file) for name, file in files if isinstance(file, str) and os.path.isabs(file)]


def _forget_classes() -> None:
    """Those of the notebook, which cloudpickle would give again as the first call left them."""
    module: Any = sys.modules.get("cloudpickle.cloudpickle")
    for name in ("_DYNAMIC_CLASS_TRACKER_BY_ID", "_DYNAMIC_CLASS_TRACKER_BY_CLASS"):
        getattr(module, name, {}).clear()


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


def _gpu_memory() -> str | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    if left > _LEFT_GPU_BYTES:
        return f"{left / 1e6:,.0f} MB of GPU memory are still held by what the call left"
    return None
