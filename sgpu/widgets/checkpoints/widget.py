"""The checkpoint browser's widget: carries messages between a desk and its browsers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgpu.widgets.channel import ChannelWidget, script, style
from sgpu.widgets.checkpoints.desk import Desk
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.errands import BackgroundErrands


class CheckpointWidget(ChannelWidget):
    """Draws one shelf.

    Args:
        keep: puts what stays in the place of the widget.
    """

    _esm = script("checkpoint_browser")
    _css = style("checkpoint_browser")

    def __init__(self, shelf: Shelf, step: int | None, *, keep: Callable[[], None]) -> None:
        self._keep = keep
        quick, slow = (BackgroundErrands(f"sgpu-checkpoints-{name}", self._tell_trouble) for name in ("quick", "slow"))
        self._errands = (quick, slow)
        self.desk = Desk(shelf, self._say, quick=quick, slow=slow)
        self.desk.chosen = step
        super().__init__()
        self.desk.start()

    def take(self, content: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "keep":
            self._keep()
        else:
            self.desk.hear(content)

    def close(self) -> None:
        for errands in self._errands:
            errands.close()
        super().close()

    def _tell_trouble(self, error: Exception) -> None:
        self.desk.tell_trouble(error)

    def _say(self, message: dict[str, Any]) -> None:
        if self.comm is not None:  # closed meanwhile
            self.send(message)
