"""Saving and restoring with one rank: the values, the whole state, and what does not fit."""

from __future__ import annotations

import copy
import pathlib
import threading
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, find_latest_valid
from sgpu.checkpoint.live.stage import Staged
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    InputError,
)
from sgpu.testing.stores import GateStore
from tests.checkpoint.small import Thing, save


def restore_into(root: pathlib.Path, per_rank: Any = None, **state: Any) -> Any:
    with Checkpointer(CheckpointPolicy(str(root)), state, per_rank=per_rank) as checkpointer:
        return checkpointer.restore()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int, *, zero: bool = True) -> float:
    torch.manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randn(6, 4)).square().mean()
        if zero:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def fingerprint(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(flat.numpy()))
    if isinstance(value, dict):
        return {key: fingerprint(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    return value


def test_nothing_to_restore(tmp_path: pathlib.Path) -> None:
    assert restore_into(tmp_path / "new", box={"a": 1}) is None


def test_values_are_those_at_the_call_however_slow_the_writer(tmp_path: pathlib.Path) -> None:
    gate = GateStore(PosixStore(tmp_path))
    box = {"w": torch.ones(4), "list": [1, [2]], "array": np.arange(3.0), "d": {"x": 1}}
    own = Thing({"n": [5], "t": torch.ones(2)})
    checkpointer = Checkpointer(CheckpointPolicy(), {"box": box}, per_rank={"own": own}, store=gate)
    checkpointer.save(1)
    assert gate.reached.wait(30)
    assert checkpointer.poll() == []
    box["w"].fill_(7)
    box["list"][1].append(3)
    box["array"][:] = 9
    box["d"]["x"] = 2
    own.state["n"].append(6)
    own.state["t"].fill_(8)
    gate.open_gate()
    checkpointer.close()
    live = {"w": torch.zeros(4), "list": [], "array": None, "d": {}}
    mine = Thing({"n": [], "t": torch.zeros(2)})
    restored = restore_into(tmp_path, box=live, per_rank={"own": mine})
    assert restored.step == 1
    assert live["w"].tolist() == [1, 1, 1, 1]
    assert (live["list"], live["d"], live["array"].tolist()) == ([1, [2]], {"x": 1}, [0, 1, 2])
    assert (mine.state["n"], mine.state["t"].tolist()) == ([5], [1, 1])


def test_background_staging_is_joined_by_the_optimizer_itself(tmp_path: pathlib.Path) -> None:
    """Parameters and their state are copied while the next step runs; buffers, which it changes, at the call."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1, seed=1)
    hooks = dict(_global_optimizer_pre_hooks)  # of what other tests dropped without an end
    policy = CheckpointPolicy(keep_last=99)
    checkpointer = Checkpointer(
        policy, {"model": model, "optimizer": optimizer}, store=PosixStore(tmp_path), staging="background"
    )
    wanted = {}
    for step in range(12):
        wanted[step] = fingerprint([model.state_dict(), optimizer.state_dict()])
        checkpointer.save(step)
        train(model, optimizer, 1, seed=step)
    checkpointer.close()
    assert [report.error for report in checkpointer.poll()] == [None] * 12
    assert dict(_global_optimizer_pre_hooks) == hooks
    for step in range(11, -1, -1):
        fresh = network(1)
        other = torch.optim.AdamW(fresh.parameters())
        assert restore_into(tmp_path, model=fresh, optimizer=other).step == step
        assert fingerprint([fresh.state_dict(), other.state_dict()]) == wanted[step]
        (pathlib.Path(Catalog(tmp_path).path(step)) / ".metadata").unlink()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What is staged in the background is copied only once this is set."""
    found = threading.Event()
    copy_now = Staged.copy

    def late(self: Staged) -> None:
        assert found.wait(30)
        copy_now(self)

    monkeypatch.setattr(Staged, "copy", late)
    return found


def test_background_staging_notices_a_change_that_came_too_early(
    tmp_path: pathlib.Path, changed: threading.Event
) -> None:
    model = network()
    checkpointer = Checkpointer(CheckpointPolicy(), {"m": model}, store=PosixStore(tmp_path), staging="background")
    checkpointer.save(1)
    with torch.no_grad():
        model[0].weight.fill_(7)
    changed.set()
    with pytest.raises(CheckpointSaveError, match=r"m\.0\.weight was changed after save\(\)"):
        checkpointer.wait()
    checkpointer.save(2)
    checkpointer.before_optimizer_step()
    with torch.no_grad():
        model[0].weight.fill_(8)
    checkpointer.close()
    fresh = network(1)
    assert restore_into(tmp_path, m=fresh).step == 2
    assert bool((fresh[0].weight == 7).all())


def test_automatic_staging_forgives_a_change_that_came_too_early_once(
    tmp_path: pathlib.Path, changed: threading.Event
) -> None:
    model = network()
    checkpointer = Checkpointer(CheckpointPolicy(), {"m": model}, store=PosixStore(tmp_path), staging="auto")
    checkpointer.save(1)
    with torch.no_grad():
        model[0].weight.fill_(7)
    changed.set()
    checkpointer.wait()
    changed.clear()
    checkpointer.save(2)
    with torch.no_grad():
        model[0].weight.fill_(8)
    changed.set()
    checkpointer.close()
    first, second = checkpointer.poll()
    assert "m.0.weight was changed after save()" in (first.error or "")
    assert second.error is None
    fresh = network(1)
    assert restore_into(tmp_path, m=fresh).step == 2
    assert bool((fresh[0].weight == 7).all())


def test_a_second_save_waits_for_the_first_and_counts_it(tmp_path: pathlib.Path) -> None:
    import threading

    gate = GateStore(PosixStore(tmp_path))
    box = {"w": torch.ones(4)}
    checkpointer = Checkpointer(CheckpointPolicy(), {"box": box}, store=gate)
    checkpointer.save(1)
    assert gate.reached.wait(30)
    opener = threading.Timer(0.3, gate.open_gate)
    opener.start()
    checkpointer.save(2)
    checkpointer.close()
    first, second = checkpointer.poll()
    assert (first.step, second.step, first.error, second.error) == (1, 2, None, None)
    assert second.blocked_seconds > 0.25 > first.blocked_seconds
    assert Catalog(tmp_path).steps() == [1, 2]


def test_each_save_holds_its_own_tensors(tmp_path: pathlib.Path) -> None:
    box = {"w": torch.zeros(1000)}
    with Checkpointer(CheckpointPolicy(str(tmp_path), keep_last=9), {"box": box}) as checkpointer:
        for step in range(1, 6):
            box["w"].fill_(step)
            checkpointer.save(step)
    for step in range(5, 0, -1):
        live = {"w": torch.zeros(1000)}
        assert restore_into(tmp_path, box=live).step == step
        assert bool((live["w"] == step).all())
        (pathlib.Path(Catalog(tmp_path).path(step)) / ".metadata").unlink()


def test_state_that_changes_shape_between_saves(tmp_path: pathlib.Path) -> None:
    box = {"w": torch.zeros(10), "note": "short"}
    with Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": box}) as checkpointer:
        checkpointer.save(1)
        box["w"] = torch.arange(300_000.0)
        box["note"] = "long" * 50_000
        box["more"] = torch.ones(2)
        checkpointer.save(2)
    live = {"w": torch.zeros(300_000), "note": "", "more": torch.zeros(2)}
    restore_into(tmp_path, box=live)
    assert live["w"].tolist() == list(range(300_000))
    assert live["note"] == "long" * 50_000


def test_every_kind_of_value_and_tensor(tmp_path: pathlib.Path) -> None:
    base = torch.randn(10, 6)
    state = {
        "tensors": [
            torch.randint(0, 2, shape).to(dtype)
            for shape in [(), (0,), (0, 5), (1,), (3,), (6,)]
            for dtype in [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64]
        ],
        "views": (base.t(), base[::2, 1:4], torch.randn(3, dtype=torch.complex64).conj()),
        "values": [None, True, 3, 2.5, 1 + 2j, "text", b"bytes", float("inf"), 2**70],
        "containers": {"tuple": (1, (2,)), "set": {1, 2}, "ordered": OrderedDict(b=1, a=2), 5: "five", (1, "a"): 0,
                       "deque": deque([1, 2], maxlen=3), "counter": Counter("aab"), "size": torch.Size([2, 3])},
        "numpy": {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(1.5)},
        "torch": {"dtype": torch.bfloat16, "device": torch.device("cpu")},
    }  # fmt: skip
    save(tmp_path, thing=Thing(copy.deepcopy(state)))
    thing = Thing({})
    restore_into(tmp_path, thing=thing)
    found = thing.state
    assert fingerprint(found["tensors"]) == fingerprint(state["tensors"])
    assert fingerprint([v.resolve_conj() for v in found["views"]]) == fingerprint(
        [v.resolve_conj() for v in state["views"]]
    )
    assert found["values"] == state["values"]
    assert found["containers"] == state["containers"]
    assert [type(value) for value in found["containers"].values()] == [type(v) for v in state["containers"].values()]
    assert found["containers"]["deque"].maxlen == 3
    assert found["numpy"]["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["numpy"]["array"].dtype == np.int16
    assert type(found["numpy"]["scalar"]) is np.float32
    assert found["torch"] == state["torch"]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, centered=True),
    "lbfgs-free adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("zero", [True, False], ids=["grads cleared", "grads still set"])
def test_training_goes_on_to_the_bit(kind: str, zero: bool, tmp_path: pathlib.Path) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 3, seed=1, zero=zero)
    scheduler.step()
    save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    fresh = network(seed=99)
    fresh_optimizer = OPTIMIZERS[kind](list(fresh.parameters()))
    fresh_scheduler = torch.optim.lr_scheduler.StepLR(fresh_optimizer, 1, gamma=0.5)
    restore_into(tmp_path, model=fresh, optimizer=fresh_optimizer, scheduler=fresh_scheduler)
    assert fingerprint(fresh.state_dict()) == fingerprint(model.state_dict())
    assert fingerprint(fresh_optimizer.state_dict()) == fingerprint(optimizer.state_dict())
    assert fresh_scheduler.state_dict() == scheduler.state_dict()
    losses = train(model, optimizer, 3, seed=2), train(fresh, fresh_optimizer, 3, seed=2)
    assert losses[0] == losses[1]
    assert fingerprint(fresh.state_dict()) == fingerprint(model.state_dict())


def test_a_never_stepped_optimizer_with_gradients_set(tmp_path: pathlib.Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 4)).sum().backward()
    save(tmp_path, model=model, optimizer=optimizer)
    fresh = network(5)
    stepped = torch.optim.AdamW(fresh.parameters())
    train(fresh, stepped, 2, seed=3)
    restore_into(tmp_path, model=fresh, optimizer=stepped)
    assert not stepped.state_dict()["state"]
    assert fingerprint(fresh.state_dict()) == fingerprint(model.state_dict())


def test_state_of_parameters_frozen_later_and_several_groups(tmp_path: pathlib.Path) -> None:
    model = network()
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[3].parameters()), "lr": 0.2}]
    optimizer = torch.optim.Adam(groups)
    train(model, optimizer, 2, seed=1)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    train(model, optimizer, 1, seed=2)
    optimizer.param_groups[1]["lr"] = 0.05
    save(tmp_path, model=model, optimizer=optimizer)
    fresh = network(7)
    other = torch.optim.Adam([{"params": list(fresh[0].parameters())}, {"params": list(fresh[3].parameters())}], lr=1.0)
    restore_into(tmp_path, model=fresh, optimizer=other)
    assert fingerprint(other.state_dict()) == fingerprint(optimizer.state_dict())
    assert other.param_groups[1]["lr"] == 0.05


def test_other_groups_are_a_mismatch(tmp_path: pathlib.Path) -> None:
    model = network()
    save(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters()))
    split = [{"params": list(model[0].parameters())}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    with pytest.raises(CheckpointMismatchError, match="parameter groups"):
        restore_into(tmp_path, model=model, optimizer=torch.optim.Adam(split))
    with pytest.raises(CheckpointMismatchError, match=r"only in the checkpoint: optimizer: model\.1\.bias"):
        restore_into(tmp_path, model=model, optimizer=torch.optim.Adam(split[:1]))


def test_groups_in_another_order_are_a_mismatch_and_parameters_in_another_order_are_none(
    tmp_path: pathlib.Path,
) -> None:
    """By names each parameter gets its own state; a scheduler would give one group the other's rate."""

    def groups(model: nn.Sequential, first: int, second: int) -> list[dict[str, Any]]:
        return [{"params": list(model[index].parameters()), "lr": index / 100 + 0.01} for index in (first, second)]

    model = network()
    optimizer = torch.optim.Adam(groups(model, 0, 3))
    train(model, optimizer, 2, seed=1)
    save(tmp_path, model=model, optimizer=optimizer)
    fresh = network(7)
    told = r"groups: in another order: group 0, of model\.3\.weight, was group 1"
    with pytest.raises(CheckpointMismatchError, match=told):
        restore_into(tmp_path, model=fresh, optimizer=torch.optim.Adam(groups(fresh, 3, 0)))
    turned = groups(fresh, 0, 3)
    turned[0]["params"].reverse()
    other = torch.optim.Adam(turned)
    restore_into(tmp_path, model=fresh, optimizer=other)
    for (_, one), (_, same) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert fingerprint(dict(optimizer.state.get(one, {}))) == fingerprint(dict(other.state.get(same, {})))
    assert train(fresh, other, 2, seed=2) == train(model, optimizer, 2, seed=2)


def test_half_precision_parameters_keep_full_precision_state(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1.0001)
    save(tmp_path, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 4).to(torch.bfloat16)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    restore_into(tmp_path, model=fresh, optimizer=other)
    buffer = other.state[fresh.weight]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert bool((buffer == torch.full(buffer.shape, 1.0001)).all())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_tied_weights_stay_tied_and_are_stored_once(tmp_path: pathlib.Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2, seed=1)
    save(tmp_path, model=model, optimizer=optimizer)
    fresh = Tied()
    other = torch.optim.AdamW(fresh.parameters())
    restore_into(tmp_path, model=fresh, optimizer=other)
    assert fresh.first.weight is fresh.second.weight
    assert len(other.state) == 1
    assert fingerprint(other.state_dict()) == fingerprint(optimizer.state_dict())
    assert train(model, optimizer, 2, seed=2) == train(fresh, other, 2, seed=2)
    opened = Catalog(tmp_path).inspect(1)
    assert {"model.first.weight", "model.second.weight"} <= {tensor.name for tensor in opened.tensors}
    index = Catalog(tmp_path)._open(1).index.places
    assert index["model.first.weight", (0, 0)] == index["model.second.weight", (0, 0)]


@pytest.mark.parametrize("whole", [True, False], ids=["in place", "through load_state_dict"])
def test_weights_saved_apart_go_into_tied_ones_only_if_they_are_equal(whole: bool, tmp_path: pathlib.Path) -> None:
    apart, extra = Tied(), {} if whole else {"seen": 1}
    apart.second.weight = nn.Parameter(apart.first.weight.detach().clone())
    fresh = Tied()
    if extra:
        for model in (apart, fresh):
            model.get_extra_state = lambda: extra  # type: ignore[method-assign]
            model.set_extra_state = lambda state: None  # type: ignore[method-assign]
    save(tmp_path / "equal", model=apart)
    restore_into(tmp_path / "equal", model=fresh)
    assert torch.equal(fresh.second.weight, apart.first.weight)
    with torch.no_grad():
        apart.second.weight[3, 3] += 1
    save(tmp_path / "other", model=apart)
    before = fingerprint(fresh.state_dict())
    with pytest.raises(
        CheckpointMismatchError, match=r"model\.first\.weight and model\.second\.weight \(one live tensor"
    ):
        restore_into(tmp_path / "other", model=fresh)
    assert fingerprint(fresh.state_dict()) == before


class Extra(nn.Module):
    """Holds extra state, and a parameter that a hook gives out as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.extra: Any = {"seen": 0, "t": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_modules(tmp_path: pathlib.Path) -> None:
    model = Extra()
    model.extra = {"seen": 7, "t": torch.ones(2)}
    model.weight.data.fill_(4)
    save(tmp_path, model=model)
    fresh = Extra()
    kept = fresh.weight
    restore_into(tmp_path, model=fresh)
    assert (fresh.extra["seen"], fresh.extra["t"].tolist(), fresh.weight.tolist()) == (7, [1, 1], [4, 4, 4])
    assert fresh.weight is kept


def test_averages_counters_and_scalers(tmp_path: pathlib.Path) -> None:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, seed=1)
    average.update_parameters(model)
    save(tmp_path, model=model, average=average, scaler=Thing({"scale": 2.0, "growth": 3}), box={"warmup": 0.25})
    fresh = network(4)
    other = torch.optim.swa_utils.AveragedModel(fresh)
    scaler, box = Thing({"scale": 1.0, "growth": 0}), {"warmup": 0.0}
    restore_into(tmp_path, model=fresh, average=other, scaler=scaler, box=box)
    assert fingerprint(other.state_dict()) == fingerprint(average.state_dict())
    assert fingerprint(fresh.state_dict()) == fingerprint(model.state_dict())
    assert (scaler.state, box) == ({"scale": 2.0, "growth": 3}, {"warmup": 0.25})


def test_compiled_wrappers_do_not_change_names(tmp_path: pathlib.Path) -> None:
    model = network()
    save(tmp_path, model=torch.compile(model, backend="eager"))
    fresh = network(3)
    restore_into(tmp_path, model=fresh)
    assert fingerprint(fresh.state_dict()) == fingerprint(model.state_dict())


MISFITS: dict[str, tuple[Any, Any, str, str]] = {
    "unexpected key": ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2)}, "unexpected", "box.b"),
    "missing key": ({"a": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}, "missing", "box.b"),
    "missing value": ({"a": torch.ones(2)}, {"a": torch.zeros(2), "n": 1}, "missing", "box.n"),
    "shape": ({"a": torch.ones(2)}, {"a": torch.zeros(3)}, "different", "box.a"),
    "dtype": ({"a": torch.ones(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}, "different", "box.a"),
    "nested": ({"d": {"a": torch.ones(2)}}, {"d": {"c": torch.zeros(2)}}, "missing", "box.d.c"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_touched(case: str, tmp_path: pathlib.Path) -> None:
    saved, live, kind, name = MISFITS[case]
    model = network()
    save(tmp_path, box=saved, model=model)
    live = copy.deepcopy(live)
    before = fingerprint(live)
    other = network(1)
    weights = fingerprint(other.state_dict())
    with pytest.raises(CheckpointMismatchError, match="Nothing was changed") as caught:
        restore_into(tmp_path, box=live, model=other)
    assert any(entry.split(" ")[0] == name for entry in getattr(caught.value, kind))
    assert fingerprint(live) == before
    assert fingerprint(other.state_dict()) == weights


def test_parts_must_be_the_same(tmp_path: pathlib.Path) -> None:
    save(tmp_path, a={"x": 1}, b={"x": 1})
    with pytest.raises(CheckpointMismatchError, match="only in the checkpoint: b") as caught:
        restore_into(tmp_path, a={"x": 0})
    assert caught.value.unexpected == ["b"]
    with pytest.raises(CheckpointMismatchError, match="not in the checkpoint: c"):
        restore_into(tmp_path, a={"x": 0}, b={"x": 0}, c={"x": 0})


def test_per_rank_names_must_be_the_same(tmp_path: pathlib.Path) -> None:
    save(tmp_path, box={"x": 1}, per_rank={"rng": Thing(1)})
    with pytest.raises(CheckpointMismatchError, match="per_rank loader"):
        restore_into(tmp_path, box={"x": 0}, per_rank={"rng": Thing(0), "loader": Thing(0)})


def test_a_name_that_begins_like_another(tmp_path: pathlib.Path) -> None:
    state = {"a": {"x": torch.ones(1)}, "a.b": {"x": torch.full((1,), 2.0)}}
    with Checkpointer(CheckpointPolicy(str(tmp_path)), state) as checkpointer:
        checkpointer.save(1)
    live = {"a": {"x": torch.zeros(1)}, "a.b": {"x": torch.zeros(1)}}
    with Checkpointer(CheckpointPolicy(str(tmp_path)), live) as checkpointer:
        checkpointer.restore()
    assert (live["a"]["x"].item(), live["a.b"]["x"].item()) == (1, 2)


@pytest.mark.parametrize("file", ["__0_0.distcp", "rank-0.pt", "manifest.json", ".metadata"])
def test_a_damaged_newest_is_passed_over_told_and_kept(file: str, tmp_path: pathlib.Path) -> None:
    box = {"w": torch.zeros(100)}
    own = Thing({"n": 0})
    with Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": box}, per_rank={"own": own}) as checkpointer:
        for step in (1, 2):
            box["w"].fill_(step)
            own.state["n"] = step
            checkpointer.save(step)
    path = pathlib.Path(Catalog(tmp_path).path(2)) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    live, mine = {"w": torch.zeros(100)}, Thing({"n": 0})
    restored = restore_into(tmp_path, box=live, per_rank={"own": mine})
    assert (restored.step, live["w"][0].item(), mine.state["n"]) == (1, 1, 1)
    (skipped,) = restored.skipped
    assert skipped.path == str(path.parent)
    assert file in skipped.reason
    assert path.exists()


def test_only_damaged_ones_is_an_error_not_a_fresh_start(tmp_path: pathlib.Path) -> None:
    save(tmp_path, box={"w": torch.ones(100)})
    shard = pathlib.Path(Catalog(tmp_path).path(1)) / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    live = {"w": torch.zeros(100)}
    with pytest.raises(CheckpointCorruptError, match=r"no checkpoint under .* can be used"):
        restore_into(tmp_path, box=live)
    assert not live["w"].any()


def test_a_step_saved_again_goes_to_a_fresh_folder(tmp_path: pathlib.Path) -> None:
    box = {"w": torch.ones(3)}
    with Checkpointer(CheckpointPolicy(str(tmp_path), keep_last=1), {"box": box}) as checkpointer:
        checkpointer.save(4)
        checkpointer.wait()
        first = find_latest_valid(tmp_path)
        box["w"].fill_(2)
        checkpointer.save(4)
    second = find_latest_valid(tmp_path)
    assert first != second
    live = {"w": torch.zeros(3)}
    restore_into(tmp_path, box=live)
    assert live["w"].tolist() == [2, 2, 2]
    assert not pathlib.Path(first or "").exists()


def test_attempt_numbers_are_never_used_twice(tmp_path: pathlib.Path) -> None:
    for expected in ("step-00000001", "step-00000001.a1", "step-00000001.a2"):
        save(tmp_path, box={"w": torch.ones(3)})
        assert pathlib.Path(find_latest_valid(tmp_path) or "").name == expected


def test_metadata_is_kept_and_must_be_json(tmp_path: pathlib.Path) -> None:
    with Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": {"x": 1}}) as checkpointer:
        with pytest.raises(InputError, match="JSON"):
            checkpointer.save(1, metadata={"bad": object()})
        checkpointer.save(1, metadata={"loss": 0.5, "data_position": {"epoch": 2}})
    assert restore_into(tmp_path, box={"x": 0}).metadata["loss"] == 0.5
    assert Catalog(tmp_path).inspect(1).data_position == {"epoch": 2}


@pytest.mark.parametrize(
    ("state", "message"),
    [({"n": 3}, "cannot be restored in place"), ({"": {}}, "expected names"), ({"f": len}, "cannot be restored")],
)
def test_what_cannot_be_restored_is_refused_at_once(state: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=message):
        Checkpointer(CheckpointPolicy(str(tmp_path)), state)


def test_bad_use_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="no place"):
        Checkpointer(CheckpointPolicy(), {"box": {}})
    with pytest.raises(InputError, match=r"torch\.distributed is not initialised"):
        Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": {}}, rank=0, world_size=2)
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": {}})
    for step in (-1, 1.5, True):
        with pytest.raises(InputError, match="step must be"):
            checkpointer.save(step)  # type: ignore[arg-type]
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(1)


def test_an_older_one_on_request(tmp_path: pathlib.Path) -> None:
    value = torch.zeros(2)
    with Checkpointer(CheckpointPolicy(str(tmp_path)), {"value": {"tensor": value}}) as saving:
        for step in (1, 2, 10):
            value.fill_(step)
            saving.save(step)
        saving.wait()
        for before, wanted in ((None, 10), (11, 10), (10, 2), (2, 1)):
            restored = saving.restore(before=before)
            assert restored is not None
            assert (restored.step, value.tolist()) == (wanted, [float(wanted)] * 2)
        assert saving.restore(before=1) is None
