"""An optimizer's state, by the names of its parameters.

Nothing here asks the optimizer to step or to make its state: gradients may be set, the optimizer may never have
stepped, and parameters may be frozen. A fresh optimizer gets all of its state, in the dtype that was saved
(`Optimizer.load_state_dict` would cast it to the parameter's).
"""

from __future__ import annotations

from typing import Any

import torch

from sgpu.checkpoint.format import values
from sgpu.checkpoint.live.module_part import unwrap
from sgpu.checkpoint.live.parts import Collector, Loading, PartState, Problems, Saved, new_tensor


def is_standard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state lives where torch's own optimizers keep it."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict


class OptimizerPart:
    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: dict[str, torch.nn.Module]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._modules = modules  # filled by the caller, also after this

    def _names(self) -> list[list[tuple[str, torch.Tensor]]]:
        """Groups of (name, parameter); a parameter of no module in the state is called by its position."""
        known: dict[int, str] = {}
        for module_name, module in self._modules.items():
            for name, parameter in unwrap(module).named_parameters():
                known.setdefault(id(parameter), f"{module_name}.{name}")
        return [
            [(known.get(id(param), f"param.{g}.{i}"), param) for i, param in enumerate(group["params"])]
            for g, group in enumerate(self._optimizer.param_groups)
        ]

    def collect(self) -> PartState:
        collector = Collector(spread=True)
        state: dict[str, Any] = {}
        groups = []
        for g, (group, members) in enumerate(zip(self._optimizer.param_groups, self._names(), strict=True)):
            for name, param in members:
                if param in self._optimizer.state:
                    state[name] = values.encode(
                        dict(self._optimizer.state[param]), collector.on_tensor, (self.name, "state", name)
                    )
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            encoded = values.encode(options, collector.on_tensor, (self.name, "groups", g))
            groups.append({"params": [name for name, _ in members], "options": encoded})
        return PartState(tensors=collector.tensors, skeleton={"groups": groups, "state": state})

    def prepare(self, saved: Saved, problems: Problems) -> Loading:
        live_groups = self._names()
        saved_groups = saved.skeleton["groups"]
        self._compare_groups(saved_groups, [[name for name, _ in group] for group in live_groups], problems)
        params = {name: param for group in live_groups for name, param in group}
        targets: dict[str, torch.Tensor] = {}
        live: set[str] = set()
        options = list(self._optimizer.param_groups)
        for name, entries in saved.skeleton["state"].items():
            if name in params:
                self._make_room(name, params[name], entries, saved.tensors, targets, live)
        for name, info in saved.tensors.items():
            targets.setdefault(name, new_tensor(name, info, None))

        def finish() -> None:
            for name, param in params.items():
                if name in saved.skeleton["state"]:
                    entries = values.decode(saved.skeleton["state"][name], targets.__getitem__)
                    self._optimizer.state[param] = entries
                else:
                    self._optimizer.state.pop(param, None)
            for group, told in zip(options, saved_groups, strict=True):
                group.update(values.decode(told["options"], targets.__getitem__))

        return Loading(targets=targets, finish=finish, live=frozenset(live))

    def _compare_groups(self, saved: list[Any], live: list[list[str]], problems: Problems) -> None:
        """The order inside of a group does not matter; that of the groups does, since schedulers count them."""
        saved_names = [group["params"] for group in saved]
        problems.names(
            {f"{self.name}: {name}" for group in saved_names for name in group},
            {f"{self.name}: {name}" for group in live for name in group},
        )
        if problems or [set(names) for names in saved_names] == [set(names) for names in live]:
            return
        told = (
            f"saved {[len(group) for group in saved_names]} parameters a group, live {[len(group) for group in live]}"
        )
        if sorted(map(sorted, saved_names)) == sorted(map(sorted, live)):
            turned = next(place for place, names in enumerate(live) if set(names) != set(saved_names[place]))
            before = next(place for place, names in enumerate(saved_names) if set(names) == set(live[turned]))
            told = f"in another order: group {turned}, of {live[turned][0]}, was group {before}; make them as they were"
        problems.different.append(f"{self.name} (its parameter groups: {told})")

    def _make_room(
        self,
        name: str,
        param: torch.Tensor,
        entries: dict[str, Any],
        saved: dict[str, Any],
        targets: dict[str, torch.Tensor],
        live_names: set[str],
    ) -> None:
        """A target for each tensor of one parameter's state: the live one where it fits, else a new one."""
        live_state = self._optimizer.state.get(param, {})
        for key, entry in entries.items():
            if not (isinstance(entry, dict) and entry.get(values.MARK) == "tensor"):
                continue
            info = saved[entry["name"]]
            live = live_state.get(key)
            if isinstance(live, torch.Tensor) and (str(live.dtype), tuple(live.shape)) == (
                f"torch.{info.dtype}",
                info.shape,
            ):
                targets[entry["name"]] = live
                live_names.add(entry["name"])
            elif info.shape == tuple(param.shape) and key != "step":
                targets[entry["name"]] = new_tensor(entry["name"], info, param.detach())
            else:
                targets[entry["name"]] = new_tensor(entry["name"], info, None, self._small_device(param, key))

    def _small_device(self, param: torch.Tensor, key: str) -> torch.device:
        """`step` stays on the host unless the optimizer's kernels read it on the device (as torch does it)."""
        group = next(g for g in self._optimizer.param_groups if any(p is param for p in g["params"]))
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return param.device if on_device else torch.device("cpu")
