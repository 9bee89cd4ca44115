"""Settings of Python, the process, NumPy and torch that a call may change: put back after it, or told to be gone."""

from __future__ import annotations

import decimal
import functools
import gc
import locale
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_STACK)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting: `put` takes what `get` gave. Where it was not `asked`, it is put back in any case."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    asked: bool = True


class Knobs:
    """All settings as they are when this is made."""

    def __init__(self) -> None:
        self._before = [(knob, knob.get()) for knob in _knobs()]
        self._entered = _entered()

    def put_back(self) -> str | None:
        """Why this process is not what it was, where one cannot be put back; None: it is."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)  # its signal would find no handler any more, and end the process
        if "torch" in sys.modules:
            sys.modules["torch"].set_default_device(None)  # which is such a mode
        for name, depth in _entered().items():
            if depth != self._entered.get(name, 0):
                return f"{name} was entered and not left"
        for knob, value in self._before:
            try:
                if not knob.asked or _differs(knob.get(), value):
                    knob.put(value)
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                return f"{knob.name} cannot be put back: {error}"
        return None


def _differs(now: Any, value: Any) -> bool:
    return now is not value and bool(now != value)


def _knobs() -> Iterator[Knob]:
    yield from _of_python()
    yield from _of_the_process()
    if "numpy" in sys.modules:
        yield from _of_numpy(sys.modules["numpy"])
    if "torch" in sys.modules:
        yield from _of_torch(sys.modules["torch"])


def _attribute(holder: Any, name: str) -> Knob:
    where = getattr(holder, "__name__", type(holder).__name__)
    return Knob(
        name=f"{where}.{name}", get=lambda: getattr(holder, name), put=lambda value: setattr(holder, name, value)
    )


def _entries(name: str, held: list[Any]) -> Knob:
    def put(entries: list[Any]) -> None:
        held[:] = entries

    return Knob(name=name, get=lambda: list(held), put=put)


def _of_python() -> Iterator[Knob]:
    for name in ("stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook"):
        yield _attribute(sys, name)
    yield _attribute(threading, "excepthook")
    yield _entries("sys.meta_path", sys.meta_path)
    yield _entries("sys.path_hooks", sys.path_hooks)
    yield Knob(name="sys.setprofile", get=sys.getprofile, put=sys.setprofile)
    yield Knob(name="sys.settrace", get=sys.gettrace, put=sys.settrace)
    yield Knob(name="the recursion limit", get=sys.getrecursionlimit, put=sys.setrecursionlimit)
    yield Knob(name="the switch interval", get=sys.getswitchinterval, put=sys.setswitchinterval)
    yield Knob(name="gc.enable", get=gc.isenabled, put=lambda on: gc.enable() if on else gc.disable())
    yield Knob(name="gc.set_threshold", get=gc.get_threshold, put=lambda counts: gc.set_threshold(*counts))
    yield _entries("gc.callbacks", gc.callbacks)
    for name in ("prec", "rounding", "Emin", "Emax", "traps", "flags"):
        yield _decimal(name)


def _decimal(name: str) -> Knob:
    def get() -> Any:
        value = getattr(decimal.getcontext(), name)
        return dict(value) if name in ("traps", "flags") else value

    return Knob(
        name=f"decimal's {name}", get=get, put=lambda value: setattr(decimal.getcontext(), name, value)
    )  # fmt: skip


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _limit(which: int) -> Knob:
    return Knob(
        name=f"resource limit {which}", get=lambda: resource.getrlimit(which),
        put=lambda value: resource.setrlimit(which, value),
    )  # fmt: skip


def _of_the_process() -> Iterator[Knob]:
    yield Knob(name="the umask", get=_umask, put=os.umask)
    yield from (_limit(which) for which in _LIMITS)
    yield Knob(name="the affinity", get=lambda: os.sched_getaffinity(0), put=lambda cpus: os.sched_setaffinity(0, cpus))
    yield Knob(
        name="the locale", get=lambda: locale.setlocale(locale.LC_ALL),
        put=lambda value: locale.setlocale(locale.LC_ALL, value),
    )  # fmt: skip
    yield Knob(name="sockets' time-out", get=socket.getdefaulttimeout, put=socket.setdefaulttimeout)
    yield Knob(
        name="multiprocessing's start method", get=lambda: multiprocessing.get_start_method(allow_none=True),
        put=lambda method: multiprocessing.set_start_method(method, force=True),
    )  # fmt: skip


def _of_numpy(numpy: Any) -> Iterator[Knob]:
    yield Knob(name="numpy.seterr", get=numpy.geterr, put=lambda what: numpy.seterr(**what))


def _of_torch(torch: Any) -> Iterator[Knob]:
    yield Knob(name="torch.set_default_dtype", get=torch.get_default_dtype, put=torch.set_default_dtype)
    yield Knob(name="torch.set_num_threads", get=torch.get_num_threads, put=torch.set_num_threads)
    yield Knob(name="torch.set_grad_enabled", get=torch.is_grad_enabled, put=torch.set_grad_enabled)
    yield Knob(
        name="torch.use_deterministic_algorithms", get=torch.get_deterministic_debug_mode,
        put=torch.set_deterministic_debug_mode,
    )  # fmt: skip
    yield Knob(
        name="torch.autograd.set_detect_anomaly", get=torch.is_anomaly_enabled, put=torch.autograd.set_detect_anomaly
    )
    yield Knob(name="torch.set_flush_denormal", get=lambda: _flushes(torch), put=torch.set_flush_denormal)
    yield Knob(
        name="torch's sharing strategy", get=torch.multiprocessing.get_sharing_strategy,
        put=torch.multiprocessing.set_sharing_strategy,
    )  # fmt: skip
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield _attribute(torch.backends.mkldnn, "enabled")
    for name in ("benchmark", "deterministic", "enabled"):
        yield _attribute(torch.backends.cudnn, name)
    yield from _precisions(torch)
    yield from _attention(torch.backends.cuda)
    yield from _autocast(torch)


def _flushes(torch: Any) -> bool:
    return float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) == 0.0


def _precisions(torch: Any) -> Iterator[Knob]:
    """Not asked: what was set in the newer of two ways refuses to be asked in the older one."""
    yield Knob(
        name="torch.set_float32_matmul_precision", get=torch.get_float32_matmul_precision,
        put=torch.set_float32_matmul_precision, asked=False,
    )  # fmt: skip
    yield replace(_attribute(torch.backends.cudnn, "allow_tf32"), asked=False)


def _attention(cuda: Any) -> Iterator[Knob]:
    for kind in ("flash", "math", "mem_efficient", "cudnn"):
        yield Knob(
            name=f"torch.backends.cuda.enable_{kind}_sdp", get=getattr(cuda, f"{kind}_sdp_enabled"),
            put=getattr(cuda, f"enable_{kind}_sdp"),
        )  # fmt: skip


def _autocast(torch: Any) -> Iterator[Knob]:
    for device in ("cpu", "cuda"):
        for what, get, put in (
            ("enabled", torch.is_autocast_enabled, torch.set_autocast_enabled),
            ("dtype", torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            name = f"torch.set_autocast_{what}({device!r})"
            yield Knob(name=name, get=functools.partial(get, device), put=functools.partial(put, device))
    yield Knob(
        name="torch.set_autocast_cache_enabled", get=torch.is_autocast_cache_enabled,
        put=torch.set_autocast_cache_enabled,
    )  # fmt: skip


def _entered() -> dict[str, int]:
    """How deep torch is in what is entered and left: an interrupt between the two leaves it on for good."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 does not tell
    return {
        "torch.autocast": nesting,
        "torch.inference_mode": int(torch.is_inference_mode_enabled()),
        "a torch function mode": torch._C._len_torch_function_stack(),
        "a torch dispatch mode": torch._C._len_torch_dispatch_stack(),
        "torch.autograd.graph.saved_tensors_hooks": int(top is not None and top(True) is not None),
    }
