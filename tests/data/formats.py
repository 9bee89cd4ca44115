"""A small volume of each format that `sgpu.data` reads, and what is in it."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import tarfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from sgpu.data import (
    AudioFiles,
    ImageFiles,
    JsonLines,
    SafetensorsFiles,
    TableDataset,
    TarSamples,
    TextLines,
    VolumeDataset,
)

FILES = 5


@dataclass(frozen=True, kw_only=True)
class Format:
    """`make` fills a folder; `open` makes the data set over a volume; `number` tells which sample one is."""

    make: Callable[[pathlib.Path], None]
    open: Callable[..., Any]
    number: Callable[[Any], int]
    numbers: tuple[int, ...]


def _images(root: pathlib.Path) -> None:
    for number in range(FILES):
        Image.new("RGB", (4 + number, 3), (number, 10, 20)).save(root / f"{number}.png")


def _audio(root: pathlib.Path) -> None:
    for number in range(FILES):
        with wave.open(str(root / f"{number}.wav"), "wb") as file:
            file.setparams((2, 2, 8000, 0, "NONE", "not compressed"))
            file.writeframes(np.full(2 * 100, number * 256, "<i2").tobytes())


def _tensors(root: pathlib.Path) -> None:
    for number in range(FILES):
        save_file({"x": torch.full((3,), float(number)), "y": torch.zeros(1)}, root / f"{number}.safetensors")


def _counts() -> list[range]:
    """Samples of each file: 3, 4, 0, 5, 2."""
    counts, start = [3, 4, 0, 5, 2], 0
    found = []
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found


MANY = tuple(range(14))


def _text(root: pathlib.Path) -> None:
    for file, numbers in enumerate(_counts()):
        body = "".join(f"zeile {number} ü\n" for number in numbers).encode()
        if file % 2:
            (root / f"{file}.txt.gz").write_bytes(gzip.compress(body))
        else:
            (root / f"{file}.txt").write_bytes(body)


def _json(root: pathlib.Path) -> None:
    for file, numbers in enumerate(_counts()):
        (root / f"{file}.jsonl").write_text("\r\n".join(json.dumps({"n": number}) for number in numbers))


def _tars(root: pathlib.Path) -> None:
    for file, numbers in enumerate(_counts()):
        with tarfile.open(root / f"{file}.tar{'.gz' if file % 2 else ''}", "w:gz" if file % 2 else "w") as tar:
            for number in numbers:
                for ending, body in (("cls", str(number)), ("meta.json", "{}"), ("bin", "x" * 700)):
                    about = tarfile.TarInfo(f"train/{number:04}.{ending}")
                    about.size = len(body)
                    tar.addfile(about, io.BytesIO(body.encode()))


def table(numbers: range) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int32()), "name": [f"row {number}" for number in numbers]})


def _parquet(root: pathlib.Path) -> None:
    for file, numbers in enumerate(_counts()):
        pq.write_table(table(numbers), root / f"{file}.parquet", row_group_size=2)


def _arrow(root: pathlib.Path) -> None:
    for file, numbers in enumerate(_counts()):
        whole = table(numbers)
        with pa.OSFile(str(root / f"{file}.arrow"), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=2)


def _delta(root: pathlib.Path) -> None:
    for numbers in _counts():
        if len(numbers):
            deltalake.write_deltalake(str(root), table(numbers), mode="append")


def _over(kind: Any, **more: Any) -> Callable[..., Any]:
    def open_(root: pathlib.Path, **options: Any) -> Any:
        return kind(VolumeDataset(root, pattern=kind.pattern, **options), **more)

    return open_


def _row(sample: Any) -> int:
    assert sample["name"] == f"row {sample['n']}"
    return int(sample["n"])


def _line(sample: str) -> int:
    first, number, last = sample.split(" ")
    assert (first, last) == ("zeile", "ü")
    return int(number)


ONE = tuple(range(FILES))
FORMATS: dict[str, Format] = {
    "images": Format(
        make=_images, open=_over(ImageFiles), number=lambda image: int(image[0, 0, 0]), numbers=ONE
    ),
    "audio": Format(
        make=_audio, open=_over(AudioFiles), number=lambda sound: round(float(sound[0][1, 7]) * 128), numbers=ONE
    ),
    "safetensors": Format(
        make=_tensors, open=_over(SafetensorsFiles), number=lambda sample: int(sample["x"][2]), numbers=ONE
    ),
    "text": Format(make=_text, open=_over(TextLines), number=_line, numbers=MANY),
    "json": Format(make=_json, open=_over(JsonLines), number=lambda sample: int(sample["n"]), numbers=MANY),
    "tars": Format(
        make=_tars, open=_over(TarSamples, decode={"cls": int}), number=lambda sample: int(sample["cls"]), numbers=MANY
    ),
    "parquet": Format(make=_parquet, open=TableDataset, number=_row, numbers=MANY),
    "arrow": Format(make=_arrow, open=TableDataset, number=_row, numbers=MANY),
    "delta": Format(make=_delta, open=TableDataset, number=_row, numbers=MANY),
}  # fmt: skip
