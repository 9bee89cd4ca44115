"""Reads an MLflow server without mlflow, whose import alone takes seconds: what charts of a long run need."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from sgpu.contract.errors import SgpuError

_RUN = "/api/2.0/mlflow/runs/get"
_BULK = "/api/2.0/mlflow/metrics/get-history-bulk-interval"
_AT_ONCE = 4
_TIMEOUT_SECONDS = 20.0
Raw = Mapping[str, Any]  # a metric as MLflow's REST interface gives it: key, value, step, timestamp


def latest(tracking_uri: str, run_id: str) -> list[Raw]:
    """The last value of each metric.

    Raises:
        SgpuError: the server does not answer, or asks for credentials that the URI does not hold.
    """
    data = _ask(tracking_uri, _RUN, {"run_id": run_id})["run"].get("data", {})
    return list(data.get("metrics", []))


def histories(tracking_uri: str, run_id: str, keys: list[str], most_points: int) -> Iterator[tuple[str, list[Raw]]]:
    """Each metric over steps, thinned by the server, as they come; several are asked for at once.

    Raises:
        SgpuError: as `latest`.
    """

    def one(key: str) -> list[Raw]:
        asked = {"run_ids": run_id, "metric_key": key, "max_results": str(most_points)}
        return list(_ask(tracking_uri, _BULK, asked).get("metrics", []))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sgpu-mlflow") as pool:
        asked = {pool.submit(one, key): key for key in keys}
        try:
            for answer in as_completed(asked):
                yield asked[answer], answer.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ask(tracking_uri: str, path: str, asked: Mapping[str, str]) -> Any:
    parts = urllib.parse.urlsplit(tracking_uri)
    user, _, place = parts.netloc.rpartition("@")
    address = f"{parts.scheme}://{place}{parts.path.rstrip('/')}{path}?{urllib.parse.urlencode(asked)}"
    known = {"Authorization": f"Basic {base64.b64encode(urllib.parse.unquote(user).encode()).decode()}"} if user else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=known), timeout=_TIMEOUT_SECONDS) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SgpuError(f"cannot read MLflow at {parts.scheme}://{place}: {error}") from error
