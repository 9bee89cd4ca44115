"""A module's state. Wrappers (DDP, torch.compile) are looked through, so that a checkpoint does not depend on them."""

from __future__ import annotations

from typing import Any

import torch

from sgpu.checkpoint.format import values
from sgpu.checkpoint.live.parts import Collector, Loading, PartState, Problems, Saved, new_tensor
from sgpu.contract.errors import InputError


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
            continue
        inner = getattr(module, "_orig_mod", None)  # torch.compile
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


class ModulePart:
    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self._module = module
        for key, value in unwrap(module).named_parameters():
            if torch.nn.parameter.is_lazy(value):
                raise InputError(
                    f"{name}.{key} has no shape yet (a lazy module): run one batch through the model before it is "
                    "handed over, so that a checkpoint can be restored into it"
                )
            if value.is_meta:
                raise InputError(
                    f"{name}.{key} has no data (it is on the meta device): call model.to_empty(device=...) and "
                    "initialize it before it is handed over, so that a checkpoint can be restored into it"
                )

    def collect(self) -> PartState:
        module = unwrap(self._module)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        collector = Collector()
        others: dict[str, Any] = {}
        for key, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                collector.add(f"{self.name}.{key}", value, spread=key in parameters)
            else:
                others[key] = values.encode(value, collector.on_tensor, (self.name, key))
        return PartState(tensors=collector.tensors, skeleton=others)

    def prepare(self, saved: Saved, problems: Problems) -> Loading:
        module = unwrap(self._module)
        live = module.state_dict()
        tensors = {f"{self.name}.{key}": value for key, value in live.items() if isinstance(value, torch.Tensor)}
        others = {f"{self.name}.{key}" for key, value in live.items() if not isinstance(value, torch.Tensor)}
        inner = set(_references(saved.skeleton))  # tensors inside of extra state: no entries of their own
        saved_others = {f"{self.name}.{key}" for key in saved.skeleton}
        problems.names((set(saved.tensors) - inner) | saved_others, set(tensors) | others)
        for name in saved.tensors.keys() & tensors.keys():
            problems.tensor(name, saved.tensors[name], tensors[name])
        own = _storages(module)
        in_place = not saved.skeleton and all(_storage(tensor) in own for tensor in tensors.values())
        targets = {name: tensors[name] for name in saved.tensors.keys() & tensors.keys()}
        if in_place:
            return Loading(targets=targets, finish=lambda: None, live=frozenset(targets), ends=targets)
        # The state_dict is not (all of) the module's own memory: hand it over through load_state_dict.
        fresh = {name: new_tensor(name, info, tensors.get(name)) for name, info in saved.tensors.items()}

        def finish() -> None:
            whole = {key: fresh[f"{self.name}.{key}"] for key in live if f"{self.name}.{key}" in fresh}
            whole.update(values.decode(saved.skeleton, fresh.__getitem__))
            module.load_state_dict({key: whole[key] for key in live}, strict=True)

        return Loading(targets=fresh, finish=finish, ends=targets)


def _references(skeleton: Any) -> list[str]:
    found: list[str] = []

    def note(name: str) -> torch.Tensor:
        found.append(name)
        return torch.empty(0)

    values.decode(skeleton, note)
    return found


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


def _storages(module: torch.nn.Module) -> set[int]:
    with torch.no_grad():
        return {_storage(tensor.detach()) for tensor in (*module.parameters(), *module.buffers())}
