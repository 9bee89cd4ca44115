"""Batches come from a loader's workers in slots of shared memory, where they are plain and not too large.

torch makes a shared file of each tensor and sends its descriptor over a socket: a millisecond of CPU, however small it
is. Whatever else is in a batch goes through a pipe, 64 KB at a time. Here a worker packs the whole batch into a slot
and sends its number, and whoever receives that finds an `Envelope` with memory of its own, as torch would have sent it.

As torch sends it goes what multiprocessing has a way of its own for (memory that is shared already and stays it, other
devices, subclasses of tensors, connections), what is too large, and what finds no free slot.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate

from sgpu.data.positions.streams import Envelope
from sgpu.data.workers.slots import Slots, known

_TENSOR_BYTES = 4 << 20  # above this, to map what torch shares costs the loop's process less than to copy it
_SMALL_BYTES = 512
_ALIGNED = 64
_LONGEST_PAUSE = 63
_PLAIN_ARRAYS = "biufcmMSUV"
_ways_of_their_own: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


class Unfit(Exception):
    """This batch goes as torch sends it."""


class Sealed:
    """A batch in a slot, on its way."""

    def __init__(self, number: int, slot: int, size: int) -> None:
        self._where = number, slot, size

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._where


def _opened(number: int, slot: int, size: int) -> Any:
    slots = known(number)
    begin = slots.begin(slot)
    try:
        return pickle.loads(slots.memory[begin : begin + size])
    finally:
        slots.give_back(slot)


class Sealing:
    """torch's `collate_fn`: seals the envelope that `pick` finds in what torch has; without `slots` it stays open."""

    def __init__(self, pick: Callable[[Any], Envelope]) -> None:
        self.slots: Slots | None = None
        self._pick = pick
        self._pause = self._left = 0

    def __call__(self, made: Any) -> Envelope | Sealed:
        envelope, info = self._pick(made), get_worker_info()
        if self.slots is None or info is None:
            return envelope
        if self._left:  # the last ones did not fit, and to find that out costs something
            self._left -= 1
            return envelope
        sealed = seal(envelope, self.slots, info.id)
        self._left = self._pause = 0 if sealed is not None else min(2 * self._pause + 1, _LONGEST_PAUSE)
        return envelope if sealed is None else sealed


def seal(envelope: Envelope, slots: Slots, worker: int) -> Sealed | None:
    """None: it is unfit, or no slot of the worker is free. Raises what pickling the batch raises."""
    slot = slots.take(worker)
    if slot is None:
        return None
    sealed = None
    try:
        room = _Room(slots, slot)
        _Packer(room).dump(envelope)
        sealed = Sealed(slots.number, slot, room.size)
    except Unfit:
        pass
    finally:
        if sealed is None:
            slots.give_back(slot)
    return sealed


class _Room:
    """A slot being filled: with a pickle from its begin on, with tensors and arrays from its end down."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self.number, self.memory = slots.number, slots.memory
        self._begin = self._at = slots.begin(slot)
        self._end = self._begin + slots.slot_bytes

    @property
    def size(self) -> int:
        """Of the pickle."""
        return self._at - self._begin

    def write(self, data: Any) -> None:
        content = memoryview(data.raw() if isinstance(data, pickle.PickleBuffer) else data)
        begin, self._at = self._at, self._at + content.nbytes
        if self._at > self._end:
            raise Unfit
        self.memory[begin : self._at] = content

    def below(self, size: int) -> int:
        """Where so many bytes have room at the end."""
        begin = (self._end - size) // _ALIGNED * _ALIGNED
        if begin < self._at:
            raise Unfit
        self._end = begin
        return begin


class _Packer(pickle.Pickler):
    """Of the protocol that multiprocessing uses, so that objects come out as they would from its pipe."""

    def __init__(self, room: _Room) -> None:
        super().__init__(room)  # were it its own file, it and the batch would live until a garbage collection
        self._room = room
        self._storages: dict[int, _Stored] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            stored = self._stored(value)
            return _tensor, (stored, value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
        if kind is np.ndarray and value.nbytes >= _SMALL_BYTES:
            return self._array(value)
        if kind in _ways_of_their_own:  # they may have made something that only its receiver lets go of
            raise Unfit
        return NotImplemented

    def _stored(self, tensor: torch.Tensor) -> _Stored:
        """The whole memory beneath a tensor, once: what views share they share afterwards."""
        if not _is_plain(tensor):
            raise Unfit
        storage = tensor.untyped_storage()
        stored = self._storages.get(storage._cdata)
        if stored is None:
            size = storage.nbytes()
            if storage.is_shared() or size > min(_TENSOR_BYTES, 2 * tensor.nbytes + _SMALL_BYTES):
                raise Unfit
            at = self._room.below(size)
            if size:
                content: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
                self._room.memory[at : at + size] = content
            stored = self._storages[storage._cdata] = _Stored(storage, (self._room.number, at, size))
        return stored

    def _array(self, array: Any) -> Any:
        if array.dtype.kind not in _PLAIN_ARRAYS or array.dtype.hasobject:
            return NotImplemented
        order: Any = "F" if array.flags.fnc else "C"
        at = self._room.below(array.nbytes)
        np.ndarray(array.shape, array.dtype, self._room.memory, at, order=order)[...] = array
        return _array, (self._room.number, at, array.dtype, array.shape, order)


class _Stored:
    """Stands for a storage in a pickle; keeps it while others are told apart from it by where they are."""

    def __init__(self, storage: torch.UntypedStorage, where: tuple[int, int, int]) -> None:
        self._storage, self._where = storage, where

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, self._where


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _storage(number: int, at: int, size: int) -> torch.UntypedStorage:
    if not size:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.UntypedStorage.from_buffer(known(number).memory, dtype=torch.uint8, count=size, offset=at)


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def _array(number: int, at: int, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, known(number).memory, at, order=order).copy(order="K")


# ---- small batches are collated in memory that is not shared yet


def collate_unshared() -> None:
    """In a worker torch's `default_collate` makes tensors in shared files; from here on small ones in plain memory."""
    if collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn:
        collate.default_collate_fn_map[torch.Tensor] = _collate_tensors


def _collate_tensors(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    one = batch[0]
    if type(one) is not torch.Tensor or not _is_plain(one) or len(batch) * one.nbytes > _TENSOR_BYTES:
        collated: torch.Tensor = collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return collated
    return torch.stack(list(batch), 0, out=one.new_empty((len(batch), *one.shape)))
