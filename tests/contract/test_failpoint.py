"""Fail-points: what can be written, what is refused, and that a point that fires is told."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sgpu.contract import failpoint
from sgpu.contract.errors import InputError
from sgpu.contract.failpoint import Failpoint, parse


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoint.reset()
    yield
    failpoint.reset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=kill", [("a.b", None, None, "kill", "")]),
        ("a@1=exit:3", [("a", 1, None, "exit", "3")]),
        ("a#2=raise:ValueError", [("a", None, 2, "raise", "ValueError")]),
        ("a@0#10=errno:ENOSPC", [("a", 0, 10, "errno", "ENOSPC")]),
        (" a=stop ;b=hang; ", [("a", None, None, "stop", ""), ("b", None, None, "hang", "")]),
        ("a=sleep:0.5", [("a", None, None, "sleep", "0.5")]),
        ("a@1#2!=signal:SIGTERM", [("a", 1, 2, "signal", "SIGTERM")]),
        (
            "a=spin; b=hold; c=flip",
            [("a", None, None, "spin", ""), ("b", None, None, "hold", ""), ("c", None, None, "flip", "")],
        ),
        ("", []),
    ],
)
def test_parse(text: str, expected: list[tuple[str, int | None, int | None, str, str]]) -> None:
    assert [(p.name, p.rank, p.nth, p.action, p.value) for p in parse(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "a", "a=", "=kill", "a=explode", "a@x=kill", "a#x=kill", "a=kill,b=kill", "a b=kill", "a=exit", "a=exit:x",
        "a=sleep", "a=sleep:x", "a=raise:NoSuchError", "a=raise:print", "a=raise", "a=errno:ENOTHING", "a=errno",
        "a#0=kill", "a!!=kill", "a%x=kill", "a=signal", "a=signal:SIGNOTHING", "a=hold:3",
    ],
)  # fmt: skip
def test_nonsense_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(InputError, match="SGPU_FAILPOINT: expected"):
        parse(text)


def test_off_by_default() -> None:
    failpoint.failpoint("anything")


def test_raises_at_the_nth_passage_once_and_tells(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "fired"
    monkeypatch.setenv("SGPU_FAILPOINT", "here#3=raise:KeyError; there@1=errno:ENOSPC")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(log))
    failpoint.failpoint("here")
    failpoint.failpoint("here")
    with pytest.raises(KeyError):
        failpoint.failpoint("here")
    failpoint.failpoint("here")
    failpoint.failpoint("there", rank=0)
    with pytest.raises(OSError, match="No space left") as caught:
        failpoint.failpoint("there", rank=1)
    assert caught.value.errno == errno.ENOSPC
    assert log.read_text().splitlines() == [
        "here rank=None nth=3 action=raise", "there rank=1 nth=2 action=errno",
    ]  # fmt: skip


def test_once_is_once_in_all_processes_that_share_a_log(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGPU_FAILPOINT", "here%5!=raise:KeyError; here%5!=raise:ValueError")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(tmp_path / "fired"))
    raised = []
    for _ in range(3):
        failpoint.reset()  # as a new process
        failpoint.failpoint("here", step=4)
        try:
            failpoint.failpoint("here", step=5)
        except (KeyError, ValueError) as error:
            raised.append(type(error))
    assert raised == [KeyError, ValueError]


def test_flip_changes_one_bit_of_what_was_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_FAILPOINT", "here=flip")
    file = tmp_path / "file"
    file.write_bytes(bytes(9))
    failpoint.failpoint("here", file=file)
    failpoint.failpoint("here")
    assert file.read_bytes() == bytes(4) + b"\1" + bytes(4)


def test_the_rank_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_FAILPOINT", "here@1=raise:OSError")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    failpoint.failpoint("here")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OSError):
        failpoint.failpoint("here")


@pytest.mark.parametrize(
    ("action", "ended"),
    [("kill", -signal.SIGKILL), ("exit:7", 7), ("stop", -signal.SIGSTOP), ("signal:SIGUSR1", -signal.SIGUSR1)],
)
def test_actions_on_the_process(action: str, ended: int, tmp_path: pathlib.Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from sgpu.contract.failpoint import failpoint; failpoint('here')"],
        env={**os.environ, "SGPU_FAILPOINT": f"here={action}", "SGPU_FAILPOINT_LOG": str(tmp_path / "fired")},
    )
    if action == "stop":
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == -ended
        child.kill()
        child.wait(10)
    else:
        assert child.wait(30) == ended
    assert (tmp_path / "fired").read_text() == f"here rank=None nth=1 action={action.partition(':')[0]}\n"


@pytest.mark.parametrize("once", ["", "!"])
def test_nothing_fires_when_the_folder_of_the_log_is_gone(
    once: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a drill that is over, resumed."""
    folder = tmp_path / "drill"
    folder.mkdir()
    monkeypatch.setenv("SGPU_FAILPOINT", f"here{once}=errno:EIO")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(folder / "fired"))
    with pytest.raises(OSError):
        failpoint.failpoint("here")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    failpoint.failpoint("here")
    assert not folder.exists()


def test_a_point_is_a_value() -> None:
    assert parse("a=kill") == (Failpoint(name="a", rank=None, nth=None, action="kill", value=""),)
