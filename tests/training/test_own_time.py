"""What of a step is a rank's own, under a clock that model, backward and body move on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from sgpu import runtime
from sgpu.training.own_time import OwnTime

_now = [0.0]


def _passes(seconds: float) -> None:
    _now[0] += seconds


class _Takes(torch.autograd.Function):
    """Forward and backward take a second and two."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        _passes(1)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _passes(2)
        return grad


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.last(_Takes.apply(self.first(value)))  # type: ignore[no-untyped-call]


def _clock() -> float:
    return _now[0]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model() -> DDP:
    return DDP(_Net())


@pytest.fixture
def optimizer(model: DDP) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _step(own: OwnTime, model: nn.Module, optimizer: torch.optim.Optimizer, *, before_step: float = 0.0) -> None:
    own.begin()
    _passes(10)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    _passes(before_step)
    optimizer.step()
    _passes(30)


def test_forward_backward_and_the_rest_of_the_body_are_own(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    assert own.measures
    for _ in range(3):
        _step(own, model, optimizer)
        assert own.take() == 10 + 1 + 2 + 30


def test_what_follows_the_last_gradient_may_be_a_wait(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    _step(own, model, optimizer, before_step=1000)
    assert own.take() == 10 + 1 + 2 + 30


def test_the_synchronisation_of_buffers_is_a_wait(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    synchronise = model._pre_forward

    def slow(*arguments: Any, **named: Any) -> Any:
        _passes(1000)
        return synchronise(*arguments, **named)

    model._pre_forward = slow  # type: ignore[method-assign]
    _step(own, model, optimizer)
    assert own.take() == 10 + 1 + 2 + 30


def test_waits_between_and_inside_steps_are_not_own(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    _step(own, model, optimizer)
    own.pause()
    _passes(1000)  # for the next batch of the same step
    own.begin()
    _passes(5)
    with own.waiting():
        _passes(1000)
    _passes(5)
    assert own.take() == 43 + 10
    _passes(1000)
    assert own.take() == 0


def test_without_an_optimizer_what_follows_the_backward_is_not_counted(model: DDP) -> None:
    own = OwnTime(model, None, clock=_clock)
    own.begin()
    model(torch.ones(1, 2)).sum().backward()
    _passes(7)
    assert own.take() == 3


@pytest.mark.parametrize("part", [None, _Net(), "no model"])
def test_where_nothing_can_be_told(part: Any) -> None:
    own = OwnTime(part, None, clock=_clock)
    own.begin()
    _passes(5)
    assert not own.measures
    assert own.take() == 0


class _Sharded(nn.Module):
    """Sharded layer by layer. Each takes a second in its forward, again where it is computed anew in the backward."""

    def __init__(self, layers: int = 2, *, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fully_shard(_Layer(), mesh=_cpu()) for _ in range(layers))
        self.again = again
        fully_shard(self, mesh=_cpu())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        _passes(100)  # no sharded module's: it may hold waits
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False) if self.again else layer(value)
        return value


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Takes.apply(self.inner(value))  # type: ignore[no-any-return, no-untyped-call]


def _cpu() -> Any:
    return dist.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("again", [False, True])
def test_sharded_modules_forward_is_own_and_their_backward_may_wait(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unshard, waits = FSDPParamGroup.wait_for_unshard, []

    def slow(self: Any) -> None:
        waits.append(self)
        _passes(1000)
        unshard(self)

    monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", slow)
    model = _Sharded(again=again)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnTime(model, optimizer, clock=_clock)
    for _ in range(3):
        _step(own, model, optimizer)
        assert own.take() == 10 + 2 + 30
    assert waits, "there were some"
    own.begin()
    loss = model(torch.ones(1, 2)).sum()
    with own.waiting():
        _passes(1000)
    loss.backward()
    assert own.take() == 2, "nor does the backward count after a wait"
    own.close()
    assert all(not layer._forward_hooks or own._leave not in layer._forward_hooks.values() for layer in model.layers)


def test_of_many_sharded_modules_some_stand_for_all() -> None:
    model = _Sharded(layers=40)
    own = OwnTime(model, None, clock=_clock)
    hooked = [own._leave in layer._forward_hooks.values() for layer in model.layers]
    assert sum(hooked) == 14
    own.begin()
    model(torch.ones(1, 2))
    assert own.take() == pytest.approx(40)


def test_a_compiled_model_gets_no_hooks() -> None:
    model = _Sharded()
    model.layers[0].compile(backend="eager")
    assert not OwnTime(model, None, clock=_clock).measures


def test_a_loop_that_reduces_by_itself_says_where_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_waited_seconds", 0.0)
    monkeypatch.setattr(runtime.time, "perf_counter", _clock)
    own = OwnTime(_Net(), None, clock=_clock)
    for taken in (0, 10 + 5 + 5):  # the first wait tells that there are such
        own.begin()
        _passes(10)
        with runtime.waiting():
            _passes(500)
            with runtime.waiting():
                _passes(500)
        _passes(5)
        with own.waiting():
            _passes(1000)
        _passes(5)
        assert own.take() == taken


def test_declared_waits_do_not_count_in_data_parallel_either(
    model: DDP, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_waited_seconds", 0.0)
    monkeypatch.setattr(runtime.time, "perf_counter", _clock)
    own = OwnTime(model, optimizer, clock=_clock)
    own.begin()
    loss = model(torch.ones(1, 2)).sum()
    with runtime.waiting():
        _passes(1000)
    loss.backward()
    with runtime.waiting():
        _passes(1000)
    optimizer.step()
    _passes(30)
    with runtime.waiting():
        _passes(1000)
    assert own.take() == 1 + 2 + 30


def test_closed_it_leaves_no_hook(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    own.close()
    assert not model._forward_pre_hooks
    assert not model.module._forward_pre_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    _step(own, model, optimizer)
    assert own.take() == 0


def test_a_large_model_has_few_hooks(group: None) -> None:
    model = DDP(nn.Sequential(*(nn.Linear(1, 1) for _ in range(500))))
    own = OwnTime(model, None, clock=_clock)
    hooked = [bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]
    assert hooked[0], "the gradient that comes last"
    assert sum(hooked) <= 32
    own.close()


def test_copies_and_files_of_the_model_are_as_without(model: DDP, optimizer: torch.optim.Optimizer) -> None:
    own = OwnTime(model, optimizer, clock=_clock)
    average = copy.deepcopy(model.module)
    _step(own, model, optimizer)
    again = pickle.loads(pickle.dumps(model.module))
    for one in (average, again):
        one(torch.ones(1, 2)).sum().backward()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
