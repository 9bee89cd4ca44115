"""A line of values as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], *, width: int = 72, height: int = 8) -> list[str]:
    """Rows of block characters, the highest value on top, with its scale at the left; means of equal stretches."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ["(no values)"]
    columns = min(width, len(finite))
    stretches = [finite[i * len(finite) // columns : (i + 1) * len(finite) // columns] for i in range(columns)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(0.0, min(means)), max(means)
    span = (high - low) or 1.0
    levels = [(mean - low) / span * height for mean in means]
    rows = []
    for row in reversed(range(height)):
        filled = (min(1.0, max(0.0, level - row)) for level in levels)
        scale = f"{low + span * (row + 1) / height:8.3f} "
        rows.append(scale + "".join(_BLOCKS[round(part * 8)] for part in filled))
    return rows
