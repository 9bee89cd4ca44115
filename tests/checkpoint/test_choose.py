"""Which checkpoint is the newest valid one, and which may be pruned."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, find_latest_valid
from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import prune
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import CheckpointNotFoundError, InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Count:
    def state_dict(self) -> Any:
        return {"n": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"n": 1}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "root"


def fill(root: pathlib.Path, *steps: int, keep: int = 99, **metadata: Any) -> None:
    box = {"w": torch.zeros(64)}
    policy = CheckpointPolicy(keep_last=keep)
    with Checkpointer(policy, {"box": box}, per_rank={"count": Count()}, store=PosixStore(root)) as checkpointer:
        for step in steps:
            box["w"].fill_(step)
            checkpointer.save(step, metadata={key: value[step] for key, value in metadata.items()})


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-9", 9), ("step-00000010", 10), ("step-10.a3", 10), ("step_1200", 1200), ("checkpoint-5", 5),
     ("step-100.backup", None), ("foo-step-200", None), ("step-11.tmp", None), ("step-", None), ("step-1.a", None),
     ("step--1", None), ("Step-1", None), ("step-1\n", None), ("step-\u0661", None), ("step_1.a1", None)],
)  # fmt: skip
def test_only_a_full_match_is_a_step(name: str, step: int | None) -> None:
    found = names.parse_step(name)
    assert (found.step if found else None) == step


def test_the_newest_is_by_number_and_foreign_names_are_left_alone(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    fill(root, 9)
    for name in ("step-9", "step-10", "step-100", "step-100.backup", "foo-step-200", "step-11.tmp"):
        shutil.copytree(root / "step-00000009", root / name)
    shutil.rmtree(root / "step-00000009")
    (root / "step-300").write_text("a file")
    assert find_latest_valid(root) == str(root / "step-100")
    assert Catalog(root).steps() == [9, 10, 100]
    assert Catalog(root).prune(keep_last=2, dry_run=True) == ["step-9"]
    assert (root / "step-9").exists()
    assert Catalog(root).prune(keep_last=2) == ["step-9"]
    left = {path.name for path in root.iterdir()} - {".attempt-0"}
    assert left == {"step-10", "step-100", "step-100.backup", "foo-step-200", "step-11.tmp", "step-300"}


def test_each_missing_file_makes_it_invalid_and_is_named(root: pathlib.Path) -> None:
    fill(root, 10, 20)
    whole = root / "step-00000020"
    files = sorted(path.name for path in whole.iterdir())
    assert files == [".metadata", "__0_0.distcp", "manifest.json", "rank-0.pt"]
    for file in files:
        kept = (whole / file).read_bytes()
        (whole / file).unlink()
        assert find_latest_valid(root) == str(root / "step-00000010")
        live = {"w": torch.zeros(64)}
        with Checkpointer(CheckpointPolicy(str(root)), {"box": live}, per_rank={"count": Count()}) as checkpointer:
            restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 10
        if file == ".metadata":  # not committed: no checkpoint, so nothing was passed over
            with pytest.raises(CheckpointNotFoundError, match="step 20"):
                Catalog(root).verify(20)
        else:
            assert file in restored.skipped[0].reason
            assert file in Catalog(root).verify(20).problems[0]
        (whole / file).write_bytes(kept)
    assert find_latest_valid(root) == str(whole)


def test_what_has_no_commit_record_is_no_checkpoint(root: pathlib.Path) -> None:
    fill(root, 1)
    (root / "step-30").mkdir()
    (root / "step-31").mkdir()
    (root / "step-31" / ".metadata").touch()
    (root / "step-32" / ".metadata").mkdir(parents=True)
    assert find_latest_valid(root) == str(root / "step-00000001")
    assert find_latest_valid(root / "nothing") is None


def test_plain_dcp_folders_count_as_unverified(root: pathlib.Path) -> None:
    fill(root, 5)
    dcp.save({"w": torch.ones(100)}, storage_writer=FileSystemWriter(root / "step_1200"))
    assert find_latest_valid(root) == str(root / "step_1200")
    told = Catalog(root).verify(1200, deep=True)
    assert (told.ok, told.verified) == (True, False)
    shard = next((root / "step_1200").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert find_latest_valid(root) == str(root / "step-00000005")


@pytest.mark.parametrize(
    ("keep", "steps", "left"),
    [(3, (8, 9, 10, 11), [9, 10, 11]), (1, (1, 2), [2]), (2, (9_900, 10_000, 10_100), [10_000, 10_100])],
)
def test_the_newest_stay_by_number(keep: int, steps: tuple[int, ...], left: list[int], root: pathlib.Path) -> None:
    fill(root, *steps, keep=keep)
    assert Catalog(root).steps() == left
    assert len([path for path in root.iterdir() if path.name.startswith("step-")]) == len(left)


def _candidate(step: int, attempt: int = 0, *, valid: bool = True, score: float | None = None) -> prune.Candidate:
    folder = names.StepFolder(step=step, attempt=attempt, name=names.folder_name(step, attempt))
    return prune.Candidate(folder=folder, valid=valid, score=score)


def _left(candidates: list[prune.Candidate], policy: CheckpointPolicy, *protected: str) -> list[tuple[int, int]]:
    gone = set(prune.choose(candidates, policy, protected))
    return sorted((c.folder.step, c.folder.attempt) for c in candidates if c.folder.name not in gone)


def test_rules_of_retention() -> None:
    steps = [_candidate(step) for step in range(1, 11)]
    assert _left(steps, CheckpointPolicy(keep_last=2)) == [(9, 0), (10, 0)]
    assert _left(steps, CheckpointPolicy(keep_last=1, keep_every=4)) == [(4, 0), (8, 0), (10, 0)]
    assert _left(steps, CheckpointPolicy(keep_last=1), names.folder_name(3, 0)) == [(3, 0), (10, 0)]
    scored = [_candidate(step, score=score) for step, score in enumerate([3.0, 1.0, float("nan"), 2.0, None, 9.0])]
    best = {"metric": "loss", "mode": "min", "count": 2}
    assert _left(scored, CheckpointPolicy(keep_last=1, keep_best=best)) == [(1, 0), (3, 0), (5, 0)]
    worst = {"metric": "accuracy", "mode": "max", "count": 1}
    assert _left(scored[:5], CheckpointPolicy(keep_last=1, keep_best=worst)) == [(0, 0), (4, 0)]


def test_the_last_valid_one_never_goes() -> None:
    damaged = [_candidate(2, valid=False), _candidate(3, valid=False)]
    assert _left([_candidate(1), *damaged], CheckpointPolicy(keep_last=1)) == [(1, 0), (2, 0), (3, 0)]
    assert _left([_candidate(1, valid=False)], CheckpointPolicy(keep_last=1)) == [(1, 0)]


def test_a_damaged_one_is_left_for_whoever_looks_into_it() -> None:
    found = [_candidate(1, valid=False), _candidate(2), _candidate(3)]
    assert _left(found, CheckpointPolicy(keep_last=1)) == [(1, 0), (3, 0)]


def test_an_older_attempt_of_a_step_goes_before_another_step() -> None:
    candidates = [_candidate(1), _candidate(2), _candidate(2, 1), _candidate(3, 1)]
    assert _left(candidates, CheckpointPolicy(keep_last=3)) == [(1, 0), (2, 1), (3, 1)]


def test_a_bad_rule_is_refused() -> None:
    with pytest.raises(InputError, match="keep_best"):
        prune.choose([_candidate(1)], CheckpointPolicy(keep_best={"metric": "loss", "mode": "lowest"}), ())
    with pytest.raises(InputError, match="keep_best"):
        Checkpointer(CheckpointPolicy("unused", keep_best={"metrics": "loss"}), {"box": {}})


def test_the_best_by_metric_stay(root: pathlib.Path) -> None:
    fill(root, 1, 2, 3, 4, loss={1: 0.5, 2: 0.1, 3: 0.7, 4: 0.9})
    best = {"metric": "loss", "mode": "min", "count": 1}
    assert Catalog(root).prune(keep_last=1, keep_best=best) == ["step-00000001", "step-00000003"]
    assert Catalog(root).steps() == [2, 4]


def test_the_one_resumed_from_stays_until_enough_newer_ones_are_there(root: pathlib.Path) -> None:
    """Also where others, which this run could not use, are newer still."""
    fill(root, 1, 8, 9)
    box = {"w": torch.zeros(64)}
    policy, left = CheckpointPolicy(keep_last=2), []
    with Checkpointer(policy, {"box": box}, per_rank={"count": Count()}, store=PosixStore(root)) as checkpointer:
        assert checkpointer.restore(before=8) is not None
        for step in (2, 10, 11):
            checkpointer.save(step)
            checkpointer.wait()
            left.append(Catalog(root).steps())
    assert left == [[1, 2, 8, 9], [9, 10], [10, 11]]


def test_a_restart_keeps_no_more_than_the_policy_says(root: pathlib.Path) -> None:
    fill(root, 1, 2, keep=2)
    box = {"w": torch.zeros(64)}
    policy = CheckpointPolicy(keep_last=2)
    with Checkpointer(policy, {"box": box}, per_rank={"count": Count()}, store=PosixStore(root)) as checkpointer:
        assert checkpointer.restore() is not None
        for step in (3, 4, 5):
            checkpointer.save(step)
    assert Catalog(root).steps() == [4, 5]


def test_of_a_linked_step_the_link_goes_and_what_it_leads_to_stays(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    fill(tmp_path / "archive", 1)
    archived = tmp_path / "archive" / "step-00000001"
    root.mkdir()
    (root / archived.name).symlink_to(archived)
    assert find_latest_valid(root) == str(root / archived.name)
    before = {path.name: path.read_bytes() for path in archived.iterdir()}
    fill(root, 2, keep=1)
    assert Catalog(root).steps() == [2]
    assert not (root / archived.name).is_symlink()
    assert {path.name: path.read_bytes() for path in archived.iterdir()} == before


def test_a_newer_one_found_damaged_does_not_push_out_a_good_one(root: pathlib.Path) -> None:
    """It passes the cheap check (its sizes are right), so it must be remembered as damaged."""
    fill(root, 1, 9)
    shard = root / "step-00000009" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    box = {"w": torch.zeros(64)}
    policy = CheckpointPolicy(keep_last=2)
    with Checkpointer(policy, {"box": box}, per_rank={"count": Count()}, store=PosixStore(root)) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 1
        for step in (2, 3):
            checkpointer.save(step)
    assert [entry.name for entry in sorted(root.glob("step-*"))] == [
        "step-00000002.a1",
        "step-00000003.a1",
        "step-00000009",
    ]


def test_left_overs_of_dead_attempts_are_removed_and_only_those(root: pathlib.Path) -> None:
    fill(root, 1)
    for name in ("step-00000002", "step_3", "step-4"):
        (root / name).mkdir()
        (root / name / ".done-0.json").write_text("{}")
    (root / "step-00000005").mkdir()
    fill(root, 6)
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == [
        "step-00000001", "step-00000005", "step-00000006.a1", "step-4", "step_3"]  # fmt: skip
