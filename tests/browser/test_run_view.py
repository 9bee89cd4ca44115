"""The live view in JupyterLab, over a run folder that grows."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from nbconvert import HTMLExporter

pytestmark = pytest.mark.browser

START = """
import pathlib, subprocess, sys
from sgpu.contract.rundir import RunDir
from sgpu.widgets import show
run = RunDir(pathlib.Path(RUN))
command = [sys.executable, GROWING_RUN, RUN, "{seconds}", *{options!r}]
writer = subprocess.Popen(command, start_new_session=True)
while not run.spec.exists() and writer.poll() is None:
    pass
def stop():
    pathlib.Path(FOLDER, "stopped").write_text("x")
    run.cancel.touch()
"""
FOLLOW = "view = show(run, stop)\nview.start()"
BLOCK = """
import time
view = show(run, stop)
while not view.wait_final(0) and writer.poll() is None:
    view.refresh()
    time.sleep(0.1)
view.finish()
"""


INTERRUPTED = """
import time
view = show(run, stop)
try:
    while not view.wait_final(0) and writer.poll() is None:
        view.refresh()
        time.sleep(0.1)
except KeyboardInterrupt:
    stop()
    writer.wait()
view.finish()
"""
ENDED = """
writer.wait()
from sgpu.widgets import RunView
RunView(run)
"""


def start(seconds: float, *options: str) -> str:
    return START.format(seconds=seconds, options=list(options))


def steps_done(page: Any) -> int:
    found = re.search(r"step ([\d,]+)", page.locator(".sgpu-steps").inner_text())
    return int(found[1].replace(",", "")) if found else 0


@pytest.mark.timeout(240)  # three kernels one after the other
def test_a_run_is_shown_live_and_stays_as_a_picture(notebook: Callable[..., Any], shots: pathlib.Path) -> None:
    one = notebook("live", [start(8), FOLLOW, "1 + 1"], height=1300)
    one.run_all()
    page = one.page
    page.wait_for_selector(".sgpu-chart canvas")
    first = steps_done(page)
    label = page.locator(".sgpu-chart-body").first
    before = label.get_attribute("aria-label")
    pixels = page.locator(".sgpu-chart canvas").first.evaluate("canvas => canvas.toDataURL()")
    page.wait_for_function(
        "first => Number(document.querySelector('.sgpu-steps').textContent.match(/step ([\\d,]+)/)[1]) > first + 20",
        arg=first,
    )
    assert label.get_attribute("aria-label") != before
    assert page.locator(".sgpu-chart canvas").first.evaluate("canvas => canvas.toDataURL()") != pixels
    assert page.locator(".sgpu-chart-title").count() == 5
    page.locator(".sgpu-facts", has_text="1 restart").wait_for()
    page.locator(".sgpu-part-restart").first.wait_for()
    page.wait_for_function("Number(document.querySelector('.sgpu-steps').textContent.match(/step ([\\d,]+)/)[1]) > 220")
    one.shot("live-light", shots)
    one.shot_of_view("view-light", shots)
    page.locator(".sgpu-run").get_by_role("tab", name="Events").click()
    page.locator(".sgpu-event", has_text="restarted from step 120 in 0.9 s; 20 steps done again").wait_for()
    page.locator(".sgpu-run").get_by_role("tab", name="Logs").click()
    page.locator(".sgpu-log", has_text="rank 0: step 40 evaluated").wait_for()
    page.get_by_label("Rank", exact=True).select_option("1")
    page.locator(".sgpu-log", has_text="Segmentation fault").wait_for()
    page.get_by_role("searchbox", name="Search").fill("segmentation")
    page.wait_for_function("document.querySelector('.sgpu-log').textContent.split('\\n').length === 1")
    one.shot("live-logs", shots)
    page.locator(".sgpu-run").get_by_role("tab", name="Machines").click()
    page.locator(".sgpu-usage-chart canvas").nth(9).wait_for()
    busy = page.locator(".sgpu-usage-chart", has_text="GPU busy")
    assert re.fullmatch(r"(rank [01] \d+ % · highest \d+ %\s*){2}", busy.locator(".sgpu-legend").inner_text())
    label = busy.locator(".sgpu-plot").get_attribute("aria-label")
    assert re.match(r"GPU busy over the time of the run. rank 0, \d+ %, highest \d+ %; rank 1, ", label)
    assert page.locator(".sgpu-usage-chart", has_text="memory").nth(1).inner_text().count("of 1.1 TB") == 1
    one.shot_of_view("machines-light", shots)

    picture = page.locator(".jp-OutputArea .sgpu-static img[alt^='charts']")
    picture.wait_for()
    assert page.locator(".sgpu-run").count() == 0
    one.shot("static", shots)
    page.keyboard.press("Control+s")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    saved = one.saved().cells[2].outputs
    assert len(saved) == 1
    assert set(saved[0].data) == {"image/png", "text/html", "text/plain"}
    assert "train: finished on 2 GPUs" in saved[0].data["text/plain"]
    assert one.errors == []
    content = one.saved()
    check_last_state(notebook("trusted", [], content=content).page, "trusted", shots)
    check_as_a_page(page.context.browser, content, shots)
    content.cells[0].source += "\n# edited elsewhere: no longer trusted"
    for cell in content.cells:
        cell.metadata.pop("trusted", None)
    check_last_state(notebook("untrusted", [], content=content).page, "untrusted", shots)


def check_last_state(page: Any, name: str, shots: pathlib.Path) -> None:
    picture = page.locator(".jp-OutputArea img[alt^='charts']")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 300
    told = page.locator(".jp-OutputArea", has_text="train:").inner_text().strip()
    assert told.startswith("train: finished on 2 GPUs")
    assert "model not found" not in told.lower()
    page.screenshot(path=str(shots / f"{name}.png"))


def check_as_a_page(browser: Any, content: Any, shots: pathlib.Path) -> None:
    """What nbconvert makes of it, with nobody to ask."""
    text, _ = HTMLExporter().from_notebook_node(content)
    path = shots / "converted.html"
    path.write_text(text)
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.route(re.compile("^https?:"), lambda route: route.abort())
    page.goto(path.as_uri(), wait_until="domcontentloaded")
    check_last_state(page, "converted", shots)
    page.close()


def test_stop_asks_once_while_the_cell_keeps_the_kernel_busy(
    notebook: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    one = notebook("asks", [start(40), BLOCK])
    one.run_all()
    page = one.page
    page.wait_for_selector(".sgpu-chart canvas")
    page.locator(".sgpu-run").get_by_role("button", name="■ Stop").click()
    page.get_by_role("button", name="No, go on").click()
    page.locator(".sgpu-run").get_by_role("button", name="■ Stop").click()
    assert not (tmp_path / "stopped").exists()
    page.get_by_role("button", name="Yes, stop it").click()
    page.locator(".jp-OutputArea .sgpu-static", has_text="train: cancelled").wait_for()
    assert (tmp_path / "stopped").exists()
    assert one.errors == []


def test_keyboard_alone_in_a_narrow_dark_window_with_a_hostile_run(
    notebook: Callable[..., Any], lab: Any, tmp_path: pathlib.Path, shots: pathlib.Path
) -> None:
    lab.settings("themes", theme="JupyterLab Dark")
    one = notebook("dark", [start(40, "--hostile"), FOLLOW], width=640, height=1100, scheme="light")
    one.run_all()
    page = one.page
    page.wait_for_selector(".sgpu-chart canvas")
    page.locator(".sgpu-run.sgpu-dark").wait_for()
    text = page.locator(".sgpu-steps").evaluate("element => getComputedStyle(element).color")
    assert min(int(part) for part in re.findall(r"\d+", text)[:3]) > 180, f"text of colour {text} on a dark page"
    one.shot("dark-narrow", shots)
    assert page.locator(".sgpu-name").inner_text().startswith("<img src=x onerror=")
    assert page.evaluate("window.hacked") is None
    assert page.locator(".sgpu-run img").count() == 0
    wide = page.locator(".sgpu-run").evaluate("run => run.scrollWidth <= run.clientWidth + 1")
    assert wide, "the view is wider than its cell"

    page.locator(".sgpu-run").get_by_role("tab", name="Machines").wait_for()  # not there before its first figures
    page.locator(".sgpu-run").get_by_role("tab", name="Charts").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Events"
    page.locator(".sgpu-events").wait_for()
    page.keyboard.press("End")
    page.locator(".sgpu-usage-chart canvas").first.wait_for()
    one.shot("machines-dark-narrow", shots)
    page.keyboard.press("ArrowLeft")
    page.locator(".sgpu-log").wait_for()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus cannot be seen"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    page.locator(".sgpu-run").get_by_role("button", name="■ Stop").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "No, go on"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "■ Stop"
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.locator(".jp-OutputArea .sgpu-static", has_text="cancelled").wait_for()
    assert (tmp_path / "stopped").exists()
    assert page.evaluate("window.hacked") is None
    assert one.errors == []


def test_stop_interrupts_a_busy_cell_where_the_kernel_hears_nothing_else(
    notebook: Callable[..., Any], lab: Any, tmp_path: pathlib.Path
) -> None:
    lab.settings("kernels-settings", commsOverSubshells="disabled")
    one = notebook("interrupt", [start(40), INTERRUPTED])
    one.run_all()
    page = one.page
    page.wait_for_selector(".sgpu-chart canvas")
    first = steps_done(page)
    page.wait_for_function(
        "first => Number(document.querySelector('.sgpu-steps').textContent.match(/step ([\\d,]+)/)[1]) > first",
        arg=first,
    )
    page.locator(".sgpu-run").get_by_role("button", name="■ Stop").click()
    page.get_by_role("button", name="Yes, stop it").click()
    page.locator(".jp-OutputArea .sgpu-static", has_text="train: cancelled").wait_for()
    assert (tmp_path / "stopped").exists()
    assert one.errors == []


def test_a_failed_run_shows_its_root_cause_and_the_failing_ranks_log(
    notebook: Callable[..., Any], shots: pathlib.Path
) -> None:
    one = notebook("failed", [start(2, "--fail", "--hostile"), ENDED])
    one.run_all()
    page = one.page
    failure = page.locator(".sgpu-failure")
    failure.wait_for()
    assert failure.inner_text().startswith("✕ root cause: rank 1 raised RuntimeError after step 60: CUDA error")
    assert "<img src=x onerror=" in failure.inner_text()
    assert page.locator(".sgpu-run img").count() == 0
    assert page.evaluate("window.hacked") is None
    assert page.locator(".sgpu-traceback").inner_text().startswith("Traceback (most recent call last):")
    assert page.locator(".sgpu-run").get_by_role("button", name="■ Stop").count() == 0
    page.locator(".sgpu-run").get_by_role("tab", name="Logs").click()
    page.locator(".sgpu-log", has_text="RuntimeError: CUDA error: an illegal").wait_for()
    assert page.get_by_label("Rank", exact=True).locator("option").all_inner_texts() == ["1 (failed)", "0"]
    one.shot("failed", shots)
    assert one.errors == []


REAL = """
import pathlib, sgpu
from sgpu import CheckpointPolicy, distributed
pathlib.Path(FOLDER, "fail").touch()

@distributed(gpus=2, restarts=0, checkpoints=CheckpointPolicy(every_steps=5))
def train(folder):
    import pathlib, sgpu, time, torch
    from sgpu import TrainLoop
    sgpu.runtime.init()
    model = torch.nn.Linear(2, 1)
    loop = TrainLoop(model=model, loader=[torch.ones(2)] * 40, max_steps=40)
    for batch in loop:
        loop.log(loss=1.0 / (loop.step + 1))
        while loop.step == 20 and not pathlib.Path(folder, "go").exists():
            time.sleep(0.02)
        if loop.step == 22 and pathlib.Path(folder, "fail").exists():
            raise ValueError("asked to fail")

run = train.submit(FOLDER)
pathlib.Path(FOLDER, "id").write_text(run.id)
run
"""


@pytest.mark.timeout(240)  # four starts of Python, two of them with torch
def test_a_real_run_outlives_its_kernel_is_attached_to_fails_and_is_resumed(
    notebook: Callable[..., Any], lab: Any, tmp_path: pathlib.Path, shots: pathlib.Path
) -> None:
    one = notebook("real", [REAL], height=1200)
    one.run_all()
    one.page.locator(".sgpu-steps", has_text="step 20").wait_for()
    (session,) = lab.ask("GET", "/api/sessions")
    lab.ask("DELETE", f"/api/sessions/{session['id']}")
    one.page.close()
    run_id = (tmp_path / "id").read_text()

    attach = f"import sgpu\nfrom sgpu.widgets import RunView\nrun = sgpu.attach({run_id!r})\nRunView(run)"
    other = notebook("attached", [attach], height=1200)
    other.run_all()
    page = other.page
    page.locator(".sgpu-steps", has_text="step 20").wait_for()
    (tmp_path / "go").touch()
    page.locator(".sgpu-failure", has_text="root cause: rank").wait_for()
    other.shot_of_view("real-failed", shots)
    (tmp_path / "fail").unlink()
    page.get_by_role("button", name="Resume", exact=True).click()
    page.locator("[data-state=SUCCEEDED] .sgpu-steps", has_text="step 40 / 40").wait_for()
    assert page.locator(".sgpu-failure").is_hidden()
    assert page.get_by_role("button", name="Resume", exact=True).is_hidden()
    other.shot_of_view("real-resumed", shots)
    assert other.errors == []
