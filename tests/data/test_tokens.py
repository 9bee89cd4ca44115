"""A token that expires again and again, in every process that asks the store: the loop, its workers, its fetcher."""

from __future__ import annotations

import functools
import pathlib
import threading
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from sgpu.contract.errors import FetchError, VolumeError
from sgpu.data import DataLoader, VolumeDataset
from tests.data import keys
from tests.data.test_remote_faults import Quiet, Server

FILES = 240
LARGE = 9_000_000  # comes in ranges
LASTS_REQUESTS = 150  # over half of a listing: it expires once in it, and a new one not before who fetched it asks


class Guard:
    """Issues tokens, each good until so many more requests were let in, whosever; those it refuses do not count.

    Attributes:
        renews: whether it gives new ones, or the first one for ever.
        issued: of each token, how many requests were let in before it.
        refused: requests with a token that had expired.
    """

    def __init__(self) -> None:
        self.let_in, self.renews, self.refused = 0, True, 0
        self.issued: list[int] = []
        self._lock = threading.Lock()

    def issue(self) -> str:
        with self._lock:
            if self.renews or not self.issued:
                self.issued.append(self.let_in)
            return str(len(self.issued) - 1)

    def lets_in(self, header: str | None) -> bool:
        with self._lock:
            good = header is not None and self.let_in < self.issued[int(header.split()[1])] + LASTS_REQUESTS
            self.let_in += good
            self.refused += not good
            return good


class Guarded(Quiet):
    """Serves a folder to who has a token, and tokens to everybody."""

    ranges = True
    guard: Guard

    def do_GET(self) -> None:
        if self.path == "/token":
            body = self.guard.issue().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self._is_let_in():
            super().do_GET()

    def do_HEAD(self) -> None:
        if self._is_let_in():
            super().do_HEAD()

    def _is_let_in(self) -> bool:
        good = self.guard.lets_in(self.headers.get("Authorization"))
        if not good:
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return good


@pytest.fixture
def guarded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Guard]]:
    folder, guard = tmp_path / "files", Guard()
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:04}.bin").write_bytes(b"%04d" % number)
    (folder / "large.bin").write_bytes(b"l" * LARGE)
    handler = type("Handler", (Guarded,), {"guard": guard})
    with Server(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{listening.server_port}"
        monkeypatch.setenv(keys.TOKEN_URL, f"{url}/token")
        yield url, guard
        listening.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here
def test_a_provider_of_new_ones_is_asked_by_every_process(guarded: tuple[str, Guard]) -> None:
    url, guard = guarded
    volume = VolumeDataset(url, pattern="*.bin", shuffle=True, credentials=keys.from_server)
    listed = len(guard.issued)
    assert listed == 2, "it expired while the volume was listed"
    with DataLoader(volume, 8, num_workers=2, collate_fn=list) as loader:
        found = {pathlib.Path(path).name: pathlib.Path(path).read_bytes() for batch in loader for path in batch}
        assert loader.stats().retries == 0, "a renewal is no failure"
    assert found.pop("large.bin") == b"l" * LARGE
    assert found == {f"{number:04}.bin": b"%04d" % number for number in range(FILES)}
    assert guard.let_in > 3 * LASTS_REQUESTS
    assert len(guard.issued) > listed + 2
    assert guard.refused > 2


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_has_no_new_ones_is_named(workers: int, guarded: tuple[str, Guard]) -> None:
    url, guard = guarded
    volume = VolumeDataset(url, pattern="000*.bin", credentials=keys.from_server)
    guard.renews = False
    guard.issued[:] = [-LASTS_REQUESTS] * len(guard.issued)
    with (
        DataLoader(volume, 2, num_workers=workers) as loader,
        pytest.raises(FetchError, match=r"rank 0 could not read 000\d\.bin .*the store refuses these credentials.*401"),
    ):
        list(loader)
    with pytest.raises(VolumeError, match=r"the store refuses these credentials, and also those .*credentials="):
        VolumeDataset(url, pattern="*.bin", credentials=keys.from_server)
