"""Twelve defects of the kind that training programs have, put into the product of one cell.

A defect is a change of the product's own source, so that one which no longer fits says so.
"""

from __future__ import annotations

import inspect
import os
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgpu.agent.supervising.generation import Generation
from sgpu.checkpoint.engine import Checkpointer
from sgpu.checkpoint.format import names
from sgpu.checkpoint.helper import desk, finish
from sgpu.checkpoint.keeping import choose, prune
from sgpu.checkpoint.restoring import attempt
from sgpu.checkpoint.restoring.restore import Restorer
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import commit, write
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.data.caching.cache import Cache
from sgpu.data.caching.room import Room
from sgpu.data.positions.planned import Planned
from sgpu.training.meter import Meter

GLOBAL_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A defect, and a cell that shows it.

    Attributes:
        failpoints: what happens instead of the cell's own fault; empty: that.
        seconds: after which a cell that goes on for ever is given up.
    """

    plant: Callable[[], None]
    kind: str
    moment: str
    failpoints: str = ""
    seconds: float = 60.0


def change(owner: Any, name: str, *changes: tuple[str, str], **also: Any) -> None:
    """Compiles a function of a module or class anew, with other text.

    Raises:
        AssertionError: the text is not there, or more than once.
    """
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{name}: expected {old!r} once in\n{source}"
        source = source.replace(old, new)
    function.__globals__.update(also)
    made: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{source}", inspect.getfile(function), "exec"),
         function.__globals__, made)  # fmt: skip
    setattr(owner, name, made[name])


def _commit_before_shards() -> None:
    change(
        finish, "_write_and_commit",
        ("write_share(store, memory, job.folder, job.rank, job.files)", "sums_of(memory, job.files)"),
        ("        commit.commit(store, job, patience)\n",
         "        commit.commit(store, job, patience)\n        write_share(store, memory, job.folder, 0, job.files)\n"),
        ("        commit.wait_for_commit(store, job, patience)\n",
         "        commit.wait_for_commit(store, job, patience)\n"
         "        write_share(store, memory, job.folder, job.rank, job.files)\n"),
        sums_of=write.sums_of,
    )  # fmt: skip
    assert callable(commit.check_sizes)
    commit.check_sizes = lambda *_: None


def _steps_compared_as_text() -> None:
    real = names.step_folders
    names.step_folders = lambda found: sorted(real(found), key=lambda folder: str(folder.step), reverse=True)


def _random_draws_of_rank_0_for_all() -> None:
    change(attempt, "_own_state", ("read_per_rank(reader, ranks.rank)", "read_per_rank(reader, 0)"))


def _skip_applied_in_each_epoch() -> None:
    change(
        Planned,
        "load",
        ('state["cursor"])\n    self.ended', 'state["cursor"])\n    self.skip = self._start\n    self.ended'),
    )
    change(Planned, "accept", ("self._go(self.epoch + 1, 0)", 'self._go(self.epoch + 1, getattr(self, "skip", 0))'))


def _heartbeat_from_a_side_thread() -> None:
    def pulse(slot: Any) -> None:
        while True:
            beat = slot.read()
            slot.beat(beat.step, beat.epoch, -1)
            time.sleep(0.2)

    def start(meter: Any) -> None:
        if not hasattr(meter, "pulse"):
            meter.pulse = threading.Thread(target=pulse, args=(meter._slot,), daemon=True)
            meter.pulse.start()

    began = "    now = time.perf_counter()\n"
    change(Meter, "training", (began, f"    start(self)\n{began}"), start=start)


def _a_save_not_awaited() -> None:
    for name in ("wait", "close"):
        change(Checkpointer, name, ("    self._settle()\n", ""), ("    self._outcomes.raise_error()\n", "    return\n"))


def _prune_before_durable() -> None:
    def prune_early(store: Store, job: SaveJob) -> None:
        for folder in choose.committed(store) if job.rank == 0 else []:
            prune.remove(store, folder.name)

    change(
        finish, "finish",
        ("        _write_and_commit(", "        prune_early(store, job)\n        _write_and_commit("),
        prune_early=prune_early,
    )  # fmt: skip
    assert callable(desk.finish)
    desk.finish = finish.finish


def _newest_by_mtime() -> None:
    real = choose.committed

    def newest(store: Store) -> list[names.StepFolder]:
        assert store.local_root is not None
        root = store.local_root
        return sorted(real(store), key=lambda folder: os.stat(root / folder.name).st_mtime, reverse=True)

    choose.committed = newest


def _loader_one_batch_behind() -> None:
    change(Planned, "state", ('"cursor": self._cursor', f'"cursor": max(0, self._cursor - {GLOBAL_BATCH})'))


def _cache_trusts_a_partial_file() -> None:
    def bring(self: Any, entry: Any, path: str, *_: Any) -> str:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            self.reading.copy(entry, file.fileno())
        return path

    for owner, name in ((Cache, "is_here"), (Cache, "_bring"), (Room, "has_plenty")):
        assert callable(getattr(owner, name)), name
    Room.has_plenty = lambda self, size: False  # type: ignore[method-assign]  # so that each file comes this way
    Cache.is_here = lambda self, path, number: os.path.exists(path)  # type: ignore[method-assign]
    Cache._bring = bring  # type: ignore[method-assign]


def _exit_0_is_success() -> None:
    change(
        Generation, "judge",
        ("    elif ended is not None:\n",
         "    elif ended is not None and ended.status == 0:\n        self.finished[rank] = self._clock.monotonic()\n"
         "    elif ended is not None:\n"),
    )  # fmt: skip


def _any_exception_falls_back() -> None:
    real = Restorer.restore

    def restore(self: Restorer, *arguments: Any, **options: Any) -> Any:
        try:
            return real(self, *arguments, **options)
        except Exception:
            return None

    Restorer.restore = restore  # type: ignore[method-assign]


PLANTED = {
    "commit before shards": Planted(
        plant=_commit_before_shards, kind="several ranks killed", moment="half a shard",
    ),
    "steps compared as text": Planted(
        plant=_steps_compared_as_text, kind="launcher killed", moment="before the result",
        failpoints="worker.result@0!=launcher",
    ),
    "random draws of rank 0 for all": Planted(
        plant=_random_draws_of_rank_0_for_all, kind="launcher killed", moment="before all-reduce",
    ),
    "skip applied in each epoch": Planted(
        plant=_skip_applied_in_each_epoch, kind="launcher killed", moment="before all-reduce",
        failpoints="training.step@0%8!=launcher",
    ),
    "heartbeat from a side thread": Planted(
        plant=_heartbeat_from_a_side_thread, kind="SIGSTOP", moment="between backward and step",
        failpoints="job.before_step@0%7!=spin", seconds=12.0,
    ),
    "a save not awaited": Planted(
        plant=_a_save_not_awaited, kind="I/O error for good", moment="before commit",
        failpoints="checkpoint.write@1%12!=io_for_good",
    ),
    "prune before durable": Planted(
        plant=_prune_before_durable, kind="several ranks killed", moment="before commit",
        failpoints="checkpoint.metadata#3!=several",
    ),
    "newest by mtime": Planted(
        plant=_newest_by_mtime, kind="launcher killed", moment="before all-reduce",
        failpoints="training.step@0%8!=touch; training.step@0%8!=launcher",
    ),
    "loader state one batch behind": Planted(
        plant=_loader_one_batch_behind, kind="launcher killed", moment="before all-reduce",
        failpoints="training.step@0%8!=launcher",
    ),
    "the cache trusts a partial file": Planted(
        plant=_cache_trusts_a_partial_file, kind="SIGKILL", moment="half a file fetched",
    ),
    "exit 0 is success": Planted(plant=_exit_0_is_success, kind="exit 0", moment="before the result"),
    "any exception falls back": Planted(plant=_any_exception_falls_back, kind="I/O error for good", moment="restore"),
}  # fmt: skip
