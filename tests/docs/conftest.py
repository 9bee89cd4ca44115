"""The documentation, taken apart."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = tuple(sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]))
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.{9,}) -->\s*\Z")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; `line` is that of its first line of text, `reason` why it is not run."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        excuse = _NOT_RUN.search(text[: match.start()])
        found.append(
            Block(
                page=page,
                line=text[: match.start("text")].count("\n") + 1,
                language=match["language"],
                text=match["text"],
                reason=excuse["reason"] if excuse else None,
            )
        )
    return found


@pytest.fixture(scope="session")
def pages() -> dict[str, str]:
    """Text by path relative to the checkout."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}


@pytest.fixture(scope="session")
def blocks(pages: dict[str, str]) -> list[Block]:
    return [block for page, text in pages.items() for block in blocks_of(page, text)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
