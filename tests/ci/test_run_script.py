""".ci/run itself: what it says about failures and about processes that were left."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / ".ci" / "run"


def function(name: str) -> str:
    found = re.search(rf"^{name}\(\) {{.*?^}}$", SCRIPT.read_text(), re.M | re.S)
    assert found is not None, name
    return found[0]


def bash(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-uc", text],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


def steps(limit_seconds: int, text: str) -> subprocess.CompletedProcess[str]:
    """The last line is the names of the steps that failed."""
    return bash(f'failed=() LIMIT_SECONDS={limit_seconds}\n{function("step")}\n{text}; echo "${{failed[*]}}"')


def test_it_can_be_executed_and_parsed() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


def test_a_failed_step_is_remembered_and_the_next_one_runs() -> None:
    told = steps(99, "step first 5 false; step second 5 true")
    assert told.stdout.splitlines()[-1] == "first"
    assert "first: FAILED with exit status 1" in told.stdout
    assert "second: passed" in told.stdout


def test_a_step_that_hangs_is_ended() -> None:
    told = steps(99, "step slow 1 sleep 60")
    assert "slow: FAILED with exit status 124" in told.stdout
    assert told.stdout.splitlines()[-1] == "slow"


def test_all_steps_together_have_a_limit() -> None:
    told = steps(1, "step slow 50 sleep 60")
    assert "slow: FAILED with exit status 124" in told.stdout


def test_processes_that_left_their_session_are_found_and_ended() -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**os.environ, "CI_RUN_MARK": "of-this-test"}, start_new_session=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        found = bash(f"CI_RUN_MARK=of-this-test\n{function('left_running')}\nleft_running")
        assert found.stdout.split()[0] == str(sleeper.pid), found
        clean = function("clean_up")
        bash(f"CI_RUN_MARK=of-this-test CI_TMP=$(mktemp -d)\n{function('left_running')}\n{clean}\nclean_up")
        assert sleeper.wait(10) == -9
    finally:
        sleeper.kill()
        sleeper.communicate()
    nothing = bash(f"CI_RUN_MARK=of-this-test\n{function('left_running')}\nleft_running")
    assert nothing.stdout == ""
