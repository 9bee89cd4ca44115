"""How often to checkpoint: pure.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974 (the square
root); the other two bounds keep the cost under a budget, and saves from queueing up behind each other.
"""

from __future__ import annotations

import math

from sgpu.contract.errors import InputError

SAVE_TIME_MARGIN = 1.2


def interval_seconds(
    *, overhead_seconds: float, mtbf_seconds: float, save_seconds: float = 0.0, overhead_budget: float = 0.01
) -> float:
    """Seconds between checkpoints: max(sqrt(2 O M), O / p, 1.2 x save time).

    Args:
        overhead_seconds: O, wall time that one checkpoint costs the training, as measured.
        mtbf_seconds: M, mean time between failures of the whole run; may be infinite.
        save_seconds: from a save's call until it is durable.
        overhead_budget: p, the share of wall time that checkpoints may cost.

    Returns:
        Seconds; infinite where failures never happen.
    """
    for name, value in (("overhead_seconds", overhead_seconds), ("save_seconds", save_seconds)):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} must be a finite number of seconds, 0 or more; found {value!r}")
    if not mtbf_seconds > 0:
        raise InputError(f"mtbf_seconds must be above 0; found {mtbf_seconds!r}")
    if not 0 < overhead_budget < 1:
        raise InputError(f"overhead_budget must be between 0 and 1; found {overhead_budget!r}")
    optimum = math.sqrt(2 * overhead_seconds * mtbf_seconds) if overhead_seconds else 0.0
    return max(optimum, overhead_seconds / overhead_budget, SAVE_TIME_MARGIN * save_seconds)
