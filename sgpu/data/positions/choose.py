"""Which kind of position a data set can have."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from sgpu.contract.errors import InputError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import ManyDataset
from sgpu.data.ordering.draws import parts_of
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.blocks import Blocks
from sgpu.data.positions.free import Free
from sgpu.data.positions.pipeline import Pipeline
from sgpu.data.positions.planned import Planned
from sgpu.data.positions.sampled import Sampled


def check_dataset(dataset: Any, *, shuffle: bool | None) -> None:
    """Refuses by name what torch would take for a data set, or fail at without naming it.

    Raises:
        InputError: a path or a URL, what can be neither indexed nor iterated as a data set, or nothing to shuffle.
    """
    if isinstance(dataset, (str, bytes, os.PathLike)):
        raise InputError(
            f"DataLoader takes a data set; found {dataset!r:.200}. For the files of a folder or URL: "
            "DataLoader(VolumeDataset(...)), or one of sgpu.data's formats around it, as ImageFiles or JsonLines"
        )
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"DataLoader takes a data set, with __getitem__ and __len__, or an IterableDataset; found {dataset!r:.80} "
            f"({type(dataset).__name__})"
        )
    if shuffle and not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        raise InputError("the data set is empty: expected at least one sample, found 0")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user said of the order of samples, and of who makes them.

    Attributes:
        sampler: the user's own, of batches (of samples where batching has no size); None: our order.
        seed: of our order; None: the volume's, or the run's, or 0.
        one_to_one: whether an iterable data set gives one sample for each file of the volume in it; None: assume so,
            and check it while running.
    """

    sampler: Any
    shuffle: bool
    seed: int | None
    one_to_one: bool | None
    files_at_a_time: int | None
    workers: int
    workers_live_on: bool


def choose_pipeline(dataset: Any, batching: Batching, asked: Asked) -> Pipeline:
    """The most exact kind that fits.

    Raises:
        InputError: one_to_one=True for a data set with no volume in it, or with several; evaluation or global
            batches of what has no order of ours.
    """
    if asked.files_at_a_time is None and asked.one_to_one is None and asked.sampler is None:
        asked = replace(asked, files_at_a_time=_told_by_its_parts(dataset))
    _check_dealt(dataset, batching, asked)
    if batching.whole is not None and (asked.sampler is not None or asked.files_at_a_time is not None):
        raise _no_global_batches(dataset, "a sampler" if asked.sampler is not None else "files_at_a_time")
    if isinstance(dataset, IterableDataset):
        return _of_iterable(dataset, batching, asked)
    if asked.files_at_a_time is not None:
        _one_volume(dataset, [], asked)
    if asked.sampler is not None:
        return Sampled(dataset, batching, sampler=asked.sampler, seed=asked.seed)
    return Planned(dataset, batching, volume=None, shuffle=asked.shuffle, seed=asked.seed)


def _of_iterable(dataset: Any, batching: Batching, asked: Asked) -> Pipeline:
    volumes = [part for part in parts_of(dataset) if isinstance(part, VolumeDataset)]
    workers: dict[str, Any] = {"workers": asked.workers, "workers_live_on": asked.workers_live_on}
    if asked.files_at_a_time is not None:
        volume = _one_volume(dataset, volumes, asked)
        seed = volume.seed if asked.seed is None else asked.seed
        return Blocks(
            dataset, batching, volume=volume, files_at_a_time=asked.files_at_a_time, seed=seed, **workers
        )  # fmt: skip
    with_state = has_own_state(dataset)
    one_to_one = len(volumes) == 1 and not with_state if asked.one_to_one is None else asked.one_to_one
    if not one_to_one:
        if batching.dealt:
            raise _not_evaluated(dataset, "cannot be counted")
        if batching.whole is not None:
            raise _no_global_batches(dataset, "an iterable that cannot be counted")
        return Free(dataset, batching, volumes=volumes, with_state=with_state, seed=asked.seed, **workers)
    if len(volumes) != 1:
        raise InputError(
            f"one_to_one=True needs one VolumeDataset inside {type(dataset).__name__}; found {len(volumes)}. "
            "Leave one_to_one out, or wrap one volume."
        )
    seed = volumes[0].seed if asked.seed is None else asked.seed
    return Planned(dataset, batching, volume=volumes[0], shuffle=volumes[0].shuffle, seed=seed)


def _told_by_its_parts(dataset: Any) -> int | None:
    """Ours for files with several samples say it themselves, also where a user's data set is around them."""
    if not isinstance(dataset, IterableDataset):
        return None
    return 1 if any(isinstance(part, ManyDataset) for part in parts_of(dataset)) else None


def _one_volume(dataset: Any, volumes: list[VolumeDataset], asked: Asked) -> VolumeDataset:
    files: Any = asked.files_at_a_time
    if isinstance(files, bool) or not isinstance(files, int) or files < 1:
        raise InputError(f"files_at_a_time must be a whole number, 1 or more; found {files!r}")
    if len(volumes) != 1 or asked.one_to_one:
        raise InputError(
            f"files_at_a_time needs an iterable around one VolumeDataset, and not one_to_one=True; "
            f"{type(dataset).__name__} holds {len(volumes)} volume(s)"
        )
    return volumes[0]


def _check_dealt(dataset: Any, batching: Batching, asked: Asked) -> None:
    if not batching.dealt:
        return
    if batching.whole is not None:
        raise InputError(
            "evaluation=True deals whole batches of batch_size samples to the ranks, the same for any world size; "
            "leave global_batch_size out"
        )
    if batching.drop_last:
        raise InputError("evaluation=True takes each sample exactly once; drop_last=True would leave some out")
    if asked.sampler is not None:
        raise _not_evaluated(dataset, "has a sampler of its own")
    if asked.files_at_a_time is not None or asked.one_to_one is False:
        raise _not_evaluated(dataset, "does not give one sample a file")


def _no_global_batches(dataset: Any, what: str) -> InputError:
    return InputError(
        "global_batch_size needs sgpu's own order: a map-style data set without a sampler, or a VolumeDataset with "
        f"one sample a file; {type(dataset).__name__} comes with {what}. Use batch_size, for each rank."
    )


def _not_evaluated(dataset: Any, why: str) -> InputError:
    return InputError(
        f"evaluation=True needs a map-style data set without a sampler, or a VolumeDataset with one sample a file; "
        f"{type(dataset).__name__} {why}"
    )


def has_own_state(dataset: Any) -> bool:
    """Whether a class of the user's gives and takes states; a volume's inherited ones count files, not samples."""
    kind = type(dataset)
    if isinstance(dataset, VolumeDataset) and kind.state_dict is VolumeDataset.state_dict:
        return False
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
