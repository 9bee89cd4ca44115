"""Tar files as WebDataset writes them: members that share a name up to the first dot are one sample."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import ManyDataset, Transform, told

_BLOCK_BYTES = 512
Decoder = Callable[[bytes], Any]


class TarSamples(ManyDataset):
    """Samples are dicts: "__key__", and the bytes of each member by what follows the first dot of its name.

    Args:
        files: a volume, or its path or URL (then: "*.tar", "*.tar.gz", "*.tgz").
        decode: what to make of the bytes, by ending: `{"cls": int, "json": json.loads}`; others stay bytes.
        transform: of the dict.

    Raises:
        DataError: while iterating: a tar is cut or no tar, or a member cannot be decoded; with its path.
    """

    kind = "tar file"
    pattern = "**/*.{tar,tar.gz,tgz}"
    damage = (tarfile.TarError, OSError, EOFError, ValueError, zlib.error)

    def __init__(
        self,
        files: VolumeDataset | str | os.PathLike[str],
        *,
        decode: Mapping[str, Decoder] | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(files, transform)
        self.decode = dict(decode or {})

    def samples(self, path: str) -> Iterator[dict[str, Any]]:
        sample: dict[str, Any] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not member.isfile() or not stem:
                    continue
                key = folder + slash + stem
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                if ending in sample:
                    raise told(f"sample {key!r} has two members that end in {ending!r}")
                sample["__key__"] = key
                sample[ending] = self._content(tar, member, ending)
            _check_end(tar)
        if sample:
            yield sample

    def _content(self, tar: tarfile.TarFile, member: tarfile.TarInfo, ending: str) -> Any:
        file = tar.extractfile(member)
        content = b"" if file is None else file.read()
        if ending not in self.decode:
            return content
        try:
            return self.decode[ending](content)
        except (ValueError, KeyError, OSError, EOFError) as problem:
            raise told(f"member {member.name!r}: {type(problem).__name__}: {problem}") from problem


def _check_end(tar: tarfile.TarFile) -> None:
    """A tar that was cut between two members looks whole to who only reads members."""
    file: Any = tar.fileobj
    file.seek(tar.offset)
    mark = file.read(_BLOCK_BYTES)
    if len(mark) < _BLOCK_BYTES or mark.strip(b"\0"):
        raise told(f"it ends after {tar.offset} bytes without the mark of its end")
