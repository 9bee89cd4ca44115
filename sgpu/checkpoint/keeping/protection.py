"""Checkpoints that nobody prunes: a marker beside each, which every run honours. Without torch."""

from __future__ import annotations

import json
import time

from sgpu.checkpoint.format import names
from sgpu.checkpoint.stores.store import Store


def protect(store: Store, folder: str, reason: str) -> None:
    content = json.dumps({"reason": reason, "unix_seconds": time.time()}).encode()
    store.put(names.protected_name(folder), [memoryview(content)])


def unprotect(store: Store, folder: str) -> None:
    store.delete(names.protected_name(folder))


def is_protected(store: Store, folder: str) -> bool:
    return store.size(names.protected_name(folder)) is not None


def reason(store: Store, folder: str) -> str:
    """What was said when it was protected; the marker counts even if it cannot be read."""
    try:
        value = json.loads(store.read(names.protected_name(folder)))
    except (OSError, ValueError):
        return ""
    return str(value.get("reason", "")) if isinstance(value, dict) else ""
