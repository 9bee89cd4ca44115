"""The goodput planner in JupyterLab."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

PLAN = """
from sgpu.widgets import GoodputPlanner
planner = GoodputPlanner()
planner
"""
WAIT = """
import time
until = time.monotonic() + 30
while planner.state.gpus != 65536 and time.monotonic() < until:
    time.sleep(0.1)
print("seen", planner.state.gpus)
"""


def fits(page: Any) -> bool:
    return bool(page.locator(".sgpu-run").evaluate("run => run.scrollWidth <= run.clientWidth + 1"))


def test_sliders_move_figures_and_charts_and_a_picture_stays(notebook: Callable[..., Any], shots: pathlib.Path) -> None:
    one = notebook("plan", [PLAN, WAIT], height=1150, width=1360)
    one.run_all()
    page = one.page
    page.locator(".sgpu-plot canvas").first.wait_for()
    assert page.locator(".sgpu-name").inner_text() == "1,024 GPUs for 30 days"
    before = page.locator(".sgpu-figure-value").first.inner_text()
    label = page.locator(".sgpu-plot").first.get_attribute("aria-label")
    page.get_by_role("slider", name="GPUs", exact=True).focus()
    page.keyboard.press("End")  # heard while the next cell keeps the kernel busy
    page.locator(".sgpu-name", has_text="65,536 GPUs for 30 days").wait_for()
    assert page.locator(".sgpu-figure-value").first.inner_text() != before
    assert page.locator(".sgpu-plot").first.get_attribute("aria-label") != label
    page.locator(".jp-OutputArea-output", has_text="seen 65536").wait_for()
    page.get_by_label("price, exactly").fill("2.5")
    page.keyboard.press("Enter")
    page.locator(".sgpu-figure", has_text="lost money").wait_for()
    field = page.get_by_label("interval, exactly")
    field.fill("2 h")
    page.keyboard.press("Enter")
    page.locator(".sgpu-remarks", has_text="first-order estimate").wait_for()
    assert not page.get_by_label("the best one").is_checked()
    one.shot_of_view("planner-light", shots)
    field.fill("soon")
    page.keyboard.press("Enter")
    page.locator(".sgpu-trouble", has_text="must be a time").wait_for()
    page.get_by_role("button", name="GPU parts, a good day").click()
    page.locator(".sgpu-source", has_text="1 % of GPUs fail within a year").wait_for()
    page.get_by_role("button", name="Keep as picture").click()
    page.locator(".jp-OutputArea .sgpu-static img[alt^='charts']").wait_for()
    assert page.locator(".sgpu-run").count() == 0
    page.keyboard.press("Control+s")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    assert set(one.saved().cells[1].outputs[0].data) == {"image/png", "text/html", "text/plain"}
    assert one.errors == []


def test_a_narrow_dark_window_and_the_keyboard(notebook: Callable[..., Any], lab: Any, shots: pathlib.Path) -> None:
    lab.settings("themes", theme="JupyterLab Dark")
    one = notebook("plan-dark", [PLAN], width=640, height=2000)
    one.run_all()
    page = one.page
    page.locator(".sgpu-run.sgpu-dark .sgpu-plot canvas").first.wait_for()
    assert fits(page), "the view is wider than its cell"
    page.get_by_role("slider", name="GPUs", exact=True).focus()
    page.keyboard.press("Home")
    page.locator(".sgpu-name", has_text="8 GPUs for 30 days").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "GPUs, exactly"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus cannot be seen"
    page.keyboard.type("512")
    page.keyboard.press("Enter")
    page.locator(".sgpu-name", has_text="512 GPUs for 30 days").wait_for()
    one.shot_of_view("planner-dark-narrow", shots)
    assert one.errors == []
