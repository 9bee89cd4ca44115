"""What is staged outlives its trainer: the node's helper finishes it, and the next trainer restores from its memory."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, Restored
from sgpu.contract.errors import CheckpointSaveError

REPOSITORY = pathlib.Path(__file__).parents[2]


class Own:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


def trainer(root: pathlib.Path, generation: int, value: int = 0) -> tuple[Checkpointer, dict[str, Any], Own]:
    box, own = {"w": torch.full((50_000,), float(value)), "n": value}, Own(value)
    policy = CheckpointPolicy(str(root), on_error="warn")
    return Checkpointer(policy, {"box": box}, per_rank={"own": own}, generation=generation), box, own


def restored_by_the_next(root: pathlib.Path, generation: int = 1) -> Restored:
    checkpointer, box, own = trainer(root, generation)
    with checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (set(box["w"].tolist()), box["n"], own.n) == ({float(restored.step)}, restored.step, restored.step)
        checkpointer.save(99)
    assert Catalog(root).verify(99, deep=True).ok
    return restored


def test_the_newest_is_restored_from_memory(helper: Any, tmp_path: pathlib.Path) -> None:
    checkpointer, box, own = trainer(tmp_path, 0, 1)
    with checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        box["w"].fill_(2)
        box["n"] = own.n = 2
        checkpointer.save(2)
    restored = restored_by_the_next(tmp_path)
    assert (restored.step, restored.source, restored.metadata, restored.per_rank_restored) == (2, "memory", {}, True)


def test_what_the_store_refused_is_still_in_memory(helper: Any, tmp_path: pathlib.Path, arm: Any) -> None:
    checkpointer, box, own = trainer(tmp_path / "root", 0, 1)
    with checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        fired = arm("checkpoint.shard_half=errno:ENOSPC")
        box["w"].fill_(2)
        box["n"] = own.n = 2
        checkpointer.save(2)
    assert "errno" in "\n".join(fired())
    assert Catalog(tmp_path / "root").steps() == [1]
    arm("")
    restored = restored_by_the_next(tmp_path / "root")
    assert (restored.step, restored.source) == (2, "memory")


def test_a_newer_committed_one_beats_memory(helper: Any, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    checkpointer, *_ = trainer(tmp_path, 0, 1)
    with checkpointer:
        checkpointer.save(1)
    with monkeypatch.context() as without:
        without.delenv("SGPU_CHECKPOINT_HELPER")
        checkpointer, *_ = trainer(tmp_path, 1, 5)
        with checkpointer:
            checkpointer.save(5)
    restored = restored_by_the_next(tmp_path, 2)
    assert (restored.step, restored.source) == (5, "volume")


def test_a_flipped_bit_in_memory_is_caught(helper: Any, tmp_path: pathlib.Path) -> None:
    checkpointer, *_ = trainer(tmp_path, 0, 1)
    with checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        content = bytes(checkpointer._writer.segment.view()[100_000:100_001])
        checkpointer._writer.segment.write(100_000, bytes([content[0] ^ 4]))
    restored = restored_by_the_next(tmp_path)
    assert (restored.step, restored.source) == (1, "volume")
    (skipped,) = restored.skipped
    assert "in memory" in skipped.path
    assert "box.w" in skipped.reason


def test_half_staged_memory_is_not_taken(helper: Any, tmp_path: pathlib.Path) -> None:
    checkpointer, box, _ = trainer(tmp_path, 0, 1)
    with checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        box["w"].fill_(2)
        checkpointer._stager.stage()  # and no more: as if it died here
    restored = restored_by_the_next(tmp_path)
    assert (restored.step, restored.source, restored.skipped) == (1, "volume", ())


def test_a_helper_that_is_killed_is_told_and_replaced(helper: Any, tmp_path: pathlib.Path) -> None:
    checkpointer, *_ = trainer(tmp_path, 0, 1)
    checkpointer.save(1)
    checkpointer.wait()
    helper.kill()
    helper.wait()
    checkpointer.save(2)
    checkpointer.wait()
    assert "the checkpoint writer of rank 0 was lost" in (checkpointer.poll()[-1].error or "")
    checkpointer.save(3)
    checkpointer.close()
    assert checkpointer.poll()[-1].error is None
    assert Catalog(tmp_path).steps() == [1, 3]


def test_a_second_checkpointer_in_the_same_process_has_memory_of_its_own(helper: Any, tmp_path: pathlib.Path) -> None:
    first, *_ = trainer(tmp_path, 0, 1)
    first.save(1)
    first.wait()
    second, *_ = trainer(tmp_path, 0, 2)
    second.save(2)
    second.close()
    first.close()
    assert [Catalog(tmp_path).verify(step, deep=True).ok for step in (1, 2)] == [True, True]


LIVES = """
from sgpu.contract import failpoint
box = {"w": torch.zeros(50_000)}
generation = int(os.environ["GENERATION"])
c = Checkpointer(CheckpointPolicy(ROOT), {"box": box}, generation=generation)
if generation == 0:
    box["w"].fill_(10)
    c.save(10)
    c.wait()
    box["w"].fill_(20)
    os.environ["SGPU_FAILPOINT"] = os.environ["LATER"]
    failpoint.reset()
    c.save(20)
    c._flight.handed.wait(60)
    if rank == 0 or "@1" not in os.environ["LATER"]:
        import time
        time.sleep(60) if "@1" not in os.environ["LATER"] else os._exit(5)
restored = c.restore()
assert bool((box["w"] == restored.step).all())
print(restored.step, restored.source)
c.close()
"""


@pytest.mark.parametrize(
    ("place", "codes", "found"),
    [("checkpoint.handed=kill", [-9, -9], "20 memory"), ("checkpoint.staged@1=kill", [5, -9], "10 volume")],
    ids=["both had handed over", "one had not"],
)
def test_two_ranks_are_killed_around_handing_over(
    place: str, codes: list[int], found: str, helper: Any, run_ranks: Any, run_ok: Any, tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "fired.log"
    ended = run_ranks(LIVES, 2, GENERATION="0", LATER=place, SGPU_FAILPOINT_LOG=str(log))
    assert [one.code for one in ended] == codes, ended
    assert log.read_text().count(place.partition("=")[0].partition("@")[0]) == (2 if "@" not in place else 1)
    assert run_ok(LIVES, 2, GENERATION="1") == [f"{found}\n"] * 2
    assert Catalog(tmp_path / "root").steps() == ([10, 20] if "20" in found else [10])


def test_a_save_error_names_the_rank(helper: Any, tmp_path: pathlib.Path, arm: Any) -> None:
    arm("checkpoint.manifest=errno:EIO")
    box = {"w": torch.zeros(3)}
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path / "root")), {"box": box})
    checkpointer.save(1)
    with pytest.raises(CheckpointSaveError, match=r"step 1 was not saved: rank 0: .*Input/output error") as caught:
        checkpointer.wait()
    assert (caught.value.step, caught.value.rank) == (1, 0)
    arm("")
    checkpointer.close()
