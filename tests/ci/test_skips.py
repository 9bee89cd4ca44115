"""In CI a test that skips fails the run, unless the machine cannot have what it needs."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run_pytest(folder: pathlib.Path, text: str, ci: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "CI": ci, "HOME": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


FIXTURE = """import pytest
@pytest.fixture
def f(): pytest.skip({reason!r})
def test_a(f): pass
def test_b(): pass
"""
TESTS = {
    "call": "import pytest\ndef test_a(): pytest.skip({reason!r})\ndef test_b(): pass\n",
    "mark": "import pytest\n@pytest.mark.skipif(True, reason={reason!r})\ndef test_a(): pass\ndef test_b(): pass\n",
    "module": "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n",
    "fixture": FIXTURE,
}


@pytest.mark.parametrize("kind", sorted(TESTS))
def test_a_skip_fails_the_run_in_ci(tmp_path: pathlib.Path, kind: str) -> None:
    text = TESTS[kind].format(reason="needs chromium")
    if kind == "module":
        (tmp_path / "test_other.py").write_text("def test_b(): pass\n")
    done = run_pytest(tmp_path, text, "true")
    assert done.returncode == 1, done.stdout
    assert "skipped, but should have run" in done.stdout
    assert "needs chromium" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_the_same_skip_is_fine_on_a_laptop(tmp_path: pathlib.Path) -> None:
    done = run_pytest(tmp_path, TESTS["call"].format(reason="needs chromium"), "")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("reason", ["needs a GPU", "needs a network namespace: no right to make one"])
def test_what_a_machine_cannot_have_may_skip(tmp_path: pathlib.Path, reason: str) -> None:
    done = run_pytest(tmp_path, TESTS["mark"].format(reason=reason), "true")
    assert done.returncode == 0, done.stdout
    assert "should have run" not in done.stdout


def test_an_expected_failure_is_no_skip(tmp_path: pathlib.Path) -> None:
    text = "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_a(): assert False\n"
    assert run_pytest(tmp_path, text, "true").returncode == 0


def test_a_failure_stays_a_failure(tmp_path: pathlib.Path) -> None:
    done = run_pytest(tmp_path, TESTS["call"].format(reason="needs chromium") + "def test_c(): assert False\n", "true")
    assert done.returncode == 1
