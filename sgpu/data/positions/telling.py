"""Where a user's own code failed: which sample or file it had in hand."""

from __future__ import annotations

import sys

from sgpu.contract.errors import SgpuError
from sgpu.data.dataset import VolumeDataset


def note_sample(problem: Exception, dataset: object, number: object) -> None:
    """Told beneath the exception, wherever that is printed; also by a worker's."""
    _note(problem, f"sample {number!r} of {type(dataset).__name__}")


def note_file(problem: Exception, volume: VolumeDataset, number: int) -> None:
    """`number`: of the volume's order."""
    _note(problem, f"the sample of {volume.source.listing.path(volume.file_of(number))} of volume {volume.url}")


def _note(problem: Exception, what: str) -> None:
    if sys.version_info >= (3, 11) and not isinstance(problem, SgpuError):  # ours name it themselves
        problem.add_note(f"It was raised while {what} was made.")
