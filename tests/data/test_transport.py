"""What a worker sends comes out as it went in, also where it does not go by a slot; and slots come free again."""

from __future__ import annotations

import gc
import os
import pathlib
import pickle
import signal
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from sgpu.contract.errors import DataError
from sgpu.data import DataLoader
from sgpu.data.positions.streams import Envelope, Kind, itself
from sgpu.data.workers.slots import Slots
from sgpu.data.workers.transport import Sealing, seal
from tests.data.batches import Everything, assert_same, everything
from tests.data.samples import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


@pytest.fixture
def slots() -> Slots:
    return Slots(workers=2, each=2)


def sent(data: Any, slots: Slots) -> Any:
    """What comes out of a slot."""
    sealed = seal(Envelope(Kind.BATCH, 3, 1, 16, data), slots, 1)
    assert sealed is not None
    assert slots.taken == 1
    found = pickle.loads(ForkingPickler.dumps(sealed))
    assert slots.taken == 0
    assert found[:4] == (Kind.BATCH, 3, 1, 16)
    return found.data


def of(loader: DataLoader[Any]) -> Slots:
    found = loader._running._sealing.slots
    assert found is not None
    return found


# ---- what comes out


def test_everything_comes_out_as_it_went_in(slots: Slots) -> None:
    assert_same(sent(everything(1), slots), everything(1))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_everything_comes_from_workers(start: str) -> None:
    with DataLoader(Everything(), None, collate_fn=itself, num_workers=1, multiprocessing_context=start) as loader:
        found = list(loader)
        assert of(loader).taken == 0
    for number, one in enumerate(found):
        assert not any(tensor.is_shared() for tensor in one["tensors"])  # so it came by a slot
        assert_same(one, everything(number))


def test_what_comes_out_stays_when_the_slot_is_used_again(slots: Slots) -> None:
    first = sent([torch.zeros(1000), np.zeros(1000), b"\0" * 1000], slots)
    sent([torch.ones(1000), np.ones(1000), b"\1" * 1000], slots)
    assert not first[0].any()
    assert not first[1].any()
    assert first[2] == b"\0" * 1000
    first[0] += 1
    first[1] += 1
    assert first[1].flags.owndata


def test_what_is_one_stays_one_and_views_share(slots: Slots) -> None:
    whole = torch.arange(12)
    same, again, row, other, copied = sent([whole, whole, whole.view(3, 4)[1:], whole[:8], whole.clone()], slots)
    assert same is again
    assert (row.storage_offset(), row.stride()) == (4, (4, 1))
    same[5] = 100
    assert row[0, 1] == other[5] == 100
    assert copied[5] == 5


def test_a_batch_is_let_go_at_once(slots: Slots) -> None:
    """Not by a garbage collection, which a worker that makes large tensors sees too late."""
    data = {"tensor": torch.ones(1000)}
    gone = weakref.ref(data["tensor"])
    gc.disable()
    try:
        seal(Envelope(Kind.BATCH, 0, 0, 1, data), slots, 0)
        del data
        assert gone() is None
    finally:
        gc.enable()


def test_small_batches_are_collated_in_plain_memory() -> None:
    class Rows(Numbers):
        def __getitem__(self, number: int) -> Any:
            return torch.full((10 if number < 2 else 2_000_000,), number, dtype=torch.int64)

    with DataLoader(Rows(4), 2, num_workers=1) as loader:
        small, large = loader
    assert (small.is_shared(), large.is_shared()) == (False, True)
    assert (small[:, 0].tolist(), large[:, -1].tolist()) == ([0, 1], [2, 3])


# ---- what goes as torch sends it


UNFIT: dict[str, Any] = {
    "shared already": torch.ones(3).share_memory_(),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "with a gradient": torch.ones(3, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "a conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "no memory": torch.ones(3, device="meta"),
    "a little of much": torch.ones(10_000)[:3],
    "a large tensor": torch.ones(2_000_000),
    "a large array": np.ones(3_000_000),
    "many bytes": [bytes(1 << 20)] * 20 + [os.urandom(1 << 20) for _ in range(17)],
    "a storage": torch.ones(3).untyped_storage(),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_unfit_goes_as_torch_sends_it(name: str, slots: Slots) -> None:
    envelope = Envelope(Kind.BATCH, 0, 0, 1, {"before": np.ones(1000), "it": UNFIT[name]})
    assert seal(envelope, slots, 0) is None
    assert slots.taken == 0


def test_memory_that_is_shared_stays_shared() -> None:
    class Told(Numbers):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.board = torch.zeros(1).share_memory_()

        def __getitem__(self, number: int) -> Any:
            return self.board, torch.ones(3)

    data = Told(1)
    with DataLoader(data, None, num_workers=1) as loader:
        (board, _) = next(iter(loader))
        data.board[0] = 7
        assert board[0] == 7


def test_without_a_free_slot_it_goes_as_torch_sends_it(slots: Slots) -> None:
    envelope = Envelope(Kind.BATCH, 0, 0, 1, torch.ones(3))
    assert [seal(envelope, slots, 0) is None for _ in range(3)] == [False, False, True]
    assert seal(envelope, slots, 1) is not None  # the other worker's


@pytest.mark.parametrize("missing", [True, False])
def test_without_such_memory_it_goes_as_torch_sends_it(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(38, "Function not implemented")

    if missing:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    with DataLoader(Everything(), None, collate_fn=itself, num_workers=1) as loader:
        found = list(loader)
        assert loader._running._sealing.slots is None
    assert all(tensor.is_shared() for tensor in found[0]["tensors"])
    assert [one["scalar"].item() for one in found] == [0, 1, 2, 3, 4]


def test_what_does_not_fit_again_and_again_is_tried_less_often(monkeypatch: pytest.MonkeyPatch, slots: Slots) -> None:
    tried = []

    def refuse(envelope: Envelope, *_: Any) -> None:
        tried.append(envelope.number)

    monkeypatch.setattr("sgpu.data.workers.transport.seal", refuse)
    monkeypatch.setattr("sgpu.data.workers.transport.get_worker_info", lambda: SimpleNamespace(id=0))
    sealing = Sealing(itself)
    sealing.slots = slots
    envelopes = [Envelope(Kind.BATCH, number, 0) for number in range(300)]
    assert [sealing(envelope) for envelope in envelopes] == envelopes
    assert tried == [0, 2, 6, 14, 30, 62, 126, 190, 254]


# ---- ends


def test_what_cannot_be_pickled_is_told() -> None:
    class Unpicklable(Numbers):
        def __getitem__(self, number: int) -> Any:
            return lambda: number

    with (
        DataLoader(Unpicklable(2), None, num_workers=1) as loader,
        pytest.raises((AttributeError, pickle.PicklingError), match="lambda"),
    ):
        list(loader)


def test_what_cannot_be_unpickled_gives_its_slot_back(slots: Slots) -> None:
    sealed = seal(Envelope(Kind.BATCH, 0, 0, 1, Sour()), slots, 0)
    content = ForkingPickler.dumps(sealed)
    with pytest.raises(ZeroDivisionError):
        pickle.loads(content)
    assert slots.taken == 0


class Sour:
    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


@pytest.mark.parametrize("lives_on", [None, False])
def test_batches_that_nobody_took_give_their_slots_back(lives_on: bool | None) -> None:
    class Rows(Numbers):
        def __getitem__(self, number: int) -> Any:
            return torch.full((100,), number)

    with DataLoader(Rows(40), 2, num_workers=2, persistent_workers=lives_on) as loader:
        for stop in range(6):
            for number, batch in enumerate(loader):
                assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
                assert not batch.is_shared()
                if number == stop:
                    break
        loader.load_state_dict(loader.state_dict())
        assert [batch[0, 0].item() for batch in loader] == list(range(12, 40, 2))
        assert of(loader).taken == 0


class Deadly:
    """Ends the process in the middle of being pickled, unless that was seen before."""

    def __init__(self, seen: pathlib.Path) -> None:
        self.seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.seen.exists():
            self.seen.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int, (5,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch may raise in a destructor too
def test_a_worker_that_is_killed_while_it_writes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.callbacks", [])  # torch's signal handler may raise inside one of them
    seen = tmp_path / "seen"

    class Dies(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> Any:
            return [torch.full((1000,), number), Deadly(seen) if number == 3 else 5]

    with DataLoader(Dies(), None, num_workers=2, persistent_workers=False) as loader:
        with pytest.raises((RuntimeError, DataError), match=r"exited unexpectedly|killed|died"):
            list(loader)
        assert seen.exists()
        found: Iterator[Any] = iter(loader)
        assert [[one[0][-1].item(), one[1]] for one in found] == [[number, 5] for number in range(6)]
