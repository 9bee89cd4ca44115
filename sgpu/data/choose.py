"""Which kind of position a data set can have."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset

from sgpu.contract.errors import InputError
from sgpu.data.blocks import Blocks
from sgpu.data.dataset import VolumeDataset
from sgpu.data.draws import parts_of
from sgpu.data.formats.base import ManyDataset
from sgpu.data.free import Free
from sgpu.data.pipeline import Pipeline
from sgpu.data.planned import Planned
from sgpu.data.sampled import Sampled
from sgpu.data.sizes import Batching


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


def choose_pipeline(
    dataset: Any,
    batching: Batching,
    *,
    sampler: Any,
    shuffle: bool,
    seed: int | None,
    one_to_one: bool | None,
    files_at_a_time: int | None,
    workers: int,
    workers_live_on: bool,
) -> Pipeline:
    """The most exact kind that fits.

    Args:
        sampler: the user's own, of batches (of samples where batching has no size); None: our order.
        seed: of our order; None: the volume's, or the run's, or 0.
        one_to_one: whether an iterable data set gives one sample for each file of the volume in it; None: assume so,
            and check it while running.

    Raises:
        InputError: one_to_one=True for a data set with no volume in it, or with several; evaluation or global
            batches of what has no order of ours.
    """
    if files_at_a_time is None and one_to_one is None and sampler is None:
        files_at_a_time = _told_by_its_parts(dataset)
    _check_dealt(dataset, batching, sampler, False if files_at_a_time is not None else one_to_one)
    if batching.whole is not None and (sampler is not None or files_at_a_time is not None):
        raise _no_global_batches(dataset, "a sampler" if sampler is not None else "files_at_a_time")
    if not isinstance(dataset, IterableDataset):
        if files_at_a_time is not None:
            _one_volume(dataset, [], files_at_a_time, one_to_one)
        if sampler is not None:
            return Sampled(dataset, batching, sampler=sampler, seed=seed)
        return Planned(dataset, batching, volume=None, shuffle=shuffle, seed=seed)
    volumes = [part for part in parts_of(dataset) if isinstance(part, VolumeDataset)]
    if files_at_a_time is not None:
        volume = _one_volume(dataset, volumes, files_at_a_time, one_to_one)
        return Blocks(
            dataset, batching, volume=volume, files_at_a_time=files_at_a_time, workers=workers,
            workers_live_on=workers_live_on, seed=volume.seed if seed is None else seed,
        )  # fmt: skip
    with_state = has_own_state(dataset)
    if one_to_one is None:
        one_to_one = len(volumes) == 1 and not with_state
    if one_to_one and len(volumes) != 1:
        raise InputError(
            f"one_to_one=True needs one VolumeDataset inside {type(dataset).__name__}; found {len(volumes)}. "
            "Leave one_to_one out, or wrap one volume."
        )
    if one_to_one:
        volume = volumes[0]
        return Planned(
            dataset, batching, volume=volume, shuffle=volume.shuffle, seed=volume.seed if seed is None else seed
        )
    if batching.dealt:
        raise _not_evaluated(dataset, "cannot be counted")
    if batching.whole is not None:
        raise _no_global_batches(dataset, "an iterable that cannot be counted")
    return Free(
        dataset, batching, volumes=volumes, with_state=with_state, workers=workers, workers_live_on=workers_live_on,
        seed=seed,
    )  # fmt: skip


def _told_by_its_parts(dataset: Any) -> int | None:
    """Ours for files with several samples say it themselves, also where a user's data set is around them."""
    if not isinstance(dataset, IterableDataset):
        return None
    return 1 if any(isinstance(part, ManyDataset) for part in parts_of(dataset)) else None


def _one_volume(
    dataset: Any, volumes: list[VolumeDataset], files_at_a_time: Any, one_to_one: bool | None
) -> VolumeDataset:
    if isinstance(files_at_a_time, bool) or not isinstance(files_at_a_time, int) or files_at_a_time < 1:
        raise InputError(f"files_at_a_time must be a whole number, 1 or more; found {files_at_a_time!r}")
    if len(volumes) != 1 or one_to_one:
        raise InputError(
            f"files_at_a_time needs an iterable around one VolumeDataset, and not one_to_one=True; "
            f"{type(dataset).__name__} holds {len(volumes)} volume(s)"
        )
    return volumes[0]


def _check_dealt(dataset: Any, batching: Batching, sampler: Any, one_to_one: bool | None) -> None:
    if not batching.dealt:
        return
    if batching.whole is not None:
        raise InputError(
            "evaluation=True deals whole batches of batch_size samples to the ranks, the same for any world size; "
            "leave global_batch_size out"
        )
    if batching.drop_last:
        raise InputError("evaluation=True takes each sample exactly once; drop_last=True would leave some out")
    if sampler is not None or one_to_one is False:
        what = "has a sampler of its own" if sampler is not None else "does not give one sample a file"
        raise _not_evaluated(dataset, what)


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
