"""`sgpu cache`: the copies of volumes on this machine's disk."""

from __future__ import annotations

import pathlib
import time

import typer

from sgpu import settings
from sgpu.cli import screen
from sgpu.data.caching.cachebook import CacheBook

app = typer.Typer(help="The copies of volumes on this machine's disk.", no_args_is_help=True)
WHERE = typer.Option(None, "--dir", help="The cache folder (cache_dir); default: cache in SGPU_HOME.")


def _book(where: pathlib.Path | None) -> CacheBook:
    return CacheBook((where or settings.home() / "cache").expanduser().absolute())


@app.command("list")
def list_cache(where: pathlib.Path | None = WHERE) -> None:
    """Volumes with their files, sizes, and whether a process reads them."""
    book = _book(where)
    found = book.volumes()
    table = screen.table("volume", "files", "size", "last file", "in use", "url", right=("files", "size"))
    for volume in found:
        ago = screen.in_time(max(0.0, time.time() - volume.newest_seconds)) + " ago" if volume.files else "-"
        table.add_row(
            volume.name, f"{volume.files:,}", screen.in_bytes(volume.size_bytes), ago, "yes" if volume.in_use else "no",
            volume.url or "-",
        )  # fmt: skip
    screen.console().print(table)
    total = screen.in_bytes(sum(volume.size_bytes for volume in found))
    typer.echo(f"{total} in {book.root}")


@app.command()
def verify(
    where: pathlib.Path | None = WHERE,
    remove: bool = typer.Option(False, "--remove", help="Remove damaged files; they come anew when they are wanted."),
) -> None:
    """Compares every file with the checksum that it came with. Exit status 1: some are damaged, and still there."""
    found = _book(where).verify(remove=remove)
    for volume, path in found.damaged:
        typer.echo(f"{'removed' if remove else 'damaged'} {volume}/{path}")
    unknown = f", {found.unknown} without a checksum" if found.unknown else ""
    typer.echo(f"{found.whole} whole, {len(found.damaged)} damaged{unknown}")
    if found.damaged and not remove:
        raise typer.Exit(1)


@app.command()
def clear(
    names: list[str] = typer.Argument(None, help="Volumes, as `list` names them; none: all that nobody reads."),
    where: pathlib.Path | None = WHERE,
    yes: bool = typer.Option(False, "--yes", "-y", help="Remove; without it, only show what would be removed."),
) -> None:
    """Removes copies; never those of a volume that a process reads."""
    gone = _book(where).clear(names or [], dry_run=not yes)
    for volume in gone:
        size = screen.in_bytes(volume.size_bytes)
        typer.echo(f"{'removed' if yes else 'would remove'} {volume.name} ({volume.files:,} files, {size})")
    if not gone:
        typer.echo("nothing to remove")
    elif not yes:
        typer.echo("nothing was removed; --yes does it")
