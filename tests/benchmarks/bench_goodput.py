"""Predicted goodput of 16,384 ranks by the seconds that a restart takes, with Llama 3's failures; draws the figure.

The supervisor's own policy and watchdog on virtual time (sgpu/testing/simulator.py). Written, unless `--quick`, to
docs/images/goodput-16384.svg.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from sgpu.testing.simulator import FIGURE_RESTART_SECONDS, Prediction, predict

_FILE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "goodput-16384.svg"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 64, 24, 40, 56
_LOWEST, _PUBLISHED = 0.80, 0.90


def run(quick: bool) -> list[dict[str, Any]]:
    told = [predict(float(seconds)) for seconds in FIGURE_RESTART_SECONDS[:: 4 if quick else 1]]
    if not quick:
        _FILE.write_text(draw(told))
    return [
        {
            "restart": f"{each.restart_seconds:.0f} s",
            "goodput": f"{each.goodput:.1%}",
            "of the seeds": f"{each.lowest:.1%} to {each.highest:.1%}",
            "failures": round(each.failures),
            "runs given up": each.given_up,
        }
        for each in told
    ]


def draw(told: Sequence[Prediction]) -> str:
    """The figure: a logarithmic axis of seconds, the band of the seeds, and what was published."""
    first, last = math.log10(told[0].restart_seconds), math.log10(told[-1].restart_seconds)

    def x(seconds: float) -> float:
        return _LEFT + (math.log10(seconds) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _TOP + (1 - share) / (1 - _LOWEST) * (_HEIGHT - _TOP - _BOTTOM)

    def points(values: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(seconds):.1f},{y(share):.1f}" for seconds, share in values)

    band = [(each.restart_seconds, each.highest) for each in told]
    band += [(each.restart_seconds, each.lowest) for each in reversed(told)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">16,384 GPUs, 54 days, 419 failures: share of the time that trains'
        "</text>",
    ]
    parts += [
        f'<path d="M{_LEFT} {y(share):.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>'
        f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        for share in (0.80, 0.85, 0.90, 0.95, 1.0)
    ]
    parts += [
        f'<path d="M{x(seconds):.1f} {_HEIGHT - _BOTTOM}v5" stroke="#333333"/>'
        f'<text x="{x(seconds):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{name}</text>'
        for seconds, name in ((1, "1 s"), (10, "10 s"), (60, "1 min"), (300, "5 min"), (1800, "30 min"))
    ]
    line = [(each.restart_seconds, each.goodput) for each in told]
    parts += [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">'
        "from the decision to restart to the first step</text>",
        f'<path d="M{_LEFT} {y(_PUBLISHED):.1f}H{_WIDTH - _RIGHT}" stroke="#b3261e" stroke-dasharray="6 4"/>',
        f'<text x="{_LEFT + 8}" y="{y(_PUBLISHED) + 17:.1f}" fill="#b3261e">published for Llama 3: above 90 %</text>',
        f'<polygon points="{points(band)}" fill="#1a73e8" opacity="0.2"/>',
        f'<polyline points="{points(line)}" fill="none" stroke="#1a73e8" stroke-width="2"/>',
        "</svg>\n",
    ]
    return "\n".join(parts)
