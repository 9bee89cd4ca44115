"""Who imports whom: the layers, what a worker loads, what `import sgpu` costs."""

from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

FORBIDDEN_IN_WORKERS = ("IPython", "ipywidgets", "anywidget", "mlflow", "ray", "sgpu.widgets", "sgpu.launch")


def lint(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_layers_hold(root: pathlib.Path) -> None:
    told = lint(root)
    assert told.returncode == 0, told.stdout + told.stderr


VIOLATIONS = (
    # file, line added, what the linter must name
    ("contract/clock.py", "import sgpu.run", "sgpu.contract.clock -> sgpu.run"),
    ("data/ordering/order.py", "from sgpu.checkpoint import names", "sgpu.data.ordering.order -> sgpu.checkpoint"),
    ("data/caching/room.py", "import sgpu.data.fetching.lanes", "sgpu.data.caching.room -> sgpu.data.fetching.lanes"),
    ("metrics/derive.py", "import sgpu.training.rng", "sgpu.metrics.derive -> sgpu.training.rng"),
    ("agent/judging/policy.py", "import sgpu.worker.cpu", "sgpu.agent.judging.policy -> sgpu.worker.cpu"),
    ("launch/plan.py", "import sgpu.agent.judging.failure", "sgpu.launch.plan -> sgpu.agent.judging.failure"),
    ("training/meter.py", "import sgpu.decorator", "sgpu.training.meter -> sgpu.decorator"),
    ("training/rng.py", "import mlflow", "sgpu.training.rng -> mlflow"),
    ("metrics/spool.py", "import mlflow", "sgpu.metrics.spool -> mlflow"),
    ("agent/judging/failure.py", "import torch", "sgpu.agent.judging.failure -> torch"),
    ("run.py", "import IPython", "sgpu.run -> IPython"),
    ("widgets/reading/feed.py", "import sgpu.run", "sgpu.widgets.reading.feed -> sgpu.run"),
    ("cli/runs.py", "import sgpu.agent.judging.policy", "sgpu.cli.runs -> sgpu.agent.judging.policy"),
    ("worker/cpu.py", "from sgpu.metrics import mlflow_reader", "sgpu.worker.cpu -> sgpu.metrics.mlflow_reader"),
    (
        "checkpoint/format/names.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sgpu.training.loop",
        "sgpu.checkpoint.format.names -> sgpu.training.loop",
    ),
    ("goodput.py", "import sgpu", "sgpu.goodput -> sgpu"),
)


def test_the_linter_catches(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A copy with one forbidden import of each kind: the linter names every one."""
    shutil.copytree(root / "sgpu", tmp_path / "sgpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    for file, line, _ in VIOLATIONS:
        with (tmp_path / "sgpu" / file).open("a") as source:
            source.write(f"\n{line}\n")
    (tmp_path / "sgpu" / "homeless.py").write_text("")
    unplaced = lint(tmp_path)
    assert unplaced.returncode != 0
    assert "homeless" in unplaced.stdout + unplaced.stderr
    (tmp_path / "sgpu" / "homeless.py").unlink()
    told = lint(tmp_path)
    assert told.returncode == 1, told.stderr
    missed = [named for _, _, named in VIOLATIONS if named not in told.stdout]
    assert not missed, told.stdout


WORKER = ("sgpu.worker.bootstrap", "sgpu.training.loop", "sgpu.data", "sgpu.checkpoint")


def test_a_worker_loads_no_display_and_no_mlflow(fresh: Any) -> None:
    """All that its zygote warms up, and the loop, the data and the checkpoints with every public name used."""
    script = (
        "import importlib, json, sys\n"
        "from sgpu.worker import zygote\n"
        f"names = [*zygote._WARM, *{WORKER!r}]\n"
        "for name in names:\n"
        "    module = importlib.import_module(name)\n"
        "    if name.startswith('sgpu.'):\n"
        "        for public in getattr(module, '__all__', ()):\n"
        "            getattr(module, public)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    loaded = fresh(script)
    assert "sgpu.training.loop" in loaded
    assert "torch" in loaded
    assert [name for name in loaded if name in FORBIDDEN_IN_WORKERS] == []


def test_import_sgpu_loads_nothing_third_party(fresh: Any) -> None:
    """Names only. The count of modules stands for its cost, since time on a busy machine does not."""
    script = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "import sgpu\n"
        "print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.stdlib_module_names)]))\n"
    )
    loaded, standard = fresh(script)
    foreign = [name for name in loaded if name.partition(".")[0] not in {*standard, "sgpu"}]
    assert foreign == []
    assert [name for name in loaded if name.startswith("sgpu")] == ["sgpu"]
    assert len(loaded) < 40, loaded


def test_the_notebooks_side_loads_no_torch(fresh: Any) -> None:
    """Decorating, planning, listing runs: torch and mlflow are the workers' and the forwarder's."""
    loaded = fresh(
        "import json, sys, sgpu\n"
        "f = sgpu.distributed(gpus=2)(lambda: 1)\n"
        "f.plan()\n"
        "sgpu.runs()\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    assert [name for name in ("torch", "mlflow", "IPython", "anywidget") if name in loaded] == []


def test_the_agent_loads_no_torch(fresh: Any) -> None:
    loaded = fresh("import json, sys, sgpu.agent.__main__; print(json.dumps(sorted(sys.modules)))")
    assert [name for name in ("torch", "mlflow", "numpy", "IPython", "cloudpickle") if name in loaded] == []


def test_every_module_imports_with_warnings_as_errors(fresh: Any) -> None:
    script = (
        "import importlib, json, pkgutil, sgpu\n"
        "names = sorted(module.name for module in pkgutil.walk_packages(sgpu.__path__, 'sgpu.'))\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "print(json.dumps(names))\n"
    )
    assert len(fresh(script, "-W", "error")) > 80


HIDDEN = ("mlflow", "IPython", "ipywidgets", "anywidget", "ray", "torch")


def test_no_import_hides_from_the_linter(trees: dict[str, ast.Module]) -> None:
    """`import_module("mlflow")` is an import that the linter does not see."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
                given = node.args[0]
                if isinstance(given, ast.Constant) and str(given.value).partition(".")[0] in HIDDEN:
                    found.append(f"{path}:{node.lineno} {given.value}")
    assert found == []


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@pytest.mark.parametrize("name", WORKER)
def test_the_entry_points_exist(root: pathlib.Path, name: str) -> None:
    path = root / name.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()
