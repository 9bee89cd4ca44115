"""`seed_everything`: what is no seed is refused, and the draws follow the seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from sgpu import seed_everything
from sgpu.contract.errors import InputError


@pytest.mark.parametrize("seed", ["7", 1.5, None])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(InputError, match="takes a whole number"):
        seed_everything(seed)


@pytest.mark.parametrize("seed", [7, np.int64(7), -1])
def test_draws_follow_the_seed(seed: int) -> None:
    def draws() -> list[float]:
        assert seed_everything(seed) == seed
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    assert draws() == draws()
