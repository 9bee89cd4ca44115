"""Shell patterns over relative paths, the same on every Python version and every store. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from sgpu.contract.errors import InputError


def matcher(pattern: str) -> Callable[[str], object]:
    """Tells whether a path fits; most ask for all files, and there may be millions."""
    fits = compile_pattern(pattern).fullmatch
    return fits if pattern != "**/*" else lambda path: "//" not in path and not path.startswith("/")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """`**/` any folders or none, `*` and `?` within one name, `[abc]`, `[!abc]`, and `{jpg,png}`."""
    if not isinstance(pattern, str) or not pattern or pattern.startswith("/"):
        raise InputError(f'pattern must be relative to the volume, as "**/*.jpg"; found {pattern!r}')
    try:
        return re.compile(_translate(pattern), re.DOTALL)
    except re.error as problem:
        raise InputError(f"pattern {pattern!r} cannot be read: {problem}") from problem


def _translate(pattern: str) -> str:
    out, at, depth = [], 0, 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            out.append("(?:[^/]+/)*")
            at += 3
        elif rest == "**":
            out.append(".*")
            at += 2
        elif rest[0] == "[" and "]" in rest[2:]:
            end = rest.index("]", 2)
            inside = rest[1:end].replace("\\", "\\\\")
            out.append("[^/" + inside[1:] + "]" if inside[0] in "!^" else "[" + inside + "]")
            at += end + 1
        else:
            text, depth = _one(rest[0], depth)
            out.append(text)
            at += 1
    return "".join(out)


def _one(character: str, depth: int) -> tuple[str, int]:
    if character == "*":
        return "[^/]*", depth
    if character == "?":
        return "[^/]", depth
    if character == "{":
        return "(?:", depth + 1
    if character == "}" and depth:
        return ")", depth - 1
    if character == "," and depth:
        return "|", depth
    return re.escape(character), depth
