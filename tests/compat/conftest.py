"""Runs end their result before their agent."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def each_waits_for_its_agents(agents_end: None) -> None:
    """What that fixture does, for every test here."""
