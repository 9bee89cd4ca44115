"""A file written by `atomic` is the old one or the new one, wherever its writer is killed."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from sgpu.contract import atomic

# Kills itself with SIGKILL at the Nth system call that matters, in the order in which they are made.
_WRITER = """
import os, pathlib, signal, sys
from sgpu.contract import atomic
path, at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
passed = []
def counted(name):
    original = getattr(os, name)
    def call(*args, **kwargs):
        passed.append(name)
        if len(passed) == at:
            print(name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(os, name, call)
for name in ("open", "fdopen", "fsync", "replace"):
    counted(name)
atomic.write_bytes(path, b"new" * 100_000)
print("done", flush=True)
"""


def _write_and_die(path: pathlib.Path, at: int) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, str(path), str(at)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip(), done.returncode


@pytest.mark.parametrize("existing", [b"old" * 100_000, None], ids=["replacing", "new"])
def test_killed_at_each_operation_leaves_the_old_or_the_new(tmp_path: pathlib.Path, existing: bytes | None) -> None:
    path = tmp_path / "file"
    fired: list[str] = []
    for at in range(1, 20):
        path.unlink(missing_ok=True)
        if existing is not None:
            path.write_bytes(existing)
        where, status = _write_and_die(path, at)
        found = path.read_bytes() if path.exists() else None
        if where == "done":
            assert status == 0
            assert found == b"new" * 100_000
            break
        assert status == -signal.SIGKILL
        assert found == (b"new" * 100_000 if "replace" in fired else existing), f"killed before {where}"
        fired.append(where)
    assert fired == ["open", "fdopen", "fsync", "replace", "open", "fsync"]


def test_a_failed_write_leaves_nothing_aside(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_bytes(path, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def test_mode_is_private_and_json_round_trips(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "value.json"
    atomic.write_json(path, {"b": [1, None], "a": "ü"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert atomic.read_json(path) == {"a": "ü", "b": [1, None]}
    assert json.loads(path.read_text())["a"] == "ü"
    assert atomic.read_json(tmp_path / "none.json") is None


def test_threads_of_one_process_do_not_share_a_file_aside(tmp_path: pathlib.Path) -> None:
    """Two threads that replace the same file: each replacement is whole."""
    path = tmp_path / "file"
    errors: list[OSError] = []
    contents = [bytes([65 + index]) * 200_000 for index in range(4)]

    def write(content: bytes) -> None:
        try:
            for _ in range(30):
                atomic.write_bytes(path, content, durable=False)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["file"]
