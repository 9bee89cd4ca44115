from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import CheckpointCorruptError, CheckpointNotFoundError, InputError


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        model.bias.zero_()
    box = {"half": torch.ones(4, dtype=torch.bfloat16), "note": "a"}
    root = tmp_path / "root"
    with Checkpointer(CheckpointPolicy(), {"model": model, "box": box}, store=PosixStore(root)) as checkpointer:
        checkpointer.save(1, metadata={"loss": 1.0, "data_position": {"epoch": 0, "batch": 5}})
        model.weight.data.add_(1)
        box["more"] = torch.ones(2)
        box["half"] = torch.ones(5, dtype=torch.bfloat16)
        checkpointer.save(2)
    return root


def test_inspect_needs_no_torch(root: pathlib.Path) -> None:
    script = (
        "import sys, json; from sgpu.checkpoint import Catalog\n"
        f"catalog = Catalog({str(root)!r}); told = catalog.inspect(1)\n"
        "assert catalog.verify(2, deep=True).ok; catalog.diff(1, 2); assert catalog.latest() == 2\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "print(json.dumps([[t.name, t.dtype, t.shape, t.size_bytes] for t in told.tensors]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        '[["box.half", "bfloat16", [4], 8], ["model.bias", "float32", [2], 8], ["model.weight", "float32", [2, 3], 24]]'
    )
    told = Catalog(root).inspect(1)
    assert (told.world_size, told.verified, told.step) == (1, True, 1)
    assert told.versions["torch"] == torch.__version__
    assert told.data_position == {"epoch": 0, "batch": 5}
    assert (
        told.size_bytes
        == sum(path.stat().st_size for path in pathlib.Path(told.path).iterdir())
        - (pathlib.Path(told.path) / "manifest.json").stat().st_size
    )


def test_diff_tells_names_shapes_and_values(root: pathlib.Path) -> None:
    told = Catalog(root).diff(1, 2)
    assert (told.only_first, told.only_second, told.changed) == ((), ("box.more",), ("box.half",))
    assert told.values_changed == ("box.__values__", "model.weight")


def test_deep_verification_names_file_and_tensor(root: pathlib.Path) -> None:
    shard = root / "step-00000002" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    assert Catalog(root).verify(2).ok
    deep = Catalog(root).verify(2, deep=True)
    assert not deep.ok
    assert deep.problems[0].startswith("model.__values__ in __0_0.distcp")


def test_a_step_that_is_not_there(root: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 7 .* there are \[1, 2\]"):
        Catalog(root).inspect(7)


def test_export_to_one_file(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = Catalog(root).export(1, tmp_path / "all.pt", format="torch")
    loaded = torch.load(path, weights_only=True)
    assert loaded["model.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["box.half"].dtype == torch.bfloat16
    with pytest.raises(InputError, match="exists already"):
        Catalog(root).export(1, path, format="torch")
    with pytest.raises(InputError, match="safetensors"):
        Catalog(root).export(1, tmp_path / "x", format="zip")


@pytest.mark.parametrize("record_too", [True, False])
def test_a_checkpoint_that_vanishes_while_it_is_looked_at_is_none(
    record_too: bool, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run prunes."""
    read, gone = PosixStore.read, Catalog(root).inspect(2).path

    def late(self: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith("manifest.json") and (self._root / path).parent == pathlib.Path(gone):
            (self._root / path).unlink(missing_ok=True)
            if record_too:
                (self._root / path).with_name(".metadata").unlink(missing_ok=True)
        return read(self, path, offset, length)

    monkeypatch.setattr(PosixStore, "read", late)
    catalog = Catalog(root)
    assert catalog.steps() == [1]
    with pytest.raises(CheckpointNotFoundError if record_too else CheckpointCorruptError):
        catalog.inspect(2)
    assert not pathlib.Path(gone, "manifest.json").exists()
