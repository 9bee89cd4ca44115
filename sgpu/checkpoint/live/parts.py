"""How each kind of object in `state` is taken apart, and put back without touching it before all is known to fit.

A part is collected into tensors, under names that stock DCP readers can use, and one skeleton: everything else, with
references where tensors were. It is put back in two strokes: `prepare` compares and gives targets, `finish` hands
over what is not a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sgpu.checkpoint.format import dtypes, values
from sgpu.checkpoint.format.metadata_pickle import TensorInfo
from sgpu.contract.errors import CheckpointSaveError

SKELETON = "__values__"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A live tensor. `spread`: the training keeps it equal on all ranks, so that any rank may write it.

    Other tensors that every rank holds (buffers, an averaged model kept by hand) are written by rank 0, all of them,
    so that a checkpoint never mixes one rank's with another's.
    """

    tensor: torch.Tensor
    spread: bool


@dataclass(frozen=True, kw_only=True)
class PartState:
    tensors: dict[str, Held]
    skeleton: Any


@dataclass(kw_only=True)
class Problems:
    """What does not fit, by name."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def names(self, saved: set[str], live: set[str]) -> None:
        self.missing += sorted(live - saved - set(self.missing))
        self.unexpected += sorted(saved - live - set(self.unexpected))

    def tensor(self, name: str, saved: TensorInfo, live: torch.Tensor) -> None:
        found = (str(live.dtype).removeprefix("torch."), tuple(live.shape))
        if (saved.dtype, saved.shape) != found:
            self.different.append(f"{name} (saved {saved.dtype}{list(saved.shape)}, live {found[0]}{list(found[1])})")

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds of one part."""

    tensors: dict[str, TensorInfo]
    skeleton: Any


@dataclass(frozen=True, kw_only=True)
class Loading:
    """`targets` are filled first, those in `live` when all is known to be whole; `finish` is called when all of all
    parts are. `ends`: the live tensors that saved ones end in, by whatever way; two names may mean the same one.
    """

    targets: dict[str, torch.Tensor]
    finish: Callable[[], None]
    live: frozenset[str] = frozenset()
    ends: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Part(Protocol):
    name: str

    def collect(self) -> PartState:
        """The state as it is now. Tensors are the live ones; everything else is copied."""

    def prepare(self, saved: Saved, problems: Problems) -> Loading:
        """Compares; alters nothing."""


class Collector:
    """Gathers the tensors that `values.encode` meets, by their paths, which begin with the part's name."""

    def __init__(self, *, spread: bool = False) -> None:
        self.tensors: dict[str, Held] = {}
        self._spread = spread

    def add(self, name: str, tensor: torch.Tensor, *, spread: bool) -> dict[str, str]:
        if name in self.tensors:
            raise CheckpointSaveError(
                f"two tensors of the state have the name {name}; rename one", tensor=name, unrecoverable=True
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise CheckpointSaveError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}; only dense tensors with data can be kept.",
                tensor=name,
                unrecoverable=True,
            )
        if not dtypes.can_be_kept(tensor.dtype):
            raise CheckpointSaveError(
                f"{name} is a tensor of {tensor.dtype}, which torch.save does not know either; view it as torch.uint8.",
                tensor=name,
                unrecoverable=True,
            )
        self.tensors[name] = Held(tensor=tensor, spread=spread)
        return values.tensor_reference(name)

    def on_tensor(self, path: values.Path, tensor: torch.Tensor) -> dict[str, str]:
        return self.add(".".join(map(str, path)), tensor, spread=self._spread)


class StatefulPart:
    """Anything with `state_dict` and `load_state_dict`: scheduler, scaler, average.

    The outermost keys must fit in both directions, unless the live object's state is empty still (built lazily); the
    object itself judges what is deeper.
    """

    def __init__(self, name: str, thing: Any, *, replicated: bool = False) -> None:
        self.name = name
        self._thing = thing
        self._replicated = replicated

    def _encoded(self) -> tuple[Any, Collector]:
        collector = Collector(spread=self._replicated)
        return values.encode(self._thing.state_dict(), collector.on_tensor, (self.name,)), collector

    def collect(self) -> PartState:
        skeleton, collector = self._encoded()
        return PartState(tensors=collector.tensors, skeleton=skeleton)

    def prepare(self, saved: Saved, problems: Problems) -> Loading:
        template, collector = self._encoded()
        live = collector.tensors
        if isinstance(template, dict) and template and isinstance(saved.skeleton, dict):
            problems.names({f"{self.name}.{key}" for key in saved.skeleton}, {f"{self.name}.{key}" for key in template})
        targets = {}
        for name, info in saved.tensors.items():
            if name in live:
                problems.tensor(name, info, live[name].tensor)
            targets[name] = new_tensor(name, info, live[name].tensor if name in live else None)

        def finish() -> None:
            self._thing.load_state_dict(values.decode(saved.skeleton, targets.__getitem__))

        return Loading(targets=targets, finish=finish)


def new_tensor(
    name: str, info: TensorInfo, like: torch.Tensor | None, device: torch.device | None = None
) -> torch.Tensor:
    """Room for a saved tensor; sharded as `like` where that has the same shape."""
    dtype = dtypes.find(info.dtype, name)
    if like is not None and tuple(like.shape) == info.shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(info.shape, dtype=dtype, device=device)


class ContainerPart:
    """A dictionary, list or tensor of the user's. Tensors are filled in place; dictionaries that hold tensors must
    have the same keys; everything else is replaced.
    """

    def __init__(self, name: str, container: Any, *, replicated: bool = False) -> None:
        self.name = name
        self._container = container
        self._replicated = replicated

    def collect(self) -> PartState:
        collector = Collector(spread=self._replicated)
        skeleton = values.encode(self._container, collector.on_tensor, (self.name,))
        return PartState(tensors=collector.tensors, skeleton=skeleton)

    def prepare(self, saved: Saved, problems: Problems) -> Loading:
        state = self.collect()
        live = {name: held.tensor for name, held in state.tensors.items()}
        if isinstance(state.skeleton, dict) and isinstance(saved.skeleton, dict):
            problems.names(
                {f"{self.name}.{key}" for key in saved.skeleton}, {f"{self.name}.{key}" for key in state.skeleton}
            )
        problems.names(set(saved.tensors), set(live))
        for name in saved.tensors.keys() & live.keys():
            problems.tensor(name, saved.tensors[name], live[name])

        def finish() -> None:
            _replace(self._container, values.decode(saved.skeleton, live.__getitem__))

        return Loading(targets=live, finish=finish, live=frozenset(live), ends=live)


def _replace(live: Any, saved: Any) -> Any:
    """Puts `saved` into `live`, keeping containers and tensors that are there."""
    if isinstance(live, torch.Tensor):
        return live
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() - saved.keys():
            del live[key]
        for key, value in saved.items():
            live[key] = _replace(live[key], value) if key in live else value
        return live
    if isinstance(live, list) and isinstance(saved, list):
        old = list(live)
        live[:] = [_replace(old[i], value) if i < len(old) else value for i, value in enumerate(saved)]
        return live
    return saved
