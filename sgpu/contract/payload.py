"""Function and arguments as bytes, and back, in another interpreter.

What the notebook defines travels by value, with the source of its cells, so that a remote traceback shows the lines.
What a local module defines travels by name: the modules' files go along beside it (see launch/code.py).
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from sgpu.contract import captured
from sgpu.contract.errors import PayloadError

_SOURCES_LIMIT_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a worker calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Code keeps the name of its file (cloudpickle drops it), so that a remote traceback finds the cell's lines."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            build, arguments = self.dispatch_table[types.CodeType](value)
            return _code, (value.co_filename, build, arguments)
        return super().reducer_override(value)


def _code(filename: str, build: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return build(*arguments).replace(co_filename=filename)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, limit_bytes: int) -> bytes:
    """The bytes of a call.

    Raises:
        PayloadError: something cannot be pickled, or all of it is larger than `limit_bytes`; names the variable.
    """
    call = {"function": function, "args": args, "kwargs": dict(kwargs), "sources": _cell_sources()}
    try:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(call)
        content = buffer.getvalue()
    except Exception as error:
        raise _unpicklable(function, args, kwargs, error) from error
    if len(content) > limit_bytes:
        raise _too_large(function, args, kwargs, len(content), limit_bytes)
    return content


def unpack(content: bytes) -> Call:
    """The call, anew: each unpacking gives objects of its own."""
    call = pickle.load(io.BytesIO(content))
    for filename, text in call["sources"].items():
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    return Call(function=call["function"], args=call["args"], kwargs=call["kwargs"])


def _cell_sources() -> dict[str, str]:
    """Sources that exist in this process only (notebook cells), the newest first up to a limit."""
    found: dict[str, str] = {}
    total = 0
    for filename, entry in reversed(linecache.cache.copy().items()):
        if len(entry) != 4 or os.path.exists(filename):
            continue
        text = "".join(entry[2])
        total += len(text)
        if total > _SOURCES_LIMIT_BYTES:
            break
        found[filename] = text
    return found


def _unpicklable(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException) -> PayloadError:
    part = captured.unpicklable(captured.of_call(function, args, kwargs))
    if part is None:
        name = captured.name_of(function)
        return PayloadError(f"{name}() cannot be sent to the workers: {error}", variable=name)
    return PayloadError(
        f"{part.where} is a {type(part.value).__name__} and cannot be sent to the workers ({error}). "
        "Make it inside the function, or pass what it is made from.",
        variable=part.where,
    )


def _too_large(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], total_bytes: int, limit_bytes: int
) -> PayloadError:
    found = captured.largest(captured.of_call(function, args, kwargs))
    size_bytes, where = (found[0], found[1].where) if found else (total_bytes, captured.name_of(function))
    return PayloadError(
        f"{where} is {_megabytes(size_bytes)}; the function and all that it captures may be "
        f"{_megabytes(limit_bytes)} (all of it: {_megabytes(total_bytes)}). Save it to a file or volume and load it "
        "inside the function, or raise SGPU_MAX_PAYLOAD_BYTES.",
        variable=where,
        size_bytes=size_bytes,
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e6:.2g} MB"


class InWorker:
    """What a decorated function is inside a worker: the plain function; launching from there is refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = captured.name_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    local = __call__

    def distributed(self, *_args: Any, **_kwargs: Any) -> Any:
        raise PayloadError(
            f"{self.__name__}.distributed() was called inside a worker; runs are started from the notebook. "
            f"Call {self.__name__}(...) to run it here."
        )

    submit = plan = distributed
