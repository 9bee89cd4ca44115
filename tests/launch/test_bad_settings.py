"""What the environment says, and cannot be: refused by name before anything starts."""

from __future__ import annotations

import os
import pathlib

import pytest

from sgpu import distributed
from sgpu.contract.errors import InputError


def _train(value: int) -> int:
    return value


def _nothing_was_made(home: pathlib.Path) -> None:
    assert not home.exists() or os.listdir(home) == []


@pytest.mark.parametrize("value", ["forever", "Stop", "0"])
def test_settings_are_refused_by_name(value: str, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_ON_KERNEL_EXIT", value)
    with pytest.raises(InputError, match=f"SGPU_ON_KERNEL_EXIT must be .*found '{value}'"):
        distributed(gpus=1)(_train).submit(1)
    monkeypatch.setenv("SGPU_ON_KERNEL_EXIT", "stop")
    monkeypatch.setenv("SGPU_MAX_PAYLOAD_BYTES", "many")
    with pytest.raises(InputError, match="SGPU_MAX_PAYLOAD_BYTES must be a whole number; found 'many'"):
        distributed(gpus=1)(_train).submit(1)
    _nothing_was_made(home)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SGPU_NODE_TIMEOUT_SECONDS", "ten", "must be seconds, 0.5 or more"),
        ("SGPU_HANG_FLOOR_SECONDS", "0", "must be seconds, 0.1 or more"),
        ("SGPU_PREEMPT_SECONDS", "-1", "must be seconds, 0 or more"),
        ("SGPU_PEER_BYTES_PER_SECOND", "1GB", "must be bytes, 1 or more"),
        ("SGPU_NOTICES", "azur", "must be .auto."),
        ("SGPU_HEALTH", "yes", "must be .act."),
        ("SGPU_HOME", "~nobody-of-that-name/runs", "Set SGPU_HOME to a full path"),
    ],
)
def test_what_agents_would_refuse_is_refused_before_there_is_one(
    name: str, value: str, told: str, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=told):
        distributed(gpus=1)(_train).submit(1)
    _nothing_was_made(home)


def test_a_working_folder_that_is_gone_is_told(
    home: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError, match="working folder of this process was removed"):
        distributed(gpus=1)(_train).submit(1)
    _nothing_was_made(home)
