"""A real JupyterLab on loopback, and a headless Chromium that looks at it."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import nbformat
import pytest

TOKEN = "sgpu-test"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
GROWING_RUN = pathlib.Path(__file__).parent.parent / "widgets" / "growing_run.py"
STARTED = re.compile(r"\| (Idle|Busy)")
HARMLESS = ("favicon", "Failed to load resource: the server responded with a status of 404")


@dataclass(frozen=True, kw_only=True)
class Lab:
    url: str
    root: pathlib.Path

    def ask(self, method: str, path: str, value: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if value is None else json.dumps(value).encode(),
            headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def settings(self, plugin: str, **values: str) -> None:
        path = f"/lab/api/settings/@jupyterlab/apputils-extension:{plugin}"
        self.ask("PUT", path, {"raw": json.dumps(values)})


@dataclass(kw_only=True)
class Opened:
    """A notebook in a tab. `page` is Playwright's."""

    page: Any
    path: pathlib.Path
    run_root: pathlib.Path
    errors: list[str] = field(default_factory=list)

    def run_all(self) -> None:
        self.page.locator(".jp-StatusBar-TextItem", has_text="| Idle").wait_for()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def shot(self, name: str, folder: pathlib.Path) -> None:
        self.page.screenshot(path=str(folder / f"{name}.png"))

    def shot_of_view(self, name: str, folder: pathlib.Path) -> None:
        self.page.locator(".sgpu-run").screenshot(path=str(folder / f"{name}.png"))

    def saved(self) -> Any:
        return nbformat.read(self.path, as_version=4)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/api?token={TOKEN}", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"JupyterLab did not come up at {url}:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    for module in ("playwright", "jupyterlab", "anywidget"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (pip install 'sgpu[test]')")
    return found


@pytest.fixture(scope="session")
def lab(chromium_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("lab")
    folders = {
        "JUPYTER_CONFIG_DIR": ".config", "JUPYTER_DATA_DIR": ".data", "JUPYTER_RUNTIME_DIR": ".runtime",
        "JUPYTERLAB_SETTINGS_DIR": ".lab", "JUPYTERLAB_WORKSPACES_DIR": ".spaces", "IPYTHONDIR": ".ipython",
        "HOME": ".",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(root / folder) for name, folder in folders.items()}}
    quiet = root / ".lab/@jupyterlab/apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    port, log = _free_port(), root / ".lab.log"
    command = [
        sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}", "--ServerApp.port_retries=0",
        "--LabApp.news_url=''", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=root)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, server, log)
        yield Lab(url=url, root=root)
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where screenshots go."""
    return tmp_path_factory.mktemp("shots")


@pytest.fixture
def browser(chromium_path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium_path, headless=True, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def notebook(lab: Lab, browser: Any, tmp_path: pathlib.Path) -> Iterator[Callable[..., Opened]]:
    """`notebook("name", [cells], width=...)` opens a new notebook; its kernel is ended after the test.

    Cells may use `RUN`, `GROWING_RUN` and `FOLDER` (strings) in braces.
    """
    opened: list[Opened] = []

    def open_notebook(
        name: str,
        cells: list[str],
        *,
        width: int = 1280,
        height: int = 1000,
        scheme: str = "light",
        content: Any = None,
    ) -> Opened:
        run_root = tmp_path / "runs" / name
        run_root.parent.mkdir(exist_ok=True)
        known = {"RUN": str(run_root), "GROWING_RUN": str(GROWING_RUN), "FOLDER": str(tmp_path)}
        head = "\n".join(f"{key} = {value!r}" for key, value in known.items())
        content = content or nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in [head, *cells]],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        path = lab.root / f"{name}.ipynb"
        nbformat.write(content, path)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.set_default_timeout(60_000)
        one = Opened(page=page, path=path, run_root=run_root)

        def take(message: Any) -> None:
            if message.type == "error" and not any(harmless in message.text for harmless in HARMLESS):
                one.errors.append(message.text)

        page.on("console", take)
        page.on("pageerror", lambda error: one.errors.append(str(error)))
        page.goto(f"{lab.url}/lab/tree/{name}.ipynb?reset&token={TOKEN}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        opened.append(one)
        return one

    lab.settings("themes", theme="JupyterLab Light")
    lab.settings("kernels-settings", commsOverSubshells="perCommTarget")
    yield open_notebook
    for one in opened:
        if not one.page.is_closed():
            one.page.locator(".jp-StatusBar-TextItem", has_text=STARTED).wait_for()  # or its kernel is not in the list
            one.page.close()
    for session in lab.ask("GET", "/api/sessions"):
        lab.ask("DELETE", f"/api/sessions/{session['id']}")
