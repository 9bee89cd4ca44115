"""A widget with a second way in, so that it hears its browser while a cell keeps the kernel busy."""

from __future__ import annotations

import pathlib
import secrets
import weakref
from abc import abstractmethod
from typing import Any, ClassVar

import anywidget
import comm
import traitlets

_STATIC = pathlib.Path(__file__).parent / "static"
_TARGET = "sgpu.view"


def script(name: str) -> str:
    """The JavaScript of a widget; it lies in the package and asks nobody for anything."""
    return (_STATIC / f"{name}.js").read_text(encoding="utf-8")


def style(name: str) -> str:
    """Its style sheet."""
    return (_STATIC / f"{name}.css").read_text(encoding="utf-8")


class ChannelWidget(anywidget.AnyWidget):
    """Messages come as a widget's own, or through a channel that the browser opens itself (static/src/channel.js).

    They may come in several threads, as soon as `__init__` here has run: a subclass calls it last. The browser says
    `hello` when it is up.
    """

    key = traitlets.Unicode().tag(sync=True)
    _views: ClassVar[weakref.WeakValueDictionary[str, ChannelWidget]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        super().__init__(key=secrets.token_hex(8))
        self.on_msg(self._hear)
        self._views[self.key] = self
        comm.get_comm_manager().register_target(_TARGET, open_channel)

    @abstractmethod
    def take(self, content: Any) -> None:
        """A message from the browser; whatever it is, it is data."""

    def widget_bundle(self) -> dict[str, Any]:
        """What displays the widget itself."""
        found = super()._repr_mimebundle_()
        data = found[0] if isinstance(found, tuple) else found
        return dict(data or {})

    def _hear(self, _widget: object, content: Any, _buffers: object) -> None:
        self.take(content)


def open_channel(channel: Any, message: dict[str, Any]) -> None:
    """A browser opens a second way in; it names its view by the key that only it was told."""
    facts = message["content"]["data"]
    view = ChannelWidget._views.get(str(facts.get("key"))) if isinstance(facts, dict) else None
    if view is None:
        channel.close()
        return
    channel.on_msg(lambda told: view.take(told["content"]["data"]))
