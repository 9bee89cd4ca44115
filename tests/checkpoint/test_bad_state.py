"""State that cannot be saved, or does not fit what was; and what another version wrote: refused by name."""

from __future__ import annotations

import json
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, find_latest_valid
from sgpu.checkpoint.format import checksum, dtypes
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointSaveError,
    SgpuError,
)
from tests.checkpoint.small import Thing, box, content, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
REPOSITORY = pathlib.Path(__file__).parents[2]


# ---- state that cannot be kept, or does not fit


def of_dtype(dtype: torch.dtype) -> torch.Tensor | None:
    """None where this torch makes no such tensor."""
    try:
        return torch.arange(48, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return None


ALL_DTYPES = sorted({
    str(value).removeprefix("torch.")
    for value in vars(torch).values() if isinstance(value, torch.dtype) and of_dtype(value) is not None
})  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*quantize")
@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_of_this_torch_is_kept_to_the_bit_or_refused_by_name(name: str, tmp_path: pathlib.Path) -> None:
    dtype = getattr(torch, name)
    tensor = of_dtype(dtype)
    assert tensor is not None
    if not dtypes.can_be_kept(dtype) or tensor.is_quantized:
        with pytest.raises(CheckpointSaveError, match=r"box\.w is a"):
            save(tmp_path, 1, box={"w": tensor})
        return
    save(tmp_path, 1, box={"w": tensor})
    live = {"w": torch.zeros(48, dtype=torch.uint8).view(dtype)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(tmp_path)) as checkpointer:
        assert checkpointer.restore() is not None
    assert live["w"].view(torch.uint8).tolist() == list(range(48))


def rewrite(folder: pathlib.Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the manifest as another version would have written it, with a right checksum."""
    path = folder / "manifest.json"
    rest = change(path.read_bytes().split(b",", 1)[1])
    path.write_bytes(b'{"crc32c":"' + checksum.text(checksum.of(rest)).encode() + b'",' + rest)


def rename_dtype(folder: pathlib.Path, name: bytes) -> None:
    """As a torch with a dtype that this one does not have would have written it."""
    record = (folder / ".metadata").read_bytes()
    old = b"X\x07\x00\x00\x00float32"
    assert old in record
    new = record.replace(old, b"X" + len(name).to_bytes(4, "little") + name)
    (folder / ".metadata").write_bytes(new)

    def change(rest: bytes) -> bytes:
        value = json.loads(b"{" + rest)
        value["files"][".metadata"] = {"bytes": len(new), "crc32c": checksum.text(checksum.of(new))}
        return json.dumps(value, separators=(",", ":")).encode()[1:]

    rewrite(folder, change)


@pytest.mark.parametrize("kind", ["box", "schedule"])
def test_a_dtype_that_this_torch_does_not_have(kind: str, tmp_path: pathlib.Path) -> None:
    def state(value: float) -> Any:
        return {kind: box(value=value) if kind == "box" else Thing(box(value=value))}

    save(tmp_path, 1, **state(1))
    rename_dtype(tmp_path / "step-00000001", b"float2_e9")
    live = state(5)
    with Checkpointer(CheckpointPolicy(), live, store=PosixStore(tmp_path)) as checkpointer:
        with pytest.raises(CheckpointMismatchError, match=rf"{kind}\.w.* float2_e9") as caught:
            checkpointer.restore()
    assert caught.value.unrecoverable
    held = live[kind] if kind == "box" else live[kind].state
    assert held["w"][0] == 5
    assert Catalog(tmp_path).inspect(1).tensors[0].dtype == "float2_e9"
    with pytest.raises(CheckpointMismatchError, match="which this torch"):
        VolumeReader(tmp_path / "step-00000001").read_metadata()
    with pytest.raises(CheckpointMismatchError, match="which this torch"):
        Catalog(tmp_path).export(1, tmp_path / "out.pt", format="torch")


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (torch.zeros(3, 2), r"box\.w \(saved float32\[2, 3\], live float32\[3, 2\]\)"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), r"box\.w \(saved float32\[2, 3\], live bfloat16\[2, 3\]\)"),
    ],
    ids=["shape", "dtype"],
)
def test_a_tensor_that_has_changed_since(live: torch.Tensor, said: str, tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1, box={"w": torch.ones(2, 3)})
    before = content(tmp_path)
    held = {"w": live}
    with Checkpointer(CheckpointPolicy(), {"box": held}, store=PosixStore(tmp_path)) as checkpointer:
        with pytest.raises(CheckpointMismatchError, match=said) as caught:
            checkpointer.restore()
    assert caught.value.unrecoverable
    assert "use another root to start afresh" in str(caught.value)
    assert not live.any()
    assert content(tmp_path) == before
    with pytest.raises((CheckpointException, CheckpointMismatchError), match="w"):
        dcp.load({"box.w": live}, storage_reader=VolumeReader(tmp_path / "step-00000001"))
    assert not live.any()


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"plan": Thing({"outer": [1, {"inner": threading.Lock()}]})}, "plan.outer.1.inner"),
        ({"plan": Thing({"rule": lambda step: step})}, "plan.rule"),
        ({"box": {"w": torch.ones(2), "file": {"handle": sys.stdout}}}, "box.file.handle"),
        ({"box": {"w": torch.ones(2).to_sparse()}}, "box.w"),
    ],
    ids=["lock", "lambda", "file", "sparse"],
)
@pytest.mark.parametrize("how", ["raise", "warn"])
def test_what_cannot_be_kept_is_named_by_its_full_key(
    how: Any, state: dict[str, Any], key: str, tmp_path: pathlib.Path
) -> None:
    save(tmp_path, 1, box=box())
    checkpointer = Checkpointer(CheckpointPolicy(on_error=how), state, store=PosixStore(tmp_path))
    if how == "raise":
        with pytest.raises(CheckpointSaveError, match=rf"{key} (holds|is) a") as caught:
            checkpointer.save(2)
        assert caught.value.unrecoverable
        assert (caught.value.tensor, caught.value.step) == (key, 2)
    else:
        checkpointer.save(2)
        (report,) = checkpointer.poll()
        assert f"{key} " in str(report.error)
    checkpointer.close()
    assert Catalog(tmp_path).steps() == [1]


# ---- another version's


def newer(folder: pathlib.Path) -> None:
    rewrite(folder, lambda rest: rest.replace(b'"format":"sgpu.checkpoint/1"', b'"format":"sgpu.checkpoint/7"'))


def test_a_checkpoint_of_a_newer_format_is_not_passed_over_in_silence(tmp_path: pathlib.Path) -> None:
    """To go on from an older one would lose what was trained since, and to prune it would lose it for good."""
    for step in (1, 2):
        save(tmp_path, step, box=box(value=step))
    of_a_newer_one = tmp_path / "step-00000002.a1"
    newer(of_a_newer_one)
    live = box(value=9)
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(tmp_path)) as checkpointer:
        with pytest.raises(CheckpointMismatchError, match=r"sgpu\.checkpoint/7.*by a newer sgpu") as caught:
            checkpointer.restore()
    assert caught.value.unrecoverable
    assert live["w"][0] == 9
    for ask in (lambda: find_latest_valid(tmp_path), lambda: Catalog(tmp_path).inspect(2)):
        with pytest.raises(CheckpointFormatError, match="pip install --upgrade"):
            ask()
    with pytest.raises(CheckpointFormatError):
        VolumeReader(of_a_newer_one).read_metadata()
    for step in (3, 4, 5):
        save(tmp_path, step, box=box(value=step))
    with Checkpointer(CheckpointPolicy(keep_last=1), {"box": live}, store=PosixStore(tmp_path)) as checkpointer:
        checkpointer.save(6)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002.a1", "step-00000006.a6"]


def test_every_such_error_survives_pickling() -> None:
    error = CheckpointFormatError("x", found="a", known="b")
    assert isinstance(error, SgpuError)
    assert error.unrecoverable
    assert not CheckpointSaveError("x", step=1, rank=0).unrecoverable
    assert CheckpointSaveError("x", unrecoverable=True).unrecoverable
