"""The loader's position, the random streams and own buffers of a rank, as one thing that is checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sgpu.contract.errors import PositionError
from sgpu.data.ordering.order import mix
from sgpu.training.buffers import OwnBuffers
from sgpu.training.progress import Progress
from sgpu.training.rng import Draws, loader_parts


class Position:
    """A rank's place in its loader, its random streams and its own buffers, made to resume at the exact next batch.

    A loader that can tell its state (ours, torchdata's) is set to it. Any other is replayed: its iterator is made anew
    from the random state that the epoch began with, and the trained batches are drawn and dropped; exact for the same
    world size, slow for long epochs. Workers that torch keeps between epochs are started anew with each.
    """

    def __init__(self, loader: Any, progress: Progress, *, seed: int = 0, buffers: OwnBuffers | None = None) -> None:
        self._loader = loader
        self._progress = progress
        self._seed, self._buffers = seed, buffers
        self._ahead = 0  # the loader's epoch less the loop's
        self._draws = Draws(loader)
        self._epoch_rng: dict[str, Any] | None = None
        self._restored_rng: dict[str, Any] | None = None
        self._replay = 0
        self._left: int | None = None  # batches that the loader has left of a restored epoch
        self._restored_epoch: tuple[int, int] | None = None  # that epoch, and its batches in all

    @property
    def stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Taken between two batches."""
        state: dict[str, Any] = {
            "rng": self._draws.state_dict(), "batch": self._progress.batch, "seed": self._seed, "ahead": self._ahead,
        }  # fmt: skip
        if self._buffers is not None:
            state["buffers"] = self._buffers.state_dict()
        if self._progress.batch:
            state["epoch_rng"] = self._epoch_rng
        if self._loader is not None and self.stateful:
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Applies what can be applied now; the generators follow in `iterate`, when the iterator exists."""
        self._restored_rng = state["rng"]
        self._epoch_rng = state.get("epoch_rng")
        self._seed, self._ahead = state.get("seed", self._seed), state.get("ahead", 0)
        if self._buffers is not None:
            self._buffers.load_state_dict(state.get("buffers", {}))
        self._load_loader(state)
        if self._loader is not None and not self.stateful:
            self._replay = int(state["batch"])

    def load_from_another_world(
        self, former: Callable[[int], dict[str, Any]], *, rank: int, world: int, former_world: int
    ) -> None:
        """The world size has changed: the data position carries over, if it is the same for all ranks or they merge.

        The random streams of the former ranks cannot be dealt to others. Each rank begins new ones, which depend on
        the run's seed, the step and the rank alone.

        Args:
            former: gives the state that a rank of the former world had.
        """
        state = former(0)
        saved = state.get("loader")
        told = saved if isinstance(saved, dict) else {}
        merges = bool(told.get("merges")) and hasattr(self._loader, "load_states")
        if self._loader is not None and not (told.get("global") or merges):
            raise PositionError(
                f"the checkpoint was made by {former_world} ranks and there are {world} now; the position of "
                f"{type(self._loader).__name__} belongs to each rank of its world alone. Resume with {former_world} "
                "ranks, use sgpu.data.DataLoader over a VolumeDataset or a map-style data set, or keep checkpoints of "
                "epochs' edges (loop.save() in the last step of an epoch): from there any world goes on.",
                saved=former_world,
                found=world,
            )
        self._seed, self._ahead = state.get("seed", self._seed), state.get("ahead", 0)
        if merges:
            self._loader.load_states([former(each)["loader"] for each in range(told["world_size"])])
        else:
            self._load_loader(state)
        self._restored_rng = self._draws.begun_anew(mix(self._seed, self._progress.step, rank))

    def _load_loader(self, state: dict[str, Any]) -> None:
        if self._loader is not None and self.stateful and "loader" in state:
            self._loader.load_state_dict(state["loader"])
            self._left = getattr(self._loader, "batches_left", lambda: None)()

    def batches(self, epoch: int) -> int | None:
        """Batches of an epoch, None where nobody knows. Of one that another world size began, it is not the usual."""
        if self._restored_epoch is not None and self._restored_epoch[0] == epoch:
            return self._restored_epoch[1]
        try:
            return len(self._loader)
        except TypeError:
            return None

    def follow_loader(self) -> None:
        """A loader that found out that its epoch had ended, or drops what another world left of it, is in the next."""
        epoch = self._loader_epoch()
        if epoch is not None and epoch - self._ahead > self._progress.epoch:
            self._progress.epoch, self._progress.batch = epoch - self._ahead, 0

    def follow_others(self, most: Callable[[int], int]) -> bool:
        """Where an epoch ends for all when it ends for one, one that had just ended when it was saved is over for all.

        Args:
            most: gives the largest of all ranks' numbers.

        Returns:
            Whether this rank had more of that epoch.
        """
        epoch = most(self._progress.epoch)
        if epoch <= self._progress.epoch or not getattr(self._loader, "stops_together", False):
            return False
        self._loader.set_epoch(epoch + self._ahead)
        self._progress.epoch, self._progress.batch = epoch, 0
        return True

    def _loader_epoch(self) -> int | None:
        epoch = getattr(self._loader, "epoch", None) if self.stateful else None
        return epoch if isinstance(epoch, int) else None

    def restore_draws(self) -> None:
        """Where there is no loader: the generators as they were."""
        restored, self._restored_rng = self._restored_rng, None
        if restored is not None:
            self._draws.load_state_dict(restored)

    def iterate(self) -> Iterator[Any]:
        """The rest of the current epoch's batches."""
        restored, self._restored_rng = self._restored_rng, None
        replay, self._replay = self._replay, 0
        left, self._left = self._left, None
        at_edge = self._progress.batch == 0
        if left is not None and not at_edge:
            self._restored_epoch = self._progress.epoch, self._progress.batch + left
        if restored is not None and at_edge:
            self._draws.load_state_dict(restored)
        elif restored is not None and self._epoch_rng is not None:
            self._draws.load_state_dict(self._epoch_rng)
        if self._epoch_rng is None or at_edge:
            self._epoch_rng = self._draws.state_dict()
        if at_edge:
            self._ahead = (self._loader_epoch() or self._progress.epoch) - self._progress.epoch
        self._tell_epoch()
        if not self.stateful and getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None  # its workers' generators would go on from the last epoch, out of our reach
        iterator: Iterator[Any] = iter(self._loader)
        for number in range(replay):
            if next(iterator, self) is self:
                raise PositionError(
                    f"the checkpoint was made after batch {replay} of epoch {self._progress.epoch}, but the loader "
                    f"ended after {number}: its data set or batch size has changed since"
                )
        if restored is not None and not at_edge:
            self._draws.load_state_dict(restored)
        return iterator

    def _tell_epoch(self) -> None:
        """Samplers that shuffle by epoch are told which one it is (a loader that keeps its own state knows)."""
        if self.stateful:
            return
        for part in loader_parts(self._loader):
            tell = getattr(part, "set_epoch", None)
            if tell is not None:
                tell(self._progress.epoch)
