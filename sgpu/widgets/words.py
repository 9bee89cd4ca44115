"""Numbers as people read them. Takes whatever a record holds; what is not a number is shown as "?"."""

from __future__ import annotations

import math
import re
from typing import Any

STATE_WORDS = {
    "STARTING": "starting",
    "RUNNING": "running",
    "RESTARTING": "restarting",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "LOST": "lost: its supervisor vanished",
}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_INVISIBLE = dict.fromkeys(
    [*(c for c in range(32) if c not in (9, 10)), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole(value: Any) -> int | None:
    """A whole number that a chart can hold, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def count(value: Any) -> str:
    """1200 -> "1,200"."""
    number = whole(value)
    return "?" if number is None else f"{number:,}"


def plural(number: Any, one: str, many: str | None = None) -> str:
    """(1, "step") -> "1 step"; (14, "step") -> "14 steps"."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def seconds(value: Any) -> str:
    """0.02 -> "0.02 s", 1.13 -> "1.1 s", 106 -> "1 min 46 s", 7300 -> "2 h 1 min"."""
    if not is_number(value) or not math.isfinite(value) or value < 0:
        return "?"
    if value < 0.1:
        return f"{value:.2f} s" if value >= 0.005 or value == 0 else "under 0.01 s"
    if value < 9.95:
        return f"{value:.1f} s"
    whole_seconds = round(value)
    minutes, rest = divmod(whole_seconds, 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours} h" if hours else f"{days:,} d"


def percent(share: float) -> str:
    """0.972 -> "97.2 %". Never "100.0 %" of what is not all."""
    shown = min(share, 0.9994) if share < 1 else share
    return f"{shown * 100:.1f} %"


def size(value: Any) -> str:
    """Bytes, in powers of 1000."""
    if not is_number(value) or not math.isfinite(value) or value < 0:
        return "?"
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.1f} {unit}"


def number(value: float) -> str:
    """A metric's value: four significant digits, and the names of what is not finite."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e15 else f"{value:,.0f}"


def rate(steps_per_second: float) -> str:
    """Steps a second, or seconds a step where that reads better."""
    if steps_per_second >= 1:
        return f"{steps_per_second:,.1f} steps/s"
    if steps_per_second >= 0.1:
        return f"{steps_per_second:.2f} steps/s"
    return f"{seconds(1 / steps_per_second)} a step" if steps_per_second > 0 else "no steps"


def workers(world_size: int, accelerator: str, nodes: int = 1) -> str:
    """`8 GPUs`, `4 CPU workers on 2 nodes`."""
    spread = f" on {plural(nodes, 'node')}" if nodes > 1 else ""
    return plural(world_size, "GPU" if accelerator == "cuda" else "CPU worker") + spread


def plain(value: Any, limit_chars: int = 400) -> str:
    """One line of text without control characters, terminal escapes or direction overrides."""
    if value is None:
        return ""
    text = " ".join(visible(str(value)).split())
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"


def visible(text: str) -> str:
    """Text without terminal escapes and invisible controls; tabs and line ends stay."""
    return _ESCAPES.sub("", text).translate(_INVISIBLE)
