"""The planner's sliders: their ranges, and their values as people write and read them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgpu.contract.errors import InputError
from sgpu.widgets.planning.text import duration
from sgpu.widgets.words import count

_UNITS = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "days": 86400.0,
    "day": 86400.0,
}
_PART = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*")


@dataclass(frozen=True, kw_only=True)
class Slider:
    """A knob with the range that its slider offers; a field beside it takes anything that the state does."""

    name: str
    label: str
    help: str
    low: float
    high: float
    log: bool = True


SLIDERS = (
    Slider(name="gpus", label="GPUs", help="how many run", low=8, high=65536),
    Slider(name="days", label="days", help="for how long", low=0.5, high=180),
    Slider(name="failures_a_gpu_year", label="failures a GPU and year", help="that stop the job", low=0.001, high=10),
    Slider(name="stall_seconds", label="checkpoint stall", help="how long one stops training", low=0.01, high=600),
    Slider(
        name="durable_seconds", label="until durable", help="from the stall until the checkpoint can be restored",
        low=1, high=3600,
    ),
    Slider(name="detection_seconds", label="detection", help="until a failure is noticed", low=1, high=3600),
    Slider(name="restart_seconds", label="restart", help="from then until the first new step", low=1, high=3600),
    Slider(name="interval_seconds", label="interval", help="training between two checkpoints", low=5, high=86400),
    Slider(name="price", label="price", help="of a GPU hour", low=0, high=10, log=False),
)  # fmt: skip


def tell(name: str, value: float | None) -> str:
    """A knob's value as it stands in its field."""
    if value is None:
        return ""
    if name == "gpus":
        return count(value)
    return duration(value) if name.endswith("_seconds") else f"{value:.4g}"


def parse(name: str, text: str) -> float:
    """What somebody wrote into a field: "1,024", "2 min 30 s", "1.5h".

    Raises:
        InputError: it is no number, or no length of time.
    """
    given = text.strip().lower()
    parts = _PART.findall(given)
    whole = bool(parts) and "".join(_PART.sub("", given).split()) == ""
    if name.endswith("_seconds"):
        if not whole or any(unit not in _UNITS for _, unit in parts):
            raise InputError(f'{name} must be a time like "90", "2 min 30 s" or "1.5 h"; found {text!r}')
        return sum(float(number.replace(",", "")) * _UNITS[unit] for number, unit in parts)
    if not whole or len(parts) != 1 or parts[0][1]:
        raise InputError(f"{name} must be a number; found {text!r}")
    return float(parts[0][0].replace(",", ""))
