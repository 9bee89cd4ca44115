"""The user's local modules go along as files, as they are at the call."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sgpu.launch import code


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder on sys.path whose modules are forgotten afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _snapshot(tmp_path: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    target = tmp_path / "code"
    target.mkdir(exist_ok=True)
    return target, code.snapshot(target)


def _ask(target: pathlib.Path, expression: str, imports: str) -> str:
    """What `expression` is in another interpreter that has the snapshot alone."""
    script = f"import sys; sys.path.insert(0, {str(target)!r}); import {imports}; print({expression})"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    return done.stdout.strip()


def test_an_edited_module_is_the_one_that_goes(project: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (project / "sgputest_helpers.py").write_text("VALUE = 'old'\n")
    importlib.import_module("sgputest_helpers")
    (project / "sgputest_helpers.py").write_text("VALUE = 'edited'\n")
    target, _ = _snapshot(tmp_path)
    assert _ask(target, "sgputest_helpers.VALUE", "sgputest_helpers") == "edited"


def test_a_package_with_relative_imports_and_data(project: pathlib.Path, tmp_path: pathlib.Path) -> None:
    package = project / "sgputest_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import VALUE\n")
    (package / "inner" / "__init__.py").write_text("from ..other import VALUE\n")
    (package / "other.py").write_text("import pathlib\nVALUE = (pathlib.Path(__file__).parent / 'd.txt').read_text()\n")
    (package / "d.txt").write_text("from a data file")
    for skipped in ("__pycache__", ".git", ".venv"):
        (package / skipped).mkdir(exist_ok=True)
        (package / skipped / "x").write_text("x")
    (package / "gone").symlink_to(package / "nowhere")
    importlib.import_module("sgputest_package")
    target, left = _snapshot(tmp_path)
    assert "sgputest_package" not in left
    assert _ask(target, "sgputest_package.VALUE", "sgputest_package") == "from a data file"
    assert not {"__pycache__", ".git", ".venv"} & set(os.listdir(target / "sgputest_package")) - {"__pycache__"}
    assert not (target / "sgputest_package" / ".git").exists()


def test_a_package_without_init(project: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (project / "sgputest_namespace").mkdir()
    (project / "sgputest_namespace" / "part.py").write_text("VALUE = 'part'\n")
    importlib.import_module("sgputest_namespace.part")
    target, _ = _snapshot(tmp_path)
    assert _ask(target, "sgputest_namespace.part.VALUE", "sgputest_namespace.part") == "part"


def test_a_large_package_is_used_in_place(
    project: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = project / "sgputest_large"
    package.mkdir()
    (package / "__init__.py").write_text("")
    with (package / "weights.bin").open("wb") as file:
        file.truncate(21 * 2**20)
    importlib.import_module("sgputest_large")
    target, left = _snapshot(tmp_path)
    assert "sgputest_large" in left
    assert not (target / "sgputest_large").exists()
    (package / "weights.bin").unlink()
    monkeypatch.setattr(code, "_MOST_FILES", 3)
    for index in range(4):
        (package / f"m{index}.py").write_text("")
    assert "sgputest_large" in _snapshot(tmp_path)[1]


def test_a_module_whose_file_is_gone_is_passed_over(project: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (project / "sgputest_gone.py").write_text("")
    importlib.import_module("sgputest_gone")
    (project / "sgputest_gone.py").unlink()
    target, left = _snapshot(tmp_path)
    assert "sgputest_gone" not in left
    assert not (target / "sgputest_gone.py").exists()


def test_what_is_installed_does_not_go() -> None:
    local = code.local_modules(list(sys.modules.items()))
    assert not {"os", "json", "pytest", "_pytest", "numpy", "sgpu", "__main__", "cloudpickle"} & set(local)
