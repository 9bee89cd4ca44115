"""The planner's sliders and charts. Every figure is computed here and drawn there."""

from __future__ import annotations

import math
import threading
from typing import Any, Protocol

from sgpu.contract.errors import InputError
from sgpu.widgets.channel import ChannelWidget, script, style
from sgpu.widgets.planning import text as words
from sgpu.widgets.planning.knobs import SLIDERS, parse, tell
from sgpu.widgets.planning.model import LIMITS, PRESETS, PlannerState, PlannerView, changed
from sgpu.widgets.planning.past import PastRuns
from sgpu.widgets.words import is_number

Message = dict[str, Any]


class Planner(Protocol):
    """What is drawn: its figures change with `set`, and `keep` ends the drawing."""

    @property
    def state(self) -> PlannerState: ...

    @property
    def view(self) -> PlannerView: ...

    @property
    def past(self) -> PastRuns: ...

    def set(self, values: PlannerState) -> None:
        """Moves sliders."""

    def keep(self) -> None:
        """Puts what stays in the place of the widget."""


class PlannerWidget(ChannelWidget):
    """Draws one planner."""

    _esm = script("planner")
    _css = style("planner")

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._lock = threading.RLock()
        self._number = 0
        super().__init__()

    def tell(self, *, trouble: str = "", asked: int | None = None) -> None:
        """Sends all that is shown: some kilobytes."""
        with self._lock:
            self._number += 1
            self.send(
                {"kind": "plan", "number": self._number, "asked": asked, "trouble": trouble, **message(self._planner)}
            )

    def take(self, content: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "hello":
            self.tell()
        elif kind == "set":
            self._set(content)
        elif kind == "preset":
            self._preset(content.get("name"))
        elif kind == "keep":
            self._planner.keep()

    def _set(self, content: Message) -> None:
        """One slider moved, or one field filled in; what cannot be is told and changes nothing."""
        asked = content.get("asked") if isinstance(content.get("asked"), int) else None
        with self._lock:
            try:
                name, value = str(content.get("name")), content.get("value")
                if isinstance(value, str):
                    value = parse(name, value)
                elif value is not None and not (is_number(value) and math.isfinite(value)):
                    raise InputError(f"{name} must be a number; found {value!r}")
                self._planner.set(changed(self._planner.state, {name: value}))
            except InputError as error:
                self.tell(trouble=str(error), asked=asked)
                return
            self.tell(asked=asked)

    def _preset(self, name: object) -> None:
        with self._lock:
            planner, measured = self._planner, self._planner.past.preset()
            for preset in (*PRESETS, *([measured] if measured else [])):
                if preset.name == name:
                    planner.set(changed(planner.state, {"failures_a_gpu_year": preset.failures_a_gpu_year}))
            if name == "measured times":
                planner.set(planner.past.times(planner.state))


def message(planner: Planner) -> Message:
    """All that the browser shows, in words and points."""
    state, view, past = planner.state, planner.view, planner.past
    measured = past.preset()
    presets = [*PRESETS, *([measured] if measured else [])]
    return {
        "title": words.title(state),
        "knobs": [
            {
                "name": slider.name, "label": slider.label, "help": slider.help,
                "low": slider.low, "high": slider.high, "log": slider.log, "whole": LIMITS[slider.name].whole,
                "value": getattr(state, slider.name), "words": tell(slider.name, getattr(state, slider.name)),
            }
            for slider in SLIDERS
        ],
        "best": {"value": view.best_interval_seconds, "words": words.duration(view.best_interval_seconds)},
        "presets": [
            {"name": preset.name, "source": preset.source, "words": words.rate(preset.failures_a_gpu_year),
             "on": preset.failures_a_gpu_year == state.failures_a_gpu_year}
            for preset in presets
        ],
        "times": past.stall_seconds is not None or past.restart_seconds is not None,
        "figures": [{"label": one.label, "value": one.value, "note": one.note} for one in words.figures(state, view)],
        "wins": [
            {"words": words.points(knob.gain), "change": knob.change, "gain": round(knob.gain, 6)}
            for knob in view.knobs
        ],
        "remarks": list(words.remarks(state, view)),
        "assumed": words.ASSUMED,
        "curve": [[_short(at) for at, _ in view.curve], [_short(share * 100) for _, share in view.curve]],
        "chosen": [_short(view.interval_seconds), _short(view.goodput * 100)],
        "top": [_short(view.best_interval_seconds), _short(view.best_goodput * 100)],
        "spread": [[_short(value) for value in column] for column in zip(*view.spread, strict=True)],
    }  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.6g}")
