"""Every fenced block is run, checked, or says why not."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from sgpu.cli import app

ROOT = pathlib.Path(__file__).parents[2]
SHELL = ("sh", "console")
PLAIN = ("text", "json")

# Set-up commands, which .ci/run carries out in its own way; test_setup_commands_are_those_of_ci compares them.
SETUP = (
    "python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 -e '.[notebook,demo]' && .venv/bin/sgpu demo",
    "python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 -e '.[test]' && "
    ".venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder",
)


def test_every_fence_is_of_a_known_kind(blocks: Any) -> None:
    unknown = [f"{b.page}:{b.line} {b.language!r}" for b in blocks if b.language not in ("python", *SHELL, *PLAIN)]
    assert unknown == []


def test_fences_are_closed(pages: dict[str, str], blocks: Any) -> None:
    for page, text in pages.items():
        fences = len(re.findall(r"^ *```", text, re.M))
        assert fences == 2 * sum(b.page == page for b in blocks), f"{page}: a fence is not closed"


@pytest.mark.slow
def test_python_blocks_run(page: str, blocks: Any, tmp_path: pathlib.Path) -> None:
    """The blocks of a page, one after the other, as one program in an empty folder."""
    ours = [b for b in blocks if b.page == page and b.language == "python" and b.reason is None]
    if not ours:
        return
    lines: list[str] = []
    for block in ours:
        lines += [""] * (block.line - 1 - len(lines))  # so that tracebacks show the page's own line numbers
        lines += block.text.splitlines()
    script = tmp_path / pathlib.Path(page).with_suffix(".py").name
    script.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{page}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


GROUPS = ("cache", "checkpoints")


def commands(block: Any) -> list[str]:
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.strip() and not line.startswith("#")]


def test_shell_blocks_are_checked(blocks: Any) -> None:
    """A command is `sgpu ...` with a command and options that exist, or a set-up command."""
    problems = []
    for block in blocks:
        if block.language not in SHELL or block.reason is not None:
            continue
        problems += [
            f"{block.page}:{block.line} {line}: {problem}"
            for line in commands(block)
            if (problem := "" if line in SETUP else _problem(line))
        ]
    assert problems == []


def _problem(line: str) -> str:
    """Why a command line would be refused; empty where it would not."""
    words = shlex.split(line)
    if words[0] != "sgpu":
        return "neither sgpu nor a set-up command; check it, or say before the fence why it is not run"
    path = words[1:3] if words[1] in GROUPS else words[1:2]
    told = CliRunner().invoke(app, [*path, "--help"])
    if told.exit_code != 0:
        return told.output
    missing = [word for word in words if word.startswith("-") and word.partition("=")[0] not in told.stdout]
    return f"no option {missing}" if missing else ""


def test_every_command_is_documented(blocks: Any) -> None:
    said = {line for b in blocks if b.page == "docs/command-line.md" and b.language in SHELL for line in commands(b)}
    words = [shlex.split(line)[1:] for line in said]
    named = {" ".join(line[:2] if line[0] in GROUPS else line[:1]) for line in words}
    click = get_command(app)
    every = {name for name in click.commands if name not in GROUPS}
    every |= {f"{group} {name}" for group in GROUPS for name in click.commands[group].commands}
    assert named == every


def test_the_check_of_commands_can_fail() -> None:
    assert _problem("sgpu plan --gpus 3") == ""
    assert _problem("sgpu plan --gpu-type h100")
    assert _problem("sgpu fly")
    assert _problem("rm -rf /")


def test_setup_commands_are_those_of_ci(pages: dict[str, str]) -> None:
    """The README's two commands stand there as they are, and .ci/run installs and tests the same."""
    for command in SETUP:
        assert f"```sh\n{command}\n```" in pages["README.md"]
    run = (ROOT / ".ci" / "run").read_text()
    assert "pip install -qq torch==2.13.0 -e '.[test]'" in run
    assert "python -m pytest" in run
    assert "sgpu demo" in run


def test_an_excuse_is_seen() -> None:
    spec = spec_from_file_location("docs_conftest", pathlib.Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    text = "<!-- not run: needs a cluster of its own -->\n```python\nx\n```\n\n```python\ny\n```\n"
    assert [block.reason for block in module.blocks_of("page", text)] == ["needs a cluster of its own", None]
