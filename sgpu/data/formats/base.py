"""What the formats share: a volume inside, samples made of its local files, and errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from sgpu.contract.errors import DataError, InputError
from sgpu.data.dataset import VolumeDataset

Transform = Callable[[Any], Any]


class _OverVolume(IterableDataset[Any]):
    """Args: see the subclasses.

    Attributes:
        files: the volume; its `set_epoch`, `relative_path` and `url` are there for the asking.
    """

    kind = "file"
    pattern = "**/*"
    damage: tuple[type[Exception], ...] = (OSError, ValueError)
    """What reading a damaged file raises."""

    def __init__(self, files: VolumeDataset | str | os.PathLike[str], transform: Transform | None) -> None:
        if isinstance(files, VolumeDataset):
            self.files = files
        elif isinstance(files, str | os.PathLike):
            self.files = VolumeDataset(files, pattern=self.pattern)
        else:
            raise InputError(
                f"{type(self).__name__} needs a VolumeDataset, or a folder or URL; found {type(files).__name__}"
            )
        if transform is not None and not callable(transform):
            raise InputError(f"transform must be a function of one sample, or None; found {transform!r}")
        self.transform = transform

    def _found(self) -> Iterator[tuple[str, Any]]:
        """Local paths, each with what the volume tells of the file if it was asked to."""
        for found in self.files:
            yield found if self.files.yield_metadata else (found, None)

    def _finished(self, sample: Any, info: Any) -> Any:
        made = sample if self.transform is None else self.transform(sample)
        return made if info is None else (made, info)

    def _damaged(self, path: str, problem: Exception, where: str = "") -> DataError:
        relative = self.files.relative_path(path)
        told = f"{type(problem).__name__}: {problem}" if not isinstance(problem, _Told) else str(problem)
        return DataError(
            f"{relative} in volume {self.files.url} is no whole {self.kind}{where}: {told}. Its copy has the size and "
            "version that the volume tells, so the file itself is damaged or of another kind; repair it, or leave it "
            "out by pattern.",
            url=self.files.url, path=relative,
        )  # fmt: skip


class _Told(ValueError):
    """What is wrong, in words of our own."""


class OneDataset(_OverVolume):
    """One sample a file: positions are of files, continued by any world size and number of workers."""

    def __len__(self) -> int:
        return len(self.files)

    def read(self, path: str) -> Any:
        """The sample in a local file; raises what `damage` lists where it cannot be read."""
        raise InputError(f"{type(self).__name__} must say how a file is read")

    def __iter__(self) -> Iterator[Any]:
        for path, info in self._found():
            try:
                sample = self.read(path)
            except self.damage as problem:
                raise self._damaged(path, problem) from problem
            yield self._finished(sample, info)


class ManyDataset(_OverVolume):
    """Several samples a file, or none: positions are of files and samples in them (`files_at_a_time` is 1 by itself).

    A resume reads at most one file a worker again, and any world size and number of workers continues.
    """

    def samples(self, path: str) -> Iterator[Any]:
        """The samples in a local file; raises what `damage` lists where it cannot be read."""
        raise InputError(f"{type(self).__name__} must say how a file is read")

    def __iter__(self) -> Iterator[Any]:
        for path, info in self._found():
            samples = self.samples(path)
            number = 0
            while True:
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                except self.damage as problem:
                    raise self._damaged(path, problem, f" (after {number} samples)" if number else "") from problem
                number += 1
                yield self._finished(sample, info)


def told(text: str) -> ValueError:
    """For `read` and `samples`: what is wrong with the file, in our own words."""
    return _Told(text)
