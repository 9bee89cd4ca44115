"""Reading a server without mlflow: what an old one lacks, and what a broken one answers."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sgpu.contract.errors import SgpuError
from sgpu.metrics import mlflow_http, mlflow_reader

STEPS = 30_000


def _point(key: str, step: int) -> dict[str, Any]:
    return {"key": key, "value": step / 2, "step": step, "timestamp": 1000 * step}


class OldServer(ThreadingHTTPServer):
    """Before MLflow 2.11: whole histories only. `asked` holds the addresses that were."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []
        self.broken = False


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        parts = urllib.parse.urlsplit(self.path)
        asked = urllib.parse.parse_qs(parts.query)
        name = parts.path.rpartition("/")[2]
        server.asked.append(name)
        if name == "get":
            answer: Any = {"run": {"data": {"metrics": [_point("loss", STEPS - 1), _point("system/rank0/x", 3)]}}}
        elif name == "get-history":
            answer = {"metrics": [_point(asked["metric_key"][0], step) for step in range(STEPS)]}
        else:
            self.send_error(404)
            return
        content = json.dumps(answer).encode() if not server.broken else b"<html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def old() -> Iterator[OldServer]:
    server = OldServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _uri(server: OldServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_server_that_cannot_sample_gives_all_and_it_is_thinned_here(old: OldServer) -> None:
    told = list(mlflow_reader.histories(_uri(old), "abc", most_points=500))
    assert [key for key, _ in told] == ["loss"], "no outline, and nothing of the machine"
    points = told[0][1]
    assert (points[0].step, points[-1].step, len(points)) == (0, STEPS - 1, 500)
    assert (points[-1].value, points[-1].time_seconds) == ((STEPS - 1) / 2, STEPS - 1)
    assert old.asked.count("get-history-bulk-interval") >= 2, "it was asked for samples first"
    assert old.asked.count("get-history") == 1


def test_what_is_no_answer_is_an_error_that_names_the_server(old: OldServer) -> None:
    old.broken = True
    with pytest.raises(SgpuError, match=f"cannot read MLflow at {_uri(old)}"):
        mlflow_http.latest(_uri(old), "abc")
    with pytest.raises(SgpuError, match="cannot read MLflow"):
        list(mlflow_http.histories(_uri(old), "abc", ["loss"], 10))
