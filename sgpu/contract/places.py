"""What users write as a place: a path or a URL. What was meant as a URL must not become a folder of that name."""

from __future__ import annotations

import re

from sgpu.contract.errors import InputError

_DATABRICKS = re.compile(r"dbfs:/*(.*)", re.DOTALL)
_MISSPELT = re.compile(r"(s3a?|gc?s|abfss?|adl|az|hf|https?|file)(?://|:/(?!/))(.*)", re.DOTALL)


def check_place(name: str, text: str) -> None:
    """Refuses what looks like a URL and is none that can be opened.

    Raises:
        InputError: with what to write instead.
    """
    instead = _instead(text)
    if instead is not None:
        raise InputError(f"{name} must be a path or a URL that can be opened here; found {text!r}: write {instead}")


def _instead(text: str) -> str | None:
    found = _DATABRICKS.fullmatch(text)
    if found is not None:  # Databricks' own tools alone read this; what it means is mounted
        return f"{'/' if found[1].startswith('Volumes/') else '/dbfs/'}{found[1]}, where it is mounted"
    found = _MISSPELT.fullmatch(text)
    if found is not None:
        return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"
    return None
