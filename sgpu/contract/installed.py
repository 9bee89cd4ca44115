"""Where installed packages are: what lies elsewhere is the user's own."""

from __future__ import annotations

import pathlib
import site
import sysconfig


def folders() -> list[pathlib.Path]:
    """Of Python itself, of what was installed for it, and of sgpu."""
    paths = sysconfig.get_paths()
    named = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*site.getsitepackages(), site.getusersitepackages(), str(pathlib.Path(__file__).parents[1])]
    return [pathlib.Path(path).resolve() for path in named]
