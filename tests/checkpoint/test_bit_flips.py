"""40 of 40 random bit flips are caught, in any file of a checkpoint, with the file and the tensor named."""

from __future__ import annotations

import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import CheckpointCorruptError

FLIPS = 40
SAVE = """
from sgpu.checkpoint.stores.posix import PosixStore
class Own:
    def state_dict(self): return {"n": rank}
    def load_state_dict(self, state): pass
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5))
state = {"model": model, "box": {"n": 1, "text": "x" * 50, "w": torch.randn(300)}}
with Checkpointer(CheckpointPolicy(ROOT), state, per_rank={"own": Own()}) as checkpointer:
    checkpointer.save(5)
"""


class Own:
    def state_dict(self) -> Any:
        return {"n": 0}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("something damaged was loaded")


def live_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5))
    return {"model": model, "box": {"n": 0, "text": "", "w": torch.zeros(300)}}


def fingerprint(state: dict[str, Any]) -> Any:
    return [tensor.tolist() for tensor in state["model"].state_dict().values()], repr(state["box"])


def item_at(root: pathlib.Path, file: str, byte: int) -> str:
    """The name under which the manifest has that byte."""
    opened = Catalog(root)._open(5)
    assert opened.manifest is not None
    return next(
        item.name for item in opened.manifest.files[file].items if item.offset <= byte < item.offset + item.size_bytes
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_flipped_bit(ranks: int, tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]) -> None:
    good = tmp_path / "good"
    run_ok(SAVE, ranks, ROOT=str(good))
    files = sorted(path.relative_to(good) for path in good.glob("step-*/*"))
    assert len(files) == 2 * ranks + 2
    draw = random.Random(ranks)
    for trial in range(FLIPS):
        root = tmp_path / str(trial)
        shutil.copytree(good, root)
        file = files[trial % len(files)]
        content = bytearray((root / file).read_bytes())
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (root / file).write_bytes(content)
        expected = [file.name]
        if file.name.endswith(".distcp"):
            expected.append(item_at(good, file.name, bit // 8))
        told = Catalog(root).verify(5, deep=True)
        assert not told.ok
        assert all(name in told.problems[0] for name in expected), (told, expected)
        live = live_state()
        before = fingerprint(live)
        with Checkpointer(CheckpointPolicy(), live, per_rank={"own": Own()}, store=PosixStore(root)) as checkpointer:
            if ranks == 2 and file.name.startswith("rank-"):
                checkpointer.restore()  # another number of ranks: nobody's own state is wanted
                with pytest.raises(CheckpointCorruptError, match=file.name):
                    checkpointer.restored_per_rank(int(file.stem.partition("-")[2]))
                continue
            with pytest.raises(CheckpointCorruptError) as caught:
                checkpointer.restore()
        assert all(name in str(caught.value) for name in expected), (caught.value, expected)
        assert fingerprint(live) == before
        shutil.rmtree(root)
