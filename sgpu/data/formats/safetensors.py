"""Files of named tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import OneDataset, Transform, told
from sgpu.data.formats.optional import optional


class SafetensorsFiles(OneDataset):
    """One sample a file: its tensors by name (latents, embeddings, features that were computed before).

    Args:
        files: a volume, or its path or URL (then: all "*.safetensors").
        names: only these tensors are read; None: all.

    Raises:
        InputError: safetensors is not installed.
        DataError: while iterating: a file cannot be read, or lacks a name, with its path.
    """

    kind = "file of tensors"
    pattern = "**/*.safetensors"

    def __init__(
        self,
        files: VolumeDataset | str | os.PathLike[str],
        *,
        names: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        package = optional("safetensors", extra="safetensors", purpose="reading safetensors")
        self._open, self.damage = package.safe_open, (OSError, ValueError, package.SafetensorError)
        if isinstance(names, str):
            raise InputError(f"names must be several, as [{names!r}]; found one string")
        super().__init__(files, transform)
        self.names = None if names is None else tuple(names)

    def read(self, path: str) -> dict[str, Any]:
        with self._open(path, framework="pt") as file:
            there = file.keys()
            wanted = there if self.names is None else self.names
            missing = [name for name in wanted if name not in there]
            if missing:
                raise told(f"it has no tensor {', '.join(missing)}; it has {', '.join(sorted(there)) or 'none'}")
            return {name: file.get_tensor(name) for name in wanted}
