"""Three workers, a fault every one to two seconds: what comes out is what an undisturbed run gives, to the bit."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.faults.rig import soak
from tests.faults.rig.client import Warm

NIGHTLY = os.environ.get("NIGHTLY") == "true"
SECONDS, SEED = (1800.0, 1) if NIGHTLY else (60.0, 5)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 600)
def test_a_soak(warm: Warm, tmp_path: pathlib.Path) -> None:
    asked = {"seconds": SECONDS, "seed": SEED}
    limit = int(SECONDS * 3 + 500)
    told = warm.start("soak", tmp_path / "soak", asked, part="soak", limit_seconds=limit).result(limit)
    (tmp_path / "soak.log").write_text("\n".join(told["lines"]) + "\n")
    assert not told["problems"], told
    assert told["faults"] > SECONDS / 20, told
    assert told["restores"] > 0, told
    assert set(told["struck"]) <= set(soak.KINDS)
