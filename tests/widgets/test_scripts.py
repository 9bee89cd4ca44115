"""The scripts of the views: shipped, built from the sources beside them, and asking nobody for anything."""

from __future__ import annotations

import hashlib
import pathlib

import pytest

from sgpu.widgets import channel

VIEWS = ("checkpoint_browser", "planner", "run_view")


@pytest.mark.parametrize("view", VIEWS)
def test_the_scripts_are_shipped_and_ask_nobody_for_anything(view: str) -> None:
    for text in (channel.script(view), channel.style(view)):
        assert len(text) > 5000
        for word in ("http://", "https://", "innerHTML", "eval(", "@import", "url(", "import("):
            found = [text[max(0, at - 40) : at + 40] for at in [text.find(word)] if at >= 0]
            assert word not in text or "w3.org" in found[0] or "https?" in found[0], found


@pytest.mark.parametrize("view", VIEWS)
def test_the_bundle_was_built_from_the_sources_beside_it(view: str) -> None:
    static = pathlib.Path(channel.__file__).parent / "static"
    sources = sorted(path for path in (static / "src").iterdir() if path.suffix in (".js", ".css"))
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    for text in (channel.script(view), channel.style(view)):
        assert text.startswith(f"/* sources {mark};"), "run: npm install --no-package-lock && npm run build"
    assert "Leon Sorokin" in (static / "uplot-LICENSE.txt").read_text()
