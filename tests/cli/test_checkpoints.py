"""`sgpu checkpoints ...` over folders that torch's own save has written."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sgpu.checkpoint import VolumeWriter


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("written")
    for step in (9, 10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's: not in a process group
            state = {"weight": torch.full((3, 4), float(step)), "same": torch.ones(2)}
            dcp.save(state, storage_writer=VolumeWriter(str(root / f"step-{step:08d}")), no_dist=True)
    return root


@pytest.fixture
def root(written: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 9 and 10, to do with as a test likes."""
    copy = tmp_path / "checkpoints"
    for path in written.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(written)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def shard(root: pathlib.Path, step: int) -> pathlib.Path:
    return next((root / f"step-{step:08d}").glob("*.distcp"))


def test_list_shows_valid_and_damaged(sgpu: Any, root: pathlib.Path) -> None:
    shard(root, 10).write_bytes(b"cut")
    told = sgpu("checkpoints", "list", root)
    assert told.exit_code == 0, told.output
    lines = told.stdout.splitlines()
    assert lines[1].split()[:2] == ["9", "valid"]
    assert lines[2].split()[:2] == ["10", "DAMAGED"]
    assert ".distcp" in lines[2]


def test_by_run_id(sgpu: Any, root: pathlib.Path, make_run: Any) -> None:
    run = make_run("20260101-000000-train-aaaaaa", checkpoints=str(root))
    for where in ("aaaaaa", run.root):
        told = sgpu("checkpoints", "list", where)
        assert told.exit_code == 0, told.output
        assert len(told.stdout.splitlines()) == 3


def test_a_run_without_checkpoints(sgpu: Any, make_run: Any) -> None:
    make_run("20260101-000000-train-aaaaaa")
    told = sgpu("checkpoints", "list", "aaaaaa")
    assert told.exit_code == 1
    assert "has no checkpoint yet" in told.stderr


@pytest.mark.parametrize("where", ["./nowhere", "nowhere"])
@pytest.mark.parametrize("command", ["list", "verify", "inspect", "prune"])
def test_a_place_that_is_not_there(sgpu: Any, command: str, where: str) -> None:
    told = sgpu("checkpoints", command, where)
    assert told.exit_code == 2
    assert "nowhere" in told.stderr
    assert told.stderr.count("\n") == 1


def test_verify_reads_every_byte(sgpu: Any, root: pathlib.Path) -> None:
    good = sgpu("checkpoints", "verify", root)
    assert good.exit_code == 0
    assert good.stdout == "step 9: good, every byte as written\nstep 10: good, every byte as written\n"
    content = bytearray(shard(root, 10).read_bytes())
    content[len(content) // 2] ^= 1
    shard(root, 10).write_bytes(content)
    bad = sgpu("checkpoints", "verify", root)
    assert bad.exit_code == 1
    assert "step 9: good" in bad.stdout
    assert "step 10: DAMAGED" in bad.stdout
    assert "its bytes are not those that were written" in bad.stdout


def test_verify_tells_of_a_checkpoint_that_is_cut(sgpu: Any, root: pathlib.Path) -> None:
    shard(root, 10).write_bytes(b"cut")
    told = sgpu("checkpoints", "verify", root, "--quick")
    assert told.exit_code == 1
    assert "step 10: DAMAGED" in told.stdout


def test_verify_of_a_step_that_is_not_there(sgpu: Any, root: pathlib.Path) -> None:
    told = sgpu("checkpoints", "verify", root, "--step", 77)
    assert told.exit_code == 1
    assert "no checkpoint of step 77" in told.stderr
    assert "[9, 10]" in told.stderr


def test_inspect_shows_the_newest_by_itself(sgpu: Any, root: pathlib.Path) -> None:
    told = sgpu("checkpoints", "inspect", root)
    assert told.exit_code == 0, told.output
    assert "step-00000010" in told.stdout
    assert any(line.split()[:3] == ["weight", "float32", "3x4"] for line in told.stdout.splitlines())


def test_diff(sgpu: Any, root: pathlib.Path) -> None:
    told = sgpu("checkpoints", "diff", root, 9, 10)
    assert told.exit_code == 1
    assert told.stdout == "other values: weight\n"
    assert sgpu("checkpoints", "diff", root, 9, 9).exit_code == 0


def test_export_and_never_over_a_file(sgpu: Any, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "out.pt"
    told = sgpu("checkpoints", "export", root, target, "--step", 9, "--format", "torch")
    assert told.exit_code == 0, told.output
    assert torch.load(target, weights_only=True)["weight"].eq(9).all()
    again = sgpu("checkpoints", "export", root, target, "--step", 9, "--format", "torch")
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_prune_asks_first_and_keeps_the_newest(sgpu: Any, root: pathlib.Path) -> None:
    dry = sgpu("checkpoints", "prune", root, "--keep-last", 1)
    assert dry.exit_code == 0, dry.output
    assert dry.stdout.splitlines() == ["would remove step-00000009", "nothing was removed; --yes does it"]
    assert (root / "step-00000009").exists()
    assert sgpu("checkpoints", "prune", root, "--keep-last", 1, "--yes").stdout == "removed step-00000009\n"
    assert not (root / "step-00000009").exists()
    assert (root / "step-00000010").exists()
    assert sgpu("checkpoints", "prune", root, "--keep-last", 1, "--yes").stdout == "nothing to remove\n"


def test_protect_is_shown_and_honoured(sgpu: Any, root: pathlib.Path) -> None:
    told = sgpu("checkpoints", "protect", root, 9, "--reason", "published")
    assert told.exit_code == 0, told.output
    line = sgpu("checkpoints", "list", root).stdout.splitlines()[1]
    assert line.split()[:3] == ["9", "valid,", "protected"]
    assert "(published)" in line
    assert sgpu("checkpoints", "prune", root, "--keep-last", 1, "--yes").stdout == "nothing to remove\n"
    assert sgpu("checkpoints", "unprotect", root, 9).exit_code == 0
    assert sgpu("checkpoints", "prune", root, "--keep-last", 1, "--yes").stdout == "removed step-00000009\n"
    again = sgpu("checkpoints", "unprotect", root, 9)
    assert again.exit_code == 1
    assert "step 9 is not protected" in again.stderr


def test_export_of_a_folder_with_other_names(sgpu: Any, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "hf"
    told = sgpu("checkpoints", "export", root, target, "--format", "hf", "--part", "weight")
    assert told.exit_code == 2
    assert "nothing to export" in told.stderr
    file = tmp_path / "out.safetensors"
    told = sgpu("checkpoints", "export", root, file, "--rename", "^weight=w")
    assert told.exit_code == 0, told.output
    assert b'"w":' in file.read_bytes()
    bad = sgpu("checkpoints", "export", root, tmp_path / "x", "--rename", "weight")
    assert bad.exit_code == 2
    assert "PATTERN=TEXT" in bad.stderr
