"""A volume behind a plain HTTP server: its listing is a page of links, without sizes."""

from __future__ import annotations

import functools
import pathlib
import socket
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgpu.contract.errors import VolumeError
from sgpu.data import VolumeDataset

FILES = 7


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; says no lengths where told so."""

    lengths = True

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length" or self.lengths or self.path.endswith("/"):
            super().send_header(keyword, value)


@pytest.fixture
def server(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[str]:
    for number in range(FILES):
        folder = tmp_path / "files" / f"{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text("x" * (number + 1))
    handler = type("Handler", (Quiet,), {"lengths": getattr(request, "param", True)})
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(tmp_path / "files"))
    ) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_every_file_arrives_with_its_size(server: str) -> None:
    files = VolumeDataset(server)
    assert len(files) == FILES
    assert sorted(len(pathlib.Path(path).read_text()) for path in files) == [number + 1 for number in range(FILES)]
    assert {files.relative_path(path) for path in files} == {f"{number % 2}/{number}.txt" for number in range(FILES)}


@pytest.mark.parametrize("server", [False], indirect=True)
def test_a_server_that_tells_no_sizes_is_refused_by_name(server: str) -> None:
    with pytest.raises(VolumeError, match=r"txt in volume http.*its size is not told"):
        VolumeDataset(server)


@pytest.mark.parametrize("server", [True], indirect=True)
def test_a_file_an_empty_page_and_nobody_there_are_told_apart(server: str) -> None:
    with pytest.raises(VolumeError, match=r"0/2\.txt is a file\. .*name what is above it, and pattern='2\.txt'"):
        VolumeDataset(f"{server}/0/2.txt")
    with pytest.raises(VolumeError, match="does not exist or holds nothing"):
        VolumeDataset(f"{server}/none")
    with socket.create_server(("127.0.0.1", 0)) as unheard:
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
    with pytest.raises(VolumeError, match=rf"{url} cannot be reached: .*Check its address"):
        VolumeDataset(url)
