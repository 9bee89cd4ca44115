"""Sound files."""

from __future__ import annotations

import os
import wave
from typing import Any

import numpy as np
import torch

from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import OneDataset, Transform, told
from sgpu.data.formats.optional import optional

_WIDTHS = {1: np.uint8, 2: np.int16, 4: np.int32}


class AudioFiles(OneDataset):
    """One recording a file: PCM in .wav by the standard library, everything else by soundfile.

    Samples are (float32 tensor of shape (channels, frames) within -1 and 1, frames per second), or what `transform`
    makes of that pair.

    Args:
        files: a volume, or its path or URL (then: all files with the usual endings).

    Raises:
        DataError: while iterating: a file cannot be decoded, with its path.
        InputError: while iterating: a file needs soundfile, which is not installed.
    """

    kind = "recording"
    pattern = "**/*.{wav,flac,ogg,mp3,aiff,WAV}"
    damage = (OSError, ValueError, EOFError, wave.Error, RuntimeError)  # soundfile's are RuntimeErrors

    def __init__(
        self, files: VolumeDataset | str | os.PathLike[str], *, transform: Transform | None = None
    ) -> None:  # fmt: skip
        super().__init__(files, transform)

    def read(self, path: str) -> Any:
        return _pcm(path) if path.lower().endswith(".wav") and _is_pcm(path) else _other(path)


def _is_pcm(path: str) -> bool:
    """Whether the standard library reads it; a damaged file counts, so that its damage is told."""
    try:
        with wave.open(path):
            return True
    except wave.Error as problem:
        return "unknown format" not in str(problem)
    except EOFError:
        return True


def _pcm(path: str) -> tuple[torch.Tensor, int]:
    with wave.open(path) as file:
        channels, width, rate, frames = file.getparams()[:4]
        content = file.readframes(frames)
    if len(content) != frames * channels * width:
        raise told(f"it ends after {len(content)} of {frames * channels * width} bytes of sound")
    if width == 3:  # 24 bits: made 32
        raw = np.frombuffer(content, np.uint8).reshape(-1, 3)
        values = (np.pad(raw, ((0, 0), (1, 0))).reshape(-1).view("<i4")).astype(np.float32) / 2**31
    else:
        plain = np.frombuffer(content, np.dtype(_WIDTHS[width]).newbyteorder("<")).astype(np.float32)
        values = (plain - 128) / 128 if width == 1 else plain / 2 ** (8 * width - 1)
    return torch.from_numpy(values.reshape(-1, channels).T.copy()), rate


def _other(path: str) -> tuple[torch.Tensor, int]:
    soundfile = optional("soundfile", extra="audio", purpose=f"reading {os.path.splitext(path)[1] or 'this'} files")
    frames, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(frames.T.copy()), int(rate)
