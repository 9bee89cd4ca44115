"""The goodput planner: what failures cost a job, and which knob to turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgpu import settings
from sgpu.widgets.exhibit import Exhibit
from sgpu.widgets.planning import page, text
from sgpu.widgets.planning.model import PlannerState, PlannerView, changed, plan
from sgpu.widgets.planning.past import PastRuns, measure

if TYPE_CHECKING:
    from sgpu.widgets.planning.widget import PlannerWidget


class GoodputPlanner:
    """Shows sliders in a notebook; prints the plan elsewhere.

    `set({"gpus": 256})` moves a slider from code; `view` has the figures. A saved notebook keeps a widget only as long
    as its kernel lives: `keep()`, or the button of that name, puts the plan as text and picture in its place.

    Args:
        state: what to start from; None: 1,024 GPUs for 30 days.

    Raises:
        InputError: a number in the state is out of its range.
    """

    def __init__(self, state: PlannerState | None = None) -> None:
        self._state = state or PlannerState()
        self._past: PastRuns | None = None
        self._exhibit = Exhibit(self._still, self._make_widget)
        self._shown: PlannerWidget | None = None

    @property
    def state(self) -> PlannerState:
        return self._state

    @property
    def view(self) -> PlannerView:
        return plan(self._state)

    @property
    def past(self) -> PastRuns:
        """What this machine's past runs say; read once."""
        if self._past is None:
            self._past = measure(settings.home())
        return self._past

    def set(self, values: dict[str, float | None] | PlannerState) -> None:
        """Moves sliders: a whole state, or some of its values by name.

        Raises:
            InputError: there is no such value, or it is out of its range.
        """
        self._state = values if isinstance(values, PlannerState) else changed(self._state, values)
        if self._shown is not None:
            self._shown.tell()

    def keep(self) -> None:
        """Replaces the sliders by text and a picture that stay in the saved notebook."""
        self._exhibit.keep()
        self._shown = None

    def __str__(self) -> str:
        return text.render(self._state, self.view, self.past.preset())

    def __repr__(self) -> str:
        return f"<GoodputPlanner: {text.title(self._state)}, goodput {self.view.goodput:.1%}>"

    def _ipython_display_(self) -> None:
        self._exhibit.show()

    def _still(self, charts: bool) -> dict[str, str]:
        return page.bundle(self._state, self.view, self.past.preset(), charts=charts)

    def _make_widget(self) -> PlannerWidget:
        from sgpu.widgets.planning.widget import PlannerWidget  # UI packages take a second to import

        self._shown = PlannerWidget(self)
        return self._shown
