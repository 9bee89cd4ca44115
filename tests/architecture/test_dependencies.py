"""What the package imports is declared in pyproject.toml, by itself or through what is named here."""

from __future__ import annotations

import ast
import pathlib
import re
import sys

import pytest

PACKAGE_OF = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "pynvml": "nvidia-ml-py",
    "huggingface_hub": "huggingface-hub",
}
COMES_WITH = {
    "IPython": "ipykernel", "comm": "ipywidgets", "traitlets": "ipywidgets", "requests": "mlflow",
    "sqlalchemy": "mlflow", "safetensors": None,  # told to the user when an export asks for it
}  # fmt: skip


def imported(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Top-level name -> a place that imports it."""
    found = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
                names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
            found.update({name.partition(".")[0]: f"{path}:{getattr(node, 'lineno', 0)}" for name in names})
    return {name: place for name, place in found.items() if name not in {*sys.stdlib_module_names, "sgpu"}}


def declared(root: pathlib.Path) -> set[str]:
    text = (root / "pyproject.toml").read_text()
    parts = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    return {name.lower() for name in re.findall(r'"([A-Za-z0-9_.\-]+)(?:\[[^"]*\])?(?:[<>=!~][^"]*)?"', parts)}


def test_every_import_is_declared(root: pathlib.Path, trees: dict[str, ast.Module]) -> None:
    known = declared(root)
    assert {"torch", "mlflow", "anywidget"} <= known
    undeclared = {
        name: place
        for name, place in imported(trees).items()
        if name not in COMES_WITH and PACKAGE_OF.get(name, name).lower() not in known
    }
    assert undeclared == {}
    assert {parent for parent in COMES_WITH.values() if parent is not None} <= known


@pytest.mark.parametrize("part", ["launch", "agent", "worker", "training", "data", "checkpoint", "contract"])
def test_the_core_needs_no_extra(root: pathlib.Path, trees: dict[str, ast.Module], part: str) -> None:
    """These parts import what `pip install sgpu` brings, and nothing that an extra brings."""
    ours = {path: tree for path, tree in trees.items() if path.startswith(f"sgpu/{part}/")}
    assert ours
    text = (root / "pyproject.toml").read_text()
    core = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")].lower()
    missing = {name for name in imported(ours) if f'"{PACKAGE_OF.get(name, name).lower()}' not in core}
    assert missing - {"safetensors", "obstore", "huggingface_hub"} == set(), "these are done without, or loaded already"
