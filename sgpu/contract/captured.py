"""What travels with a function, by its writer's own names: to say which of it cannot be sent, or is too large."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True, kw_only=True)
class Part:
    """A value and where it comes from, in words: "variable 'x' used by train()"."""

    where: str
    value: Any


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def size_bytes(value: Any) -> int | None:
    """Bytes when pickled; None where it cannot be."""
    try:
        return len(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception:  # noqa: BLE001 - user objects' reducers may raise anything
        return None


def of_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Part]:
    """What a call consists of: what the function captures, then its arguments."""
    parts = list(of_function(function))
    parts += [Part(where=f"argument {index}", value=value) for index, value in enumerate(args)]
    parts += [Part(where=f"argument {name!r}", value=value) for name, value in kwargs.items()]
    return parts


def of_function(function: Any) -> Iterator[Part]:
    """Globals that it mentions, closure cells, defaults; what a partial binds; attributes of a callable object."""
    if isinstance(function, functools.partial):
        yield from of_function(function.func)
        for index, value in enumerate(function.args):
            yield Part(where=f"argument {index} bound by the partial", value=value)
        for name, value in function.keywords.items():
            yield Part(where=f"argument {name!r} bound by the partial", value=value)
        return
    if isinstance(function, types.MethodType):
        yield from _of_object(function.__self__)
        function = function.__func__
    elif not isinstance(function, types.FunctionType):
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:  # a decorator's object
            yield from of_function(wrapped)
            return
        yield from _of_object(function)
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the class' own function is wanted
    if isinstance(function, types.FunctionType):
        yield from _of_plain(function)


def _of_object(owner: Any) -> Iterator[Part]:
    kind = type(owner).__qualname__.rpartition(".")[2]
    for name, value in getattr(owner, "__dict__", {}).items():
        yield Part(where=f"attribute {name!r} of the {kind}", value=value)


def _of_plain(function: types.FunctionType) -> Iterator[Part]:
    used_by = f"used by {name_of(function)}()"
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield Part(where=f"variable {name!r} {used_by}", value=function.__globals__[name])
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Part(where=f"variable {name!r} {used_by}", value=cell.cell_contents)
        except ValueError:
            continue  # a cell that is not filled yet
    for parameter in _parameters(function):
        if parameter.default is not inspect.Parameter.empty:
            where = f"default value of {parameter.name!r} of {name_of(function)}()"
            yield Part(where=where, value=parameter.default)


def _parameters(function: types.FunctionType) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return []


def _names(code: types.CodeType) -> set[str]:
    """Global names that the code, and the functions inside it, mention."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def unpicklable(parts: list[Part]) -> Part | None:
    """The first part that cannot be pickled; of a function, what it captures rather than the function itself."""
    return _unpicklable(parts, set())


def _unpicklable(parts: list[Part], seen: set[int]) -> Part | None:
    for part in parts:
        if id(part.value) in seen or size_bytes(part.value) is not None:
            continue
        seen.add(id(part.value))
        deeper = _unpicklable(list(of_function(part.value)), seen) if _is_code(part.value) else None
        return deeper or part
    return None


def largest(parts: list[Part]) -> tuple[int, Part] | None:
    """The largest part and its bytes; of a function, what it captures rather than the function itself."""
    sizes = [(size_bytes(part.value) or 0, part) for part in _leaves(parts, set())]
    return max(sizes, key=lambda sized: sized[0], default=None)


def _leaves(parts: list[Part], seen: set[int]) -> Iterator[Part]:
    for part in parts:
        if id(part.value) in seen:
            continue
        seen.add(id(part.value))
        if _is_code(part.value):
            yield from _leaves(list(of_function(part.value)), seen)
        else:
            yield part


def _is_code(value: Any) -> bool:
    """Whether it is a function, or an object around one, that travels by value."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return True
    return isinstance(getattr(value, "__wrapped__", None), types.FunctionType)
