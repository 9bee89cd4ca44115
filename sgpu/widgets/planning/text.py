"""A plan in words: figures, what matters most, and what is assumed. Feeds the widget, the text and the static form."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu.widgets.planning.model import COVERAGE, FIRST_ORDER_LIMIT, PRESETS, PlannerState, PlannerView, Preset
from sgpu.widgets.words import count, percent, seconds

ASSUMED = (
    "Failures are assumed to be independent of each other. Real ones come in bursts: a bad node fails again soon. "
    "No figure above 99.9 % is shown: no model of failures is that good."
)
_WORTH_TELLING = 0.0005
_MANY = round(COVERAGE * 10)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that is expected. `note` says more about it, or is empty."""

    label: str
    value: str
    note: str = ""


def title(state: PlannerState) -> str:
    gpus = "1 GPU" if state.gpus == 1 else f"{count(state.gpus)} GPUs"
    return f"{gpus} for {state.days:g} {'day' if state.days == 1 else 'days'}"


def figures(state: PlannerState, view: PlannerView) -> tuple[Figure, ...]:
    """The figures in the order in which one reads them."""
    low, high = count(view.failures_low), count(view.failures_high)
    found = [
        Figure(label="goodput", value=percent(view.goodput), note=f"checkpoints every {interval_words(state, view)}"),
        Figure(label="best interval", value=duration(view.best_interval_seconds), note=_best_note(view)),
        Figure(
            label="chance of a failure", value=_chance(view.chance),
            note=f"one each {duration(view.mtbf_seconds)} on average",
        ),
        Figure(
            label="failures", value=amount(view.failures), note=f"{low} to {high} in {_MANY} cases of 10"
        ),
        Figure(
            label="lost GPU hours", value=amount(view.lost_gpu_hours), note=f"of {amount(view.gpu_hours)}"
        ),
    ]  # fmt: skip
    if state.price > 0:
        found.append(Figure(label="lost money", value=amount(view.lost_money), note=f"at {state.price:g} a GPU hour"))
    return tuple(found)


def interval_words(state: PlannerState, view: PlannerView) -> str:
    chosen = duration(view.interval_seconds)
    if state.interval_seconds is None:
        return f"{chosen}, the best interval"
    return f"{chosen}; the best interval gives {percent(view.best_goodput)}"


def remarks(state: PlannerState, view: PlannerView) -> tuple[str, ...]:
    """What matters most, and where a rule of thumb would mislead."""
    found = [matters(state, view)]
    if view.interval_seconds > FIRST_ORDER_LIMIT * view.mtbf_seconds:
        found.append(
            f"The interval is {view.interval_seconds / view.mtbf_seconds:.2g} of the time between failures: the "
            f"first-order estimate ({percent(view.first_order)}) is off there, the exact form is shown."
        )
    return tuple(found)


def matters(state: PlannerState, view: PlannerView) -> str:
    """Which knob to turn, of those that are in one's hands."""
    own = [knob for knob in view.knobs if knob.name != "failures"]
    best = own[0]
    if best.gain < _WORTH_TELLING:
        return "No single knob wins more than 0.05 points of goodput; this job loses little to failures."
    money = f", {amount(best.money)} of money" if state.price > 0 else ""
    return (
        f"What matters most: {best.change} would win {points(best.gain)} of goodput "
        f"({amount(best.gpu_hours)} GPU hours{money})."
    )


def render(state: PlannerState, view: PlannerView, rate: Preset | None = None) -> str:
    """The whole plan as text."""
    lines = [title(state)]
    if source := rate_words(state, rate):
        lines.append(f"failure rate: {source}")
    for figure in figures(state, view):
        note = f" ({figure.note})" if figure.note else ""
        lines.append(f"{figure.label}: {figure.value}{note}")
    lines += ["", "what each change would win:"]
    lines += [f"  {points(knob.gain):>11}  {knob.change}" for knob in view.knobs]
    lines += ["", *remarks(state, view), ASSUMED]
    return "\n".join(lines)


def rate_words(state: PlannerState, measured: Preset | None = None) -> str:
    """The failure rate with its source where it is one of the presets."""
    for preset in (*PRESETS, *([measured] if measured else [])):
        if preset.failures_a_gpu_year == state.failures_a_gpu_year:
            return f"{rate(state.failures_a_gpu_year)} ({preset.name}: {preset.source})"
    return f"{rate(state.failures_a_gpu_year)}, as set"


def rate(failures_a_gpu_year: float) -> str:
    return f"{failures_a_gpu_year:.3g} failures a GPU and year"


def duration(value_seconds: float) -> str:
    """As everywhere; beyond two years in years."""
    years = value_seconds / (365 * 86400)
    return seconds(value_seconds) if years < 2 else f"{years:,.3g} years" if years < 1000 else f"{years:,.0f} years"


def amount(value: float) -> str:
    """Three digits for small ones, whole for large ones."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def points(share: float) -> str:
    """0.0247 -> "2.47 points"."""
    return f"{share * 100:.2f} points" if share < 0.0995 else f"{share * 100:.1f} points"


def _chance(share: float) -> str:
    return "over 99.9 %" if share > 0.999 else "under 0.1 %" if 0 < share < 0.001 else percent(share)


def _best_note(view: PlannerView) -> str:
    if view.limited:
        return "a checkpoint must be durable before the next one starts; a faster store allows a shorter one"
    young, daly = duration(view.young_seconds), duration(view.daly_seconds)
    return f"exact; Young says {young}, Daly {daly}"
