"""Random number generators of a rank: Python, NumPy, torch, CUDA. Seeding, and state that loads with weights_only."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Any

from sgpu.contract.errors import InputError, PositionError
from sgpu.data.ordering.draws import held_generators
from sgpu.data.ordering.generators import set_state, state_of


def seed_everything(seed: int) -> int:
    """Seeds Python, NumPy, torch and (where it is already in use or available) CUDA in this process.

    Args:
        seed: any whole number; NumPy takes it modulo 2**32.

    Returns:
        The seed.

    Raises:
        InputError: it is no whole number.
    """
    import numpy as np
    import torch

    try:
        seed = operator.index(seed)
    except TypeError:
        raise InputError(
            f"seed_everything(seed) takes a whole number; found {seed!r} ({type(seed).__name__})"
        ) from None
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA's generators too, lazily where CUDA has not started
    return seed


class RngState:
    """All generators of this process, as one Checkpointable."""

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, ints, floats, strings and uint8 tensors only."""
        import numpy as np
        import torch

        version, internal, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        state: dict[str, Any] = {
            "python": {"version": version, "internal": list(internal), "gauss": gauss},
            "numpy": {
                "kind": kind,
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy as np
        import torch

        saved = state["python"]
        random.setstate((saved["version"], tuple(saved["internal"]), saved["gauss"]))
        saved = state["numpy"]
        keys = saved["keys"].numpy().astype(np.uint32)
        np.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def loader_parts(loader: Any) -> Iterator[Any]:
    """A loader and what it draws its order from and its samples from, each once; None has none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    seen: set[int] = set()
    for part in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part


class Draws:
    """All that a rank's batches and steps draw from: this process' generators, and those that its loader holds.

    The data set's own belong to it where samples are made in this process (workers have copies, made anew with each
    iterator). A loader that keeps its own state sets its data set's itself.
    """

    def __init__(self, loader: Any) -> None:
        self._rng = RngState()
        self._loader = loader
        dataset = getattr(loader, "dataset", None)
        self._held = list(held_generators(dataset)) if not hasattr(loader, "state_dict") else []

    def _generators(self) -> list[Any]:
        import torch

        told = [getattr(part, "generator", None) for part in loader_parts(self._loader)]
        return list({id(each): each for each in told if isinstance(each, torch.Generator)}.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._rng.state_dict(), "loader": [each.get_state() for each in self._generators()],
            "held": [state_of(each) for each in self._held],
        }  # fmt: skip

    def begun_anew(self, seed: int) -> dict[str, Any]:
        """A state whose generators of this process begin at `seed`; those of the loader stay where they are."""
        before = self._rng.state_dict()
        try:
            seed_everything(seed)
            return self.state_dict()
        finally:
            self._rng.load_state_dict(before)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises:
        PositionError: the loader holds another number of generators than the saved one.
        """
        self._rng.load_state_dict(state)
        saved, live = state.get("loader", []), self._generators()
        if len(saved) != len(live):
            raise PositionError(
                f"the checkpoint holds the state of {len(saved)} torch.Generator(s) of the loader and its samplers; "
                f"this loader has {len(live)}. Make the loader as it was."
            )
        for each, value in zip(live, saved, strict=True):
            each.set_state(value)
        held = state.get("held", [])
        if len(held) != len(self._held):
            raise PositionError(
                f"the checkpoint holds the state of {len(held)} generator(s) that the data set held; this one holds "
                f"{len(self._held)}. Make the data set as it was."
            )
        for each, value in zip(self._held, held, strict=True):
            set_state(each, value)
