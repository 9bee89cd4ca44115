"""The checkpoint browser in JupyterLab: a thousand checkpoints, 100,000 tensors, a damaged one."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

SHELVES = pathlib.Path(__file__).parent.parent / "widgets" / "shelves.py"
OPEN = """
import time
from sgpu.widgets import CheckpointBrowser
began = time.perf_counter()
browser = CheckpointBrowser({root!r})
browser
"""


def make(*options: object) -> None:
    subprocess.run([sys.executable, str(SHELVES), *map(str, options)], check=True, timeout=240)


@pytest.fixture
def many(tmp_path: pathlib.Path) -> pathlib.Path:
    """A thousand, one of which has a flipped byte, and one a file that is too short."""
    root = tmp_path / "many"
    make("many", root, 1000)
    shard = root / "step-00009950" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[content.index(b"PK") + 60] ^= 1
    shard.write_bytes(content)
    short = root / "step-00009960" / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:-1])
    return root


def test_a_thousand_checkpoints_are_browsed_compared_verified_and_exported(
    notebook: Callable[..., Any], many: pathlib.Path, tmp_path: pathlib.Path, shots: pathlib.Path
) -> None:
    one = notebook("browse", [OPEN.format(root=str(many))], height=1250, width=1400)
    one.run_all()
    page = one.page
    steps = page.locator(".sgpu-steps-list")
    steps.locator(".sgpu-line", has_text="10,000").wait_for()
    assert steps.locator(".sgpu-line").count() < 40, "all lines are in the page"
    page.locator(".sgpu-line[data-state=damaged]", has_text="9,960").wait_for()
    steps.focus()
    page.keyboard.press("End")
    steps.locator(".sgpu-line", has_text="✓ valid").first.wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator(".sgpu-chosen", has_text="Step 9,990").wait_for()
    tree = page.locator(".sgpu-tensors")
    tree.locator(".sgpu-line", has_text="8×4").wait_for()
    tree.locator(".sgpu-line", has_text="8×4").click()
    page.locator(".sgpu-values", has_text="norm 102.1").wait_for()
    assert page.locator(".sgpu-bin").count() == 40
    page.locator(".sgpu-facts", has_text="damaged").wait_for()
    one.shot_of_view("checkpoints-light", shots)
    page.get_by_role("tab", name="Facts").click()
    page.locator(".sgpu-facts-list", has_text="epoch 9, batch 990").wait_for()
    page.get_by_role("tab", name="Actions").click()
    page.locator(".sgpu-code", has_text=".copy(9990, ").wait_for()
    page.get_by_label("why it is protected").fill("published")
    page.get_by_role("button", name="Protect", exact=True).click()
    page.locator(".sgpu-line", has_text="9,990").locator("text=protected (published)").wait_for()
    assert page.get_by_role("button", name="Delete …").is_disabled()
    page.get_by_label("Show", exact=True).select_option("protected")
    page.wait_for_function("document.querySelectorAll('.sgpu-steps-list .sgpu-line').length === 1")
    page.get_by_label("Show", exact=True).select_option("damaged")
    steps.locator(".sgpu-line", has_text="9,960").wait_for()
    page.get_by_label("Show", exact=True).select_option("all")
    page.get_by_role("button", name="End protection").click()
    page.locator(".sgpu-job[data-state=done]", has_text="no longer protected").wait_for()
    page.get_by_label("file or folder to export to").fill(str(tmp_path / "out.pt"))
    page.get_by_label("format").select_option("torch")
    page.get_by_label("file or folder to export to").fill(str(tmp_path / "out.pt"))
    page.get_by_role("button", name="Export", exact=True).click()
    page.locator(".sgpu-job[data-state=done]", has_text="step 9,990 as torch").wait_for()
    assert (tmp_path / "out.pt").exists()
    one.shot_of_view("checkpoints-actions", shots)
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".sgpu-difference", has_text="no difference in tensors").wait_for()
    steps.locator(".sgpu-line", has_text="9,950").click()
    page.locator(".sgpu-chosen", has_text="Step 9,950").wait_for()
    page.get_by_role("tab", name="Actions").click()
    page.get_by_role("button", name="Verify every byte").click()
    page.locator(".sgpu-job[data-state=failed]", has_text="its bytes are not those that were written").wait_for()
    page.locator(".sgpu-line[data-state=damaged]", has_text="9,950").wait_for()
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("button", name="No", exact=True).click()
    assert (many / "step-00009950").exists()
    page.get_by_role("button", name="Delete …").click()
    page.get_by_role("button", name="Yes, delete it").click()
    page.locator(".sgpu-facts", has_text="999 checkpoints").wait_for()
    assert not (many / "step-00009950").exists()
    page.get_by_role("button", name="Keep as text").click()
    page.locator(".jp-OutputArea .sgpu-static", has_text="999 checkpoints").wait_for()
    assert page.locator(".sgpu-run").count() == 0
    assert one.errors == []


def test_a_hundred_thousand_tensors_in_a_narrow_dark_window(
    notebook: Callable[..., Any], lab: Any, tmp_path: pathlib.Path, shots: pathlib.Path
) -> None:
    make("wide", tmp_path / "wide", 100_000)
    lab.settings("themes", theme="JupyterLab Dark")
    one = notebook("wide", [OPEN.format(root=str(tmp_path / "wide"))], height=1250, width=640)
    one.run_all()
    page = one.page
    page.locator(".sgpu-dark .sgpu-steps-list .sgpu-line").first.click()
    tree = page.locator(".sgpu-tensors")
    tree.locator(".sgpu-line", has_text="layers").wait_for()
    page.locator(".sgpu-bar", has_text="reading shapes").wait_for(state="hidden")
    tree.focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    tree.locator(".sgpu-line[aria-level='3']").first.wait_for()
    page.keyboard.press("End")
    tree.locator(".sgpu-line", has_text="16665").wait_for()
    assert tree.locator(".sgpu-line").count() < 50, "all lines are in the page"
    page.get_by_role("searchbox", name="Find").fill("16665.attn.q")
    tree.locator(".sgpu-line", has_text="model.layers.16665.attn.q.weight").click()
    page.locator(".sgpu-values", has_text="norm 0").wait_for()
    one.shot_of_view("checkpoints-dark-narrow", shots)
    fits = page.locator(".sgpu-run").evaluate("run => run.scrollWidth <= run.clientWidth + 1")
    assert fits, "the view is wider than its cell"
    assert one.errors == []
