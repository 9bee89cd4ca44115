"""Image files."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

import numpy as np
import torch

from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import OneDataset, Transform
from sgpu.data.formats.optional import optional


class ImageFiles(OneDataset):
    """One image a file, decoded by Pillow.

    Samples are uint8 tensors of shape (channels, height, width), or what `transform` makes of the Pillow image.

    Args:
        files: a volume, or its path or URL (then: all files with the usual endings).
        mode: Pillow's, as "RGB" or "L"; None: as the file has it.
        transform: of a Pillow image, as torchvision's are.

    Raises:
        InputError: Pillow is not installed.
        DataError: while iterating: a file cannot be decoded, with its path.
    """

    kind = "image"
    pattern = "**/*.{jpg,jpeg,png,bmp,gif,webp,tif,tiff,JPG,JPEG,PNG}"
    damage = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)  # Pillow's, by format

    def __init__(
        self,
        files: VolumeDataset | str | os.PathLike[str],
        *,
        mode: str | None = "RGB",
        transform: Transform | None = None,
    ) -> None:
        optional("PIL.Image", extra="images", purpose="reading images")
        super().__init__(files, transform)
        self.mode = mode

    def read(self, path: str) -> Any:
        with optional("PIL.Image", extra="images", purpose="reading images").open(path) as image:
            decoded = image.convert(self.mode) if self.mode is not None else image.copy()
        return decoded if self.transform is not None else as_tensor(decoded)


def as_tensor(image: Any) -> torch.Tensor:
    """A Pillow image as uint8 (or what its mode needs), shape (channels, height, width)."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
