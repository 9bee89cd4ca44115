"""What holds for every file of the package."""

from __future__ import annotations

import ast
import re

import pytest

from sgpu import settings

LONGEST_LINES = 400


def test_files_stay_readable(sources: dict[str, str]) -> None:
    lines = {path: text.count("\n") for path, text in sources.items()}
    assert {path: count for path, count in lines.items() if count >= LONGEST_LINES} == {}
    assert sorted(lines.values())[len(lines) // 2] < 150


def test_files_are_python_3_10(sources: dict[str, str]) -> None:
    """The oldest Python that pyproject.toml promises; newer syntax does not pass."""
    for path, text in sources.items():
        ast.parse(text, path, feature_version=(3, 10))
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass\n", feature_version=(3, 10))


def test_the_environment_is_read_in_one_file(trees: dict[str, ast.Module]) -> None:
    readers = {
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {n.name for n in node.names} & {"environ", "getenv"}
        )
    }
    assert {place for place in readers if not place.startswith("sgpu/settings.py:")} == set()
    assert readers


def test_every_setting_that_is_read_is_in_the_list(trees: dict[str, ast.Module]) -> None:
    """The names in settings.py, the list NAMES and the table for readers say the same."""
    pattern = re.compile(r"(SGPU|SGC|MLFLOW|CUDA|TORCHELASTIC|MASTER|GROUP|LOCAL|WORLD)_[A-Z_]+|RANK|PYTHONPATH")
    tree = trees["sgpu/settings.py"]
    read = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str) and pattern.fullmatch(node.args[0].value)
    }  # fmt: skip
    assert read - set(settings.NAMES) == set()
    for name in settings.NAMES:
        if name.startswith("SGPU_") and name not in settings.WORKER_NAMES:  # the agent sets those
            assert f"| {name} |" in (settings.__doc__ or ""), f"{name} is not in the table of settings.py"


def test_nothing_is_left_to_do(sources: dict[str, str]) -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
    found = [
        f"{path}:{number}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_no_function_is_a_stub(trees: dict[str, ast.Module]) -> None:
    """Nothing but `pass`, `...` or NotImplementedError stands in a function that is no Protocol's."""
    found = []
    for path, tree in trees.items():
        protocols = {
            id(node)
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in owner.bases)
            for node in owner.body
        }
        found += [
            f"{path}:{node.lineno} {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and id(node) not in protocols and _is_stub(node)
        ]
    assert found == []


def _is_stub(function: ast.FunctionDef) -> bool:
    if any(
        "overload" in ast.unparse(decorator) or "abstract" in ast.unparse(decorator)
        for decorator in function.decorator_list
    ):
        return False
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...)
        or (isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc))
        for node in _without_docstring(function.body)
    ) and bool(_without_docstring(function.body))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def test_no_broad_except_is_silent(trees: dict[str, ast.Module]) -> None:
    """`except Exception: pass` swallows a failure; ruff's BLE001 guards the rest."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body):
                caught = ast.unparse(node.type) if node.type else "everything"
                if caught in ("everything", "Exception", "BaseException"):
                    found.append(f"{path}:{node.lineno} except {caught}: pass")
    assert found == []
