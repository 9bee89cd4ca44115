"""Llama 3.1 405B with Adam, as 16,384 ranks hold it: what each of them would stage, write and tell."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.format.checksum import Span
from sgpu.checkpoint.writing.job import Layout, Row, SaveJob
from sgpu.checkpoint.writing.told import Told
from sgpu.checkpoint.writing.write import WrittenFile
from sgpu.contract.policies import CheckpointPolicy

TENSOR_RANKS = 8
LAYERS, HIDDEN, WIDE, KEYS, WORDS = 126, 16_384, 53_248, 1_024, 128_256
ENVELOPE_BYTES = 1_200
BYTES = {"bfloat16": 2, "float32": 4}
Shape = tuple[int, ...]


def parameters() -> Iterator[tuple[str, Shape, str]]:
    """Name, shape, and how tensor parallelism cuts it: by rows, by columns, or not."""
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, HIDDEN), "rows"
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), "columns"
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", (WIDE, HIDDEN), "rows"
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, WIDE), "columns"
        for name in ("input", "post_attention"):
            yield f"{at}.{name}_layernorm.weight", (HIDDEN,), "not"
    yield "model.embed_tokens.weight", (WORDS, HIDDEN), "rows"
    yield "lm_head.weight", (WORDS, HIDDEN), "rows"
    yield "model.norm.weight", (HIDDEN,), "not"


def tensors() -> Iterator[tuple[str, Shape, str, str]]:
    """With a dtype, and the state of the optimizer."""
    for name, shape, cut in parameters():
        yield f"model.{name}", shape, cut, "bfloat16"
        for key in ("exp_avg", "exp_avg_sq", "master"):
            yield f"optimizer.state.model.{name}.{key}", shape, cut, "float32"


@functools.cache
def all_tensors() -> tuple[tuple[str, Shape, str, str], ...]:
    return tuple(sorted(tensors()))


def _share(size: int, parts: int, number: int) -> tuple[int, int]:
    """Offset and length, as torch's Shard cuts: equal parts, the last ones smaller or empty."""
    step = -(-size // parts)
    begin = min(size, step * number)
    return begin, min(size, begin + step) - begin


def shard_of(shape: Shape, cut: str, data: int, data_ranks: int, tensor: int) -> tuple[Shape, Shape] | None:
    """Offsets and sizes of a rank's shard; None where it holds, or writes, none."""
    if cut == "not":
        begin, length = _share(shape[0], data_ranks, data)
        return ((begin,), (length,)) if length and tensor == 0 else None
    if cut == "rows":
        first, rows = _share(shape[0], TENSOR_RANKS, tensor)
        begin, length = _share(rows, data_ranks, data)
        return ((first + begin, 0), (length, shape[1])) if length else None
    begin, length = _share(shape[0], data_ranks, data)
    column, width = _share(shape[1], TENSOR_RANKS, tensor)
    return ((begin, column), (length, width)) if length else None


def layout(rank: int, world_size: int) -> Layout:
    """As `share.plan` makes it for that rank."""
    data, tensor = divmod(rank, TENSOR_RANKS)
    rows = []
    for name, shape, cut, dtype in all_tensors():
        found = shard_of(shape, cut, data, world_size // TENSOR_RANKS, tensor)
        if found is not None:
            rows.append(_row(name, dtype, shape, *found))
    for number, (name, _, _) in enumerate(parameters()):  # steps are dealt out
        if number % world_size == rank:
            rows.append(_row(f"optimizer.state.model.{name}.step", "float32", (), (), ()))
    kinds = str(hash(tuple((row.names, row.sizes) for row in rows)))
    return Layout(id=kinds, view="same", rows=tuple(rows), tensors=len(all_tensors()) + LAYERS * 9 + 3)


def _row(name: str, dtype: str, shape: Shape, offsets: Shape, sizes: Shape) -> Row:
    data = BYTES[dtype] * functools.reduce(lambda a, b: a * b, sizes, 1)
    return Row(
        names=(name,), dtype=dtype, shape=shape, offsets=offsets, sizes=sizes, head_bytes=704, data_bytes=data,
        size_bytes=data + ENVELOPE_BYTES,
    )  # fmt: skip


def job(rank: int, world_size: int, attempt: int) -> SaveJob:
    return SaveJob(
        folder=names.folder_name(1000, attempt), step=1000, attempt=attempt, generation=0, rank=rank,
        world_size=world_size, layout=layout(rank, world_size), objects={"model": "0", "optimizer": "1"},
        rank_bytes=20_000, policy=CheckpointPolicy(),
    )  # fmt: skip


def kind_of(rank: int, world_size: int) -> tuple[Any, ...]:
    """Equal for ranks that hold shards of the same tensors with the same extents, and as many steps."""
    data, tensor = divmod(rank, TENSOR_RANKS)
    extents = []
    for shape, cut in {(shape, cut) for _, shape, cut in parameters()}:
        found = shard_of(shape, cut, data, world_size // TENSOR_RANKS, tensor)
        extents.append((shape, cut, found[1] if found else None))
    steps = sum(number % world_size == rank for number in range(LAYERS * 9 + 3))
    return (*sorted(extents), steps)


def written(of: SaveJob) -> list[WrittenFile]:
    """What the rank's helper would have written."""
    found = []
    for file in of.files:
        spans, at = [], 0
        for number, size in enumerate(file.spans):
            spans.append(Span(offset=at, size_bytes=size, crc32c=(of.rank * 2_654_435_761 + number * 40_503) % 2**32))
            at += size
        found.append(WrittenFile(name=file.name, size_bytes=at, crc32c=1, spans=tuple(spans)))
    return found


def like(first: Told, rank: int, world_size: int) -> Told:
    """What a rank of the same kind tells."""
    files = tuple(replace(file, name=file.name.replace(f"{first.rank}", f"{rank}", 1)) for file in first.files)
    steps = [number for number in range(LAYERS * 9 + 3) if number % world_size == rank]
    of = list(parameters())
    rows = tuple(
        replace(row, names=(f"optimizer.state.model.{of[number][0]}.step",))
        for row, number in zip(first.rows, steps, strict=True)
    )
    assert first.index is not None
    index = replace(first.index, name=names.index_file(rank))
    return replace(first, rank=rank, files=files, rows=rows, index=index)
