"""What every command shares: errors as one line, tables, units."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from sgpu.contract.errors import InputError, SgpuError

_PIPED_COLUMNS = 10_000  # a pipe has no edge; names and paths must not be folded for it


class Told(TyperGroup):
    """A command group whose errors are one line on standard error, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            _tell(str(error))
            raise typer.Exit(2) from error
        except (SgpuError, TimeoutError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # `sgpu logs ID | head`: click ends quietly
            _tell(str(error))
            raise typer.Exit(1) from error


def _tell(message: str) -> None:
    typer.echo(f"sgpu: {' '.join(message.split())}", err=True)


def console() -> Console:
    """Made at each use: tests and callers may have replaced standard output since."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS, highlight=False, markup=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def in_bytes(count: float) -> str:
    """ "1.5 MB": powers of ten, three figures."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def in_time(seconds: float) -> str:
    """ "41 s", "12 min", "3.2 h", "5.1 days"."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:.3g} days"
