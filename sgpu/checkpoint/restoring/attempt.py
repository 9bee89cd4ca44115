"""One checkpoint that may be restored: compared with the live objects, then checked, then put into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from sgpu.checkpoint.format import names, values
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.live.parts import SKELETON, Loading, Part, Problems, Saved
from sgpu.checkpoint.live.share import TensorKey, identity, local_part
from sgpu.checkpoint.live.stage import RANK_FORMAT, object_name
from sgpu.checkpoint.restoring import filling
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.reading import ItemReader, Key
from sgpu.contract.errors import CheckpointCorruptError, CheckpointMismatchError


class Attempt:
    """Order of calls: `compare`; `check` or `check_own`, which raise CheckpointError or OSError and leave the live
    objects untouched; `apply`.

    Attributes:
        per_rank: this rank's own state, decoded; None where another number of ranks wrote the checkpoint.
        common: what every rank needs whole.
    """

    def __init__(self, reader: ItemReader, loadings: list[Loading], per_rank: dict[str, Any] | None, rank: int) -> None:
        self.reader = reader
        self.per_rank = per_rank
        self.common: set[Key] = set()
        self._rank = rank
        self._loadings = loadings
        self._own: set[str] = set()
        self._filled: set[str] = set()
        self._keys: dict[str, set[Key]] = {}
        for _, name, tensor in self._targets():
            keys = {(name, chunk.offsets) for chunk, *_ in filling.overlaps(self.reader, name, tensor)}
            self._keys[name] = keys
            if hasattr(tensor, "placements"):  # sharded over a device mesh
                self._own.add(name)
            else:
                self.common |= keys

    @classmethod
    def compare(cls, reader: ItemReader, parts: list[Part], per_rank: Mapping[str, Any], ranks: Ranks) -> Attempt:
        """Raises CheckpointMismatchError where checkpoint and live objects do not fit."""
        index = reader.opened.index
        saved_parts = {name.removesuffix(f".{SKELETON}") for name in index.objects if name.endswith(f".{SKELETON}")}
        problems = Problems()
        problems.names(saved_parts, {part.name for part in parts})
        _require_fit(reader.opened, problems)
        reader.verify((object_name(part.name), None) for part in parts)
        loadings = [part.prepare(_saved(reader, part.name, saved_parts), problems) for part in parts]
        own_state = _own_state(reader, per_rank, ranks, problems)
        _require_fit(reader.opened, problems)
        problems.different += _untied(reader, loadings)
        _require_fit(reader.opened, problems)
        return cls(reader, loadings, own_state, ranks.rank)

    def check(self, *, of_memory: bool) -> None:
        """All that this rank needs; of a checkpoint in the ranks' memory, what lies in its own is all that it checks
        of what all need.
        """
        if not of_memory:
            self._check(name for _, name, _ in self._targets())
            return
        self.check_own()
        places = {key: self.reader.place(key) for key in self.common}
        regions = {key: self.reader.sources.region(place.file, place.offset) for key, place in places.items()}
        self.reader.verify(key for key, region in regions.items() if region is None or region.owner == self._rank)

    def check_own(self) -> None:
        """What only this rank needs."""
        self._check(self._own)

    def _check(self, which: Iterable[str]) -> None:
        """What goes into live tensors is checked; what goes into new ones, which are nobody's yet, is checked while it
        is read, once.
        """
        chosen, live = set(which), set[Key]()
        new: dict[str, torch.Tensor] = {}
        for loading, name, tensor in self._targets():
            if name in chosen and name in loading.live:
                live |= self._keys[name]
            elif name in chosen:
                new[name] = tensor
        self.reader.fetch(key for name in new for key in self._keys[name])
        self._fill(new)
        self._filled |= new.keys()
        self.reader.verify(live)

    def apply(self, targets: Mapping[str, Any]) -> None:
        self._fill({name: tensor for _, name, tensor in self._targets() if name not in self._filled})
        for loading in self._loadings:
            loading.finish()
        for name, state in (self.per_rank or {}).items():
            targets[name].load_state_dict(state)

    def _fill(self, which: Mapping[str, torch.Tensor]) -> None:
        def fill(entry: tuple[str, torch.Tensor]) -> None:
            with torch.no_grad():  # a thread's own setting
                filling.fill(self.reader, *entry)

        self.reader.together(fill, which.items())

    def _targets(self) -> Iterable[tuple[Loading, str, torch.Tensor]]:
        for loading in self._loadings:
            for name, tensor in loading.targets.items():
                yield loading, name, tensor


def _saved(reader: ItemReader, part: str, all_parts: set[str]) -> Saved:
    key: Key = (object_name(part), None)
    skeleton = values.from_bytes(reader.read(key), reader.opened.path, reader.place(key).file, object_name(part))
    longer = [name for name in all_parts if name.startswith(f"{part}.")]  # "a" does not own the tensors of "a.b"
    tensors = {
        name: info
        for name, info in reader.opened.index.tensors.items()
        if _belongs(name, part) and not any(_belongs(name, other) for other in longer)
    }
    return Saved(tensors=tensors, skeleton=skeleton)


def _untied(reader: ItemReader, loadings: list[Loading]) -> list[str]:
    """Saved tensors that would end in one live tensor (tied weights), and are not equal."""
    ends: dict[TensorKey, tuple[str, torch.Tensor]] = {}
    found = []
    entries = (entry for loading in loadings for entry in loading.ends.items())
    for name, tensor in sorted(entries, key=itemgetter(0)):
        first, live = ends.setdefault(identity(tensor, local_part(tensor)), (name, tensor))
        if first != name and not filling.same_bytes(reader, first, name, live):
            found.append(f"{first} and {name} (one live tensor, two saved ones that are not equal)")
    return found


def _own_state(
    reader: ItemReader, per_rank: Mapping[str, Any], ranks: Ranks, problems: Problems
) -> dict[str, Any] | None:
    manifest = reader.opened.manifest
    if manifest is None or manifest.world_size != ranks.world_size:
        return None
    state = read_per_rank(reader, ranks.rank) if names.rank_file(ranks.rank) in manifest.files else {}
    problems.names({f"per_rank {name}" for name in state}, {f"per_rank {name}" for name in per_rank})
    return state


def read_per_rank(reader: ItemReader, rank: int) -> dict[str, Any]:
    """Name -> state that some rank had. Raises CheckpointCorruptError."""
    file, where = names.rank_file(rank), reader.opened.path
    content = values.from_bytes(reader.verify_file(file), where, file, f"the state of rank {rank}")
    if not isinstance(content, dict) or content.get("format") != RANK_FORMAT:
        raise CheckpointCorruptError(f"{where}/{file}: expected format {RANK_FORMAT!r}", path=where, file=file)

    def no_reference(name: str) -> torch.Tensor:
        raise CheckpointCorruptError(f"{where}/{file}: refers to the tensor {name}", path=where, file=file)

    decoded: dict[str, Any] = values.decode(content["state"], no_reference)
    return decoded


def _require_fit(opened: Opened, problems: Problems) -> None:
    if not problems:
        return
    told = [
        f"{title}: {_shortened(found)}"
        for title, found in (
            ("not in the checkpoint", problems.missing),
            ("only in the checkpoint", problems.unexpected),
            ("different", problems.different),
        )
        if found
    ]
    run = opened.manifest.run_id if opened.manifest else None
    wrote = f" Run {run} wrote it." if run else ""
    raise CheckpointMismatchError(
        f"{opened.path} does not fit the live objects. {'. '.join(told)}.{wrote} Nothing was changed. Make the "
        "objects as they were when it was saved, or use another root to start afresh.",
        path=opened.path,
        missing=problems.missing,
        unexpected=problems.unexpected,
        different=problems.different,
    )


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _shortened(found: list[str], most: int = 10) -> str:
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
