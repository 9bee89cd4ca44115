"""Checkpoints under a folder, a URL or a run: list, verify, inspect, diff, export, protect, prune; loads nothing."""

from __future__ import annotations

import pathlib
import time

import typer

from sgpu.checkpoint import Catalog
from sgpu.checkpoint.keeping import choose
from sgpu.checkpoint.looking.inspection import Verification
from sgpu.checkpoint.looking.inventory import Entry
from sgpu.checkpoint.stores.opening import open_store
from sgpu.cli import screen
from sgpu.contract.errors import CheckpointNotFoundError, InputError
from sgpu.contract.places import check_place
from sgpu.contract.rundir import RunDir
from sgpu.run import Run

app = typer.Typer(help="Looks at checkpoints without loading them.", no_args_is_help=True, rich_markup_mode=None)
WHERE = typer.Argument(metavar="PATH_OR_RUN", help="A folder or URL that holds checkpoints, or a run's id or folder.")
STEP = typer.Option(None, "--step", "-s", help="Which; the newest valid one otherwise.")


def place(where: str) -> str:
    """The folder or URL that holds the checkpoints: of a URL, a folder, a run's folder, or a run's id.

    Raises:
        InputError: it is none of these.
    """
    check_place("PATH_OR_RUN", where)
    if "://" in where:
        return where
    folder = pathlib.Path(where).expanduser()
    if folder.is_dir() and not (folder / "spec.json").exists():
        return str(folder)
    if folder.is_dir():
        return _place_of(Run.open(str(folder.absolute())))
    if folder.exists() or "/" in where:
        raise InputError(f"{where}: expected a folder that holds checkpoints; there is no such folder")
    return _place_of(Run.open(where))


def _place_of(run: Run) -> str:
    root = run.spec.checkpoints.root or str(RunDir(pathlib.Path(run.path)).checkpoints)
    if "://" not in root and not pathlib.Path(root).is_dir():
        raise CheckpointNotFoundError(f"run {run.id} has no checkpoint yet: there is no {root}", path=root)
    return root


def _committed(root: str) -> list[int]:
    """Steps with a commit record, whole or damaged, in order."""
    return sorted({folder.step for folder in choose.committed(open_store(root))})


def _step(found: Catalog, root: str, step: int | None) -> int:
    if step is not None:
        return step
    latest = found.latest()
    if latest is None:
        raise CheckpointNotFoundError(f"no valid checkpoint under {root}", path=root)
    return latest


@app.command("list")
def list_(where: str = WHERE) -> None:
    """Lists checkpoints by step: protected ones, damaged ones with what is wrong, and saves never completed."""
    root = place(where)
    entries = Catalog(root).entries()
    if not entries:
        typer.echo(f"no checkpoint under {root}")
        return
    shown = screen.table("step", "state", "size", "ranks", "tensors", "made", "path", right=("step", "size"))
    for entry in reversed(entries):
        shown.add_row(str(entry.step), *_row(entry))
    screen.console().print(shown)


_WORDS = {"unverified": "no checksums", "damaged": "DAMAGED", "newer format": "NEWER FORMAT"}


def _row(entry: Entry) -> tuple[str, ...]:
    made = entry.created_unix_seconds
    state = _WORDS.get(entry.state, entry.state) + (", protected" if entry.protected else "")
    return (
        state,
        screen.in_bytes(entry.size_bytes) if entry.size_bytes is not None else "",
        str(entry.world_size or ""),
        str(entry.tensors if entry.tensors is not None else ""),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made)) if made is not None else "",
        "; ".join((entry.path, *entry.problems)) + (f" ({entry.reason})" if entry.reason else ""),
    )


@app.command()
def verify(
    where: str = WHERE,
    step: int | None = typer.Option(None, "--step", "-s", help="Only this one; all otherwise."),
    deep: bool = typer.Option(True, "--deep/--quick", help="Read and check every byte, or compare sizes only."),
) -> None:
    """Checks checkpoints byte by byte; exit status 1 if one is damaged."""
    root = place(where)
    found = Catalog(root)
    steps = _committed(root) if step is None else [step]
    if not steps:
        raise CheckpointNotFoundError(f"no checkpoint under {root}", path=root)
    bad = 0
    for each in steps:
        told = found.verify(each, deep=deep)
        bad += not told.ok
        typer.echo(f"step {each}: {_verdict(told)}")
        for problem in told.problems:
            typer.echo(f"  {problem}")
    if bad:
        raise typer.Exit(1)


def _verdict(told: Verification) -> str:
    if not told.ok:
        return f"DAMAGED ({told.path})"
    if not told.verified:
        return "complete by size; it has no checksums to compare with"
    return "good, every byte as written" if told.deep else "complete by size"


@app.command()
def inspect(where: str = WHERE, step: int | None = STEP) -> None:
    """Shows what a checkpoint holds: names, dtypes, shapes, bytes, versions, metadata."""
    root = place(where)
    found = Catalog(root)
    seen = found.inspect(_step(found, root, step))
    facts = {
        "path": seen.path,
        "size": screen.in_bytes(seen.size_bytes),
        "ranks": seen.world_size if seen.world_size is not None else "unknown",
        "checksums": "yes" if seen.verified else "none",
        "run": seen.run_id or "unknown",
        **{f"version of {name}": version for name, version in sorted(seen.versions.items())},
        **{str(name): value for name, value in sorted(seen.metadata.items())},
    }
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    shown = screen.table("tensor", "dtype", "shape", "size", "shards", right=("size", "shards"))
    for tensor in seen.tensors:
        shape = "x".join(map(str, tensor.shape)) or "()"
        shown.add_row(tensor.name, tensor.dtype, shape, screen.in_bytes(tensor.size_bytes), str(tensor.shards))
    screen.console().print(shown)
    if seen.objects:
        typer.echo(f"and {len(seen.objects)} that are no tensors: {', '.join(seen.objects[:20])}")


@app.command()
def diff(
    where: str = WHERE, first: int = typer.Argument(help="A step."), second: int = typer.Argument(help="Another.")
) -> None:
    """Shows what two steps hold differently; exit status 1 if anything differs."""
    told = Catalog(place(where)).diff(first, second)
    parts = (
        (f"only in {first}", told.only_first), (f"only in {second}", told.only_second),
        ("another dtype or shape", told.changed), ("other values", told.values_changed),
    )  # fmt: skip
    for title, names in parts:
        for name in names:
            typer.echo(f"{title}: {name}")
    if any(names for _, names in parts):
        raise typer.Exit(1)
    typer.echo("no difference")


@app.command()
def export(
    where: str = WHERE,
    target: pathlib.Path = typer.Argument(help="The new file, or folder for hf."),
    step: int | None = STEP,
    format: str = typer.Option("safetensors", "--format", help='"safetensors", "torch" or "hf".'),  # noqa: A002
    part: str | None = typer.Option(None, "--part", help='Only this part of the state; for hf "model".'),
    rename: list[str] = typer.Option([], "--rename", metavar="PATTERN=TEXT", help="Changes names; may be repeated."),
    config: pathlib.Path | None = typer.Option(None, "--config", help="For hf: becomes config.json."),
    shard_bytes: int = typer.Option(5 * 10**9, "--shard-bytes", min=1, help="For hf: no file becomes larger."),
) -> None:
    """Writes the tensors of a checkpoint for other tools, each byte checked."""
    root = place(where)
    found = Catalog(root)
    chosen = _step(found, root, step)
    path = found.export(
        chosen, target, format=format, part=part, rename=_renames(rename), config=config, shard_bytes=shard_bytes
    )
    files = [file for file in pathlib.Path(path).rglob("*") if file.is_file()] or [pathlib.Path(path)]
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"step {chosen} as {format}: {path} ({screen.in_bytes(size)})")


def _renames(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        pattern, sign, replacement = text.partition("=")
        if not pattern or not sign:
            raise InputError(f"--rename: expected PATTERN=TEXT, found {text!r}")
        found[pattern] = replacement
    return found


@app.command()
def protect(
    where: str = WHERE,
    step: int = typer.Argument(help="Which."),
    reason: str = typer.Option("", "--reason", "-r", help="Shown in the list."),
) -> None:
    """Keeps a step from being pruned, by whatever run."""
    typer.echo(f"protected: {Catalog(place(where)).protect(step, reason)}")


@app.command()
def unprotect(where: str = WHERE, step: int = typer.Argument(help="Which.")) -> None:
    """Leaves a protected step to the rules again."""
    Catalog(place(where)).unprotect(step)
    typer.echo(f"step {step} is no longer protected")


@app.command()
def prune(
    where: str = WHERE,
    keep_last: int = typer.Option(3, "--keep-last", min=1, help="The newest so many valid ones stay."),
    keep_every: int | None = typer.Option(None, "--keep-every", min=1, help="Steps divisible by this stay too."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Remove; without it, only show what would be removed."),
) -> None:
    """Removes checkpoints that no rule keeps, and saves never completed; never a protected, damaged or only one."""
    gone = Catalog(place(where)).prune(keep_last, keep_every=keep_every, dry_run=not yes)
    for name in gone:
        typer.echo(f"{'removed' if yes else 'would remove'} {name}")
    if not gone:
        typer.echo("nothing to remove")
    elif not yes:
        typer.echo("nothing was removed; --yes does it")
