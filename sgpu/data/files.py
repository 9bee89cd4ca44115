"""A volume as a torch dataset by number: for samplers."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset

from sgpu.data.source import Source, options_of
from sgpu.data.volumes.credentials import Provider


class VolumeFiles(Dataset[Any]):
    """The same as `VolumeDataset`, by number: for samplers. Files are numbered in the order of their paths.

    Args: as for `VolumeDataset`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        pattern: str = "**/*",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit_bytes: int | None = None,
        min_free_disk_bytes: int | None = None,
        yield_metadata: bool = False,
        credentials: Provider | str | None = None,
    ) -> None:
        self.source = Source(options_of(url, pattern, cache_dir, cache_limit_bytes, min_free_disk_bytes, credentials))
        self.yield_metadata = yield_metadata
        self.url, self.pattern = self.source.volume.url, pattern

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"file {number} of {len(self)}")
        place = int(number) % len(self)
        path = self.source.obtain(place)
        return (path, self.source.info(place)) if self.yield_metadata else path

    def relative_path(self, local: str | os.PathLike[str]) -> str:
        """The path inside the volume of a path that this data set gave."""
        return self.source.relative_path(local)

    def relative(self, number: int) -> str:
        """The path inside the volume of a file, without fetching it."""
        if not 0 <= number < len(self):
            raise IndexError(f"file {number} of {len(self)}")
        return self.source.listing.path(number)
