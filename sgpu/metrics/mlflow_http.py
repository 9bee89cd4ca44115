"""Reads an MLflow server without mlflow, whose import alone takes seconds: what charts of a long run need."""

from __future__ import annotations

import base64
import functools
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from sgpu.contract.errors import SgpuError

_RUN = "/api/2.0/mlflow/runs/get"
_BULK = "/api/2.0/mlflow/metrics/get-history-bulk-interval"  # MLflow 2.11 and newer
_WHOLE = "/api/2.0/mlflow/metrics/get-history"
_AT_ONCE = 4
_OUTLINE_PLACES = 8
_OUTLINE_WIDTH = 1000  # a place is a 1000th of the steps: enough for metrics that are logged now and then
_TIMEOUT_SECONDS = 20.0
Raw = Mapping[str, Any]  # a metric as MLflow's REST interface gives it: key, value, step, timestamp


def latest(tracking_uri: str, run_id: str) -> list[Raw]:
    """The last value of each metric.

    Raises:
        SgpuError: the server does not answer, or asks for credentials that the URI does not hold.
    """
    data = _ask(tracking_uri, _RUN, {"run_id": run_id})["run"].get("data", {})
    return list(data.get("metrics", []))


def outlines(tracking_uri: str, run_id: str, last: Sequence[Raw]) -> Iterator[tuple[str, list[Raw]]]:
    """A few points of each metric from end to end, as they come; nothing from a server that is too old for it.

    A server that samples a long history reads all of it. What lies in a few narrow ranges costs it a tenth of that.

    Args:
        last: the last value of each metric that is wanted, as `latest` gives them.

    Raises:
        SgpuError: as `latest`.
    """

    def one(raw: Raw) -> list[Raw]:
        end = int(raw.get("step", 0))
        width = end // _OUTLINE_WIDTH
        found: list[Raw] = []
        for place in range(_OUTLINE_PLACES):
            start = end * place // _OUTLINE_PLACES
            found += _sampled(tracking_uri, run_id, str(raw["key"]), 2, (start, start + width))
        return [*found, raw]

    try:
        yield from _each({str(raw["key"]): functools.partial(one, raw) for raw in last})
    except _MissingError:
        return


def histories(tracking_uri: str, run_id: str, keys: Sequence[str], most_points: int) -> Iterator[tuple[str, list[Raw]]]:
    """Each metric over steps, as they come; several are asked for at once.

    The server thins them; one before MLflow 2.11 cannot, and gives every point.

    Raises:
        SgpuError: as `latest`.
    """

    def one(key: str) -> list[Raw]:
        try:
            return _sampled(tracking_uri, run_id, key, most_points)
        except _MissingError:
            found = _ask(tracking_uri, _WHOLE, {"run_id": run_id, "metric_key": key})
            return list(found.get("metrics", []))

    yield from _each({key: functools.partial(one, key) for key in keys})


class _MissingError(SgpuError):
    """The server knows no such address, or no such run."""


def _each(asked: Mapping[str, Callable[[], list[Raw]]]) -> Iterator[tuple[str, list[Raw]]]:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sgpu-mlflow") as pool:
        waiting = {pool.submit(ask): key for key, ask in asked.items()}
        try:
            for answer in as_completed(waiting):
                yield waiting[answer], answer.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _sampled(
    tracking_uri: str, run_id: str, key: str, most_points: int, steps: tuple[int, int] | None = None
) -> list[Raw]:
    asked = {"run_ids": run_id, "metric_key": key, "max_results": str(most_points)}
    if steps is not None:
        asked |= {"start_step": str(steps[0]), "end_step": str(steps[1])}
    return list(_ask(tracking_uri, _BULK, asked).get("metrics", []))


def _ask(tracking_uri: str, path: str, asked: Mapping[str, str]) -> Any:
    parts = urllib.parse.urlsplit(tracking_uri)
    user, _, place = parts.netloc.rpartition("@")
    address = f"{parts.scheme}://{place}{parts.path.rstrip('/')}{path}?{urllib.parse.urlencode(asked)}"
    known = {"Authorization": f"Basic {base64.b64encode(urllib.parse.unquote(user).encode()).decode()}"} if user else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=known), timeout=_TIMEOUT_SECONDS) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        kind = SgpuError
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            kind = _MissingError if error.code == 404 else SgpuError
        raise kind(f"cannot read MLflow at {parts.scheme}://{place}: {error}") from error
