"""The source as files and trees, and fresh interpreters."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    """Text by path, relative to the checkout, of every Python file of the package."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "sgpu").rglob("*.py"))}


@pytest.fixture(scope="session")
def trees(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(text, path) for path, text in sources.items()}


@pytest.fixture
def fresh() -> Callable[..., Any]:
    """Runs a script in a fresh interpreter; what it prints last, as JSON."""

    def run(script: str, *options: str) -> Any:
        done = subprocess.run(
            [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
