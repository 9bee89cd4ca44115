"""Files that are whole or absent: write aside, fsync, replace, fsync the folder."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from typing import Any


def write_bytes(path: pathlib.Path, content: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replaces `path` with `content` in one step; a reader sees the old file or the new one, never a part.

    `durable=False` skips the fsyncs: for files that are rewritten often and may be lost with the machine.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: pathlib.Path, value: Any, *, durable: bool = True) -> None:
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), durable=durable)


def read_json(path: pathlib.Path) -> Any | None:
    """The value, or None where the file does not exist."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def sync_folder(folder: pathlib.Path) -> None:
    """Makes renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
