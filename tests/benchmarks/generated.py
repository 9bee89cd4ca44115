"""A store without a disk: `generated://<files>` tells of so many objects, as fsspec's clients of object stores do."""

from __future__ import annotations

import io
import pathlib
from typing import Any

from fsspec import AbstractFileSystem

_A_FOLDER = 1000
_BYTES = 100

REGISTERS = (
    'import fsspec\nfsspec.register_implementation("generated", "tests.benchmarks.generated.Generated", clobber=True)\n'
)


def register_in(folder: pathlib.Path) -> None:
    """Lets every interpreter with `folder` on its PYTHONPATH know the scheme."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REGISTERS)


class Generated(AbstractFileSystem):  # type: ignore[misc]
    """Knows all by counting; keeps nothing."""

    protocol = "generated"
    root_marker = ""

    def isdir(self, path: str) -> bool:
        return True

    def find(self, path: str, **_: Any) -> Any:
        root = self._strip_protocol(path)
        names = (f"{root}/part-{number // _A_FOLDER:05}/image-{number:08}.jpg" for number in range(int(root)))
        return {name: self.info(name) for name in names}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": _BYTES, "ETag": f'"{path[-12:-4]:0>32}"', "mtime": 1_700_000_000}

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return io.BytesIO(path.encode().ljust(_BYTES))
