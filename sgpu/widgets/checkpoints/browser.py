"""The checkpoint browser: what is there, what is in it, whether it is whole, and what to do with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sgpu.contract.errors import CheckpointNotFoundError
from sgpu.contract.rundir import RunDir
from sgpu.widgets.checkpoints import page
from sgpu.widgets.checkpoints.place import find_place
from sgpu.widgets.checkpoints.rows import CheckpointRow, Shelf
from sgpu.widgets.exhibit import Exhibit

if TYPE_CHECKING:
    from sgpu.widgets.checkpoints.widget import CheckpointWidget


class CheckpointBrowser:
    """Shows the checkpoints of a run, a folder or a URL; text where there is no notebook.

    Nothing of a checkpoint is ever run, and nothing is loaded that nobody looks at. A saved notebook keeps the widget
    only as long as its kernel lives: `keep()`, or the button of that name, puts tables and text in its place.

    Args:
        root_or_run: a run, its id, its folder, or the folder or URL that holds the checkpoints.
        step: the one to open; None: none.

    Raises:
        InputError: it is neither a folder, nor a URL, nor a run.
        CheckpointNotFoundError: there is no checkpoint of that step.
    """

    def __init__(self, root_or_run: str | os.PathLike[str] | RunDir, *, step: int | None = None) -> None:
        self.shelf = Shelf(find_place(root_or_run))
        self.shelf.refresh()
        if step is not None and self.shelf.row(step) is None:
            there = [row.step for row in self.shelf.rows]
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {self.shelf.place.root}; there are {there[:20]}", step=step
            )
        self._step = step
        self._shown: CheckpointWidget | None = None
        self._exhibit = Exhibit(self._still, self._make_widget)

    @property
    def rows(self) -> list[CheckpointRow]:
        """One a step, newest first, all of them looked at: sizes, states, reasons, metrics."""
        for row in self.shelf.rows:
            if row.state == "unchecked":
                self.shelf.check(row.step)
        return self.shelf.rows

    def keep(self) -> None:
        """Replaces the widget by what stays in the saved notebook."""
        self._exhibit.keep()
        self._shown = None

    def __str__(self) -> str:
        return self._still(False)["text/plain"]

    def __repr__(self) -> str:
        return f"<CheckpointBrowser: {len(self.shelf.rows)} checkpoints in {self.shelf.place.root}>"

    def _ipython_display_(self) -> None:
        self._exhibit.show()

    def _still(self, _charts: bool) -> dict[str, str]:
        chosen = self._step if self._shown is None else self._shown.desk.chosen
        return page.bundle(self.shelf, chosen)

    def _make_widget(self) -> CheckpointWidget:
        from sgpu.widgets.checkpoints.widget import CheckpointWidget  # UI packages take a second to import

        self._shown = CheckpointWidget(self.shelf, self._step, keep=self.keep)
        return self._shown
