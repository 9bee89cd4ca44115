"""Credentials that are renewed while a run lasts: who gives them, and how a refusal is told from other failures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from sgpu.contract.errors import InputError

Provider = Callable[[], dict[str, Any]]
_REFUSALS = re.compile(
    r"ExpiredToken|TokenExpired|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|NoCredential|"
    r"AuthenticationFailed|InvalidAuthentication|Unauthorized|Unauthenticated|Forbidden|RequestTimeTooSkewed|"
    r"token (has|is) expired|RefreshError|refreshing credentials|status=40[13]\b|\b40[13]\b",
    re.IGNORECASE,
)


def name_of(provider: Provider | str | None) -> str | None:
    """The provider as "module:function", which every process of the node can import.

    Raises:
        InputError: it is not importable by name.
    """
    if provider is None:
        return None
    name = provider if isinstance(provider, str) else f"{provider.__module__}:{getattr(provider, '__qualname__', '?')}"
    if name.startswith("__main__") or "<" in name or not callable(provider_of(name)):
        raise InputError(
            "credentials must be a function of a module (or its name, as 'my_project.keys:fresh'), since the processes "
            f"that fetch files call it too; found {name}. Put it into a .py file."
        )
    return name


def provider_of(name: str) -> Provider:
    """The function behind "module:function".

    Raises:
        InputError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as problem:
        raise InputError(
            f"credentials={name!r} cannot be imported: {problem}. Expected a function of a module, or its name, as "
            "'my_project.keys:fresh'."
        ) from problem
    provider: Provider = found
    return provider


def is_refused(problem: BaseException) -> bool:
    """Whether a store did not accept who asks: other credentials may help, and nothing else will."""
    if isinstance(problem, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return getattr(problem.__cause__, "status", None) in (401, 403)  # fsspec's client of HTTP finds nothing then
    if any(getattr(problem, name, None) in (401, 403) for name in ("status", "status_code", "code")):
        return True
    return isinstance(problem, PermissionError) or _REFUSALS.search(f"{type(problem).__name__} {problem}") is not None
