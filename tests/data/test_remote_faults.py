"""A remote that fails in every way: what comes is right, or the error says what is wrong; nothing waits for ever."""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest

import sgpu.data.caching.reading
from sgpu.contract.errors import FetchError, InputError
from sgpu.data import VolumeDataset, VolumeFiles
from sgpu.data.volumes import url as url_volumes
from sgpu.data.volumes.credentials import is_refused, name_of
from sgpu.testing.proxy import Fault, FaultyProxy
from tests.data import keys

FILES, SIZE = 3, 200_000


def body(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


class Quiet(SimpleHTTPRequestHandler):
    """One request a connection, so that a fault of a connection is one of a request. Knows ranges where told to."""

    ranges = False

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def end_headers(self) -> None:
        self.send_header("Connection", "close")
        super().end_headers()

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if not asked or not self.ranges:
            super().do_GET()
            return
        first, last = (int(text) for text in asked.removeprefix("bytes=").split("-"))
        content = pathlib.Path(self.translate_path(self.path)).read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])


class Server(ThreadingHTTPServer):
    """Says nothing of replies that the proxy cut."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[int]:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.bin").write_bytes(body(number))
    handler = type("Handler", (Quiet,), {"ranges": getattr(request, "param", False)})
    with Server(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgpu.data.caching.reading, "_BACKOFF_SECONDS", 0.001)


@pytest.mark.parametrize("fault", ["reset", "unavailable", "cut_reply", "hold", "stall_reply"])
def test_a_request_that_fails_is_made_again(fault: Fault, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyProxy("127.0.0.1", server) as proxy:
        files = VolumeFiles(f"http://127.0.0.1:{proxy.port}", pattern="*.bin")
        if fault in ("hold", "stall_reply"):
            monkeypatch.setattr(url_volumes, "STALL_SECONDS", 1.0)
        for number in range(FILES):
            proxy.fail(fault, after_bytes=50_000)
            assert pathlib.Path(files[number]).read_bytes() == body(number)
        assert proxy.fired == FILES
        assert fault == "reset" or files.source.counts().retries == FILES  # aiohttp may ask again by itself
        proxy.release()


def test_a_remote_that_stays_away_is_an_error_with_its_name(server: int) -> None:
    with FaultyProxy("127.0.0.1", server) as proxy:
        files = VolumeFiles(f"http://127.0.0.1:{proxy.port}", pattern="*.bin")
        proxy.fail("unavailable", connections=5)
        with pytest.raises(FetchError, match=r"could not read 1\.bin of volume http.* after 5 tries"):
            files[1]
        assert proxy.fired == 5
        assert pathlib.Path(files[1]).read_bytes() == body(1)


@pytest.mark.parametrize("server", [False, True], indirect=True)
def test_large_files_come_in_pieces_and_each_may_fail(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a server that knows no ranges and sends the whole each time."""
    monkeypatch.setattr(url_volumes, "RANGE_BYTES", 30_000)
    with FaultyProxy("127.0.0.1", server) as proxy:
        files = VolumeFiles(f"http://127.0.0.1:{proxy.port}", pattern="*.bin")
        proxy.fail("cut_reply", after_bytes=1000)
        assert [pathlib.Path(files[number]).read_bytes() for number in range(FILES)] == [body(n) for n in range(FILES)]
        assert proxy.fired == 1
        entry = files.source.listing.entry(2)
        assert files.source.volume.read(entry, 199_990, SIZE) == body(2, 10)


def test_a_flipped_bit_is_seen_where_the_store_tells_checksums(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = url_volumes.digest_of
    monkeypatch.setattr(
        url_volumes, "digest_of",
        lambda facts: told({"md5Hash": base64.b64encode(hashlib.md5(body(int(facts["name"][-5]))).digest()).decode()}),
    )  # fmt: skip
    with FaultyProxy("127.0.0.1", server) as proxy:
        files = VolumeFiles(f"http://127.0.0.1:{proxy.port}", pattern="*.bin")
        proxy.fail("flip_reply", after_bytes=100_000)
        assert pathlib.Path(files[1]).read_bytes() == body(1)
        assert proxy.fired == 1
        assert files.source.counts().retries == 1


@pytest.fixture
def guarded() -> Iterator[str]:
    fsspec.register_implementation("guarded", keys.Guarded, clobber=True)
    keys.issued.clear()
    keys.Guarded.used.clear()
    keys.Guarded.store.clear()
    keys.Guarded("writer").pipe({f"/shop/{number}": body(number, 10) for number in range(8)})
    yield "guarded://shop"
    keys.Guarded.clear_instance_cache()


def test_credentials_that_expire_are_asked_for_anew(guarded: str) -> None:
    files = VolumeDataset(guarded, credentials=keys.fresh)
    assert sorted(pathlib.Path(path).read_bytes() for path in files) == [body(number, 10) for number in range(8)]
    assert len(keys.issued) == 3
    assert files.source.counts().retries == 0, "a renewal is no failure"
    assert files.source.options.credentials == "tests.data.keys:fresh"


def test_credentials_that_stay_refused_are_named(guarded: str) -> None:
    files = VolumeDataset(guarded, credentials=keys.stale)
    with pytest.raises(FetchError, match=r"these credentials, and also those that were looked up anew.*Expired"):
        list(files)
    assert keys.issued == ["token 0"] * 2


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    with pytest.raises(InputError, match="must be a function of a module"):
        name_of(lambda: {})
    with pytest.raises(InputError, match="cannot be imported"):
        name_of("no_such_module:fresh")
    with pytest.raises(InputError, match="cannot be imported"):
        name_of("tests.data.keys:no_such")
    assert name_of("tests.data.keys:fresh") == name_of(keys.fresh)


@pytest.mark.parametrize(
    ("problem", "refused"),
    [
        (PermissionError("no"), True), (OSError("An error occurred (ExpiredToken)"), True),
        (RuntimeError("403, message='Forbidden'"), True), (OSError("RequestTimeTooSkewed: the clock"), True),
        (FileNotFoundError("403.jpg"), False), (OSError("connection reset"), False),
        (OSError("5401 bytes came"), False),
    ],
)  # fmt: skip
def test_a_refusal_is_told_from_other_failures(problem: Exception, refused: bool) -> None:
    assert is_refused(problem) is refused


def test_an_unknown_scheme_names_what_to_install() -> None:
    made: Any = "gopher://hole"
    with pytest.raises(InputError, match=r"install the fsspec package that serves it, as with pip install"):
        VolumeDataset(made)
