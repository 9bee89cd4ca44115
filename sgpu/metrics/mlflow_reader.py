"""Reads MLflow for the notebook's side. Importing this file does not import mlflow; what asks a server does."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgpu import settings
from sgpu.contract.errors import SgpuError
from sgpu.contract.spec import Tracking
from sgpu.metrics import mlflow_http, names, store

_BULK_PATH = "/api/2.0/mlflow/metrics/get-history-bulk-interval"
_MOST_POINTS = 2500  # the server's own limit a call
_LONG_STEPS = 20_000  # shorter histories are read as soon as a few points of them
_OUTLINED = 12  # as many charts as a view shows at first


@dataclass(frozen=True, kw_only=True)
class Active:
    """What the user's notebook has set up in MLflow.

    Attributes:
        uri: None where the user has set none.
        experiment_id: None where neither a run is active nor an experiment was chosen.
        run_id: the run that is active.
    """

    uri: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """One value of a metric; `time_seconds` since 1970."""

    step: int
    value: float
    time_seconds: float


def active_context() -> Active:
    """What is set up in this process: nothing where it has not loaded mlflow (which this does not do either).

    Asks no server: one that is down must not keep a run from starting.
    """
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is None or not hasattr(mlflow, "active_run"):
        return Active()
    run = mlflow.active_run()
    uri = mlflow.get_tracking_uri() if run is not None or mlflow.is_tracking_uri_set() else None
    experiment_id: str | None = None
    if run is not None:
        experiment_id = str(run.info.experiment_id)
    elif uri is not None:
        experiment_id = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_experiment_id", None)
    return Active(uri=uri, experiment_id=experiment_id, run_id=run.info.run_id if run is not None else None)


def default_tracking(home: pathlib.Path) -> str:
    """The tracking URI where the user named none: SQLite in SGPU_HOME."""
    return store.default_uri(home)


def choose_tracking(home: pathlib.Path, working_dir: pathlib.Path) -> Tracking:
    """Where a new run goes: what the notebook has set up, else the environment, else SQLite in `home`.

    Args:
        home: SGPU_HOME.
        working_dir: what relative paths in a tracking URI are relative to.
    """
    active = active_context()
    uri = active.uri or settings.tracking_uri()
    return Tracking(
        uri=store.absolute(uri, working_dir) if uri else default_tracking(home),
        experiment=settings.experiment_name(),
        parent_run_id=active.run_id,
        experiment_id=active.experiment_id,
    )


def latest(tracking_uri: str, run_id: str) -> dict[str, float]:
    """The last value of each metric.

    Raises:
        SgpuError: MLflow cannot be read; says why.
    """
    return {str(key): float(value) for key, value in _run(tracking_uri, run_id).data.metrics.items()}


def history(tracking_uri: str, run_id: str, key: str, *, most_points: int | None = None) -> list[MetricPoint]:
    """All values of a metric by step; where a step has several, the one with the latest time.

    Args:
        tracking_uri: where.
        run_id: MLflow's.
        key: the metric's name there (`rank3/loss` for rank 3).
        most_points: the server may leave out steps in between, down to so many (first and last stay).

    Raises:
        SgpuError: MLflow cannot be read; says why.
    """
    if most_points is not None and most_points <= _MOST_POINTS and tracking_uri.startswith(("http://", "https://")):
        return _by_step(_thinned(tracking_uri, run_id, key, most_points))
    client, errors = _client(tracking_uri)
    try:
        points = [_point(m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, key)]
    except errors as error:
        raise _unreadable(tracking_uri, run_id, error) from error
    return _thin(_by_step(points), most_points)


def histories(tracking_uri: str, run_id: str, *, most_points: int) -> Iterator[tuple[str, list[MetricPoint]]]:
    """All metrics that are over optimizer steps and that workers wrote, each as `history` gives it, as they come.

    A server is asked without mlflow, whose import takes seconds, unless it wants credentials that only mlflow knows.
    Of long histories a dozen come as a few points from end to end first, and again when the server has read them.

    Raises:
        SgpuError: MLflow cannot be read; says why.
    """
    if tracking_uri.startswith(("http://", "https://")):
        try:
            last = mlflow_http.latest(tracking_uri, run_id)
        except SgpuError:
            pass  # mlflow itself may know more of the server, and says what is wrong
        else:
            yield from _of_server(tracking_uri, run_id, last, most_points)
            return
    for key in filter(_charted, latest(tracking_uri, run_id)):
        yield key, history(tracking_uri, run_id, key, most_points=most_points)


def _of_server(
    tracking_uri: str, run_id: str, last: Sequence[mlflow_http.Raw], most_points: int
) -> Iterator[tuple[str, list[MetricPoint]]]:
    by_key = {str(raw["key"]): raw for raw in last if _charted(str(raw["key"]))}
    keys = sorted(by_key, key=lambda key: (key.startswith("rank"), key in names.BUILT_IN))  # as a view shows them
    long = [by_key[key] for key in keys if int(by_key[key].get("step", 0)) >= _LONG_STEPS][:_OUTLINED]
    for key, points in mlflow_http.outlines(tracking_uri, run_id, long):
        yield key, _by_step(map(_raw_point, points))
    for key, points in mlflow_http.histories(tracking_uri, run_id, keys, most_points):
        yield key, _thin(_by_step(map(_raw_point, points)), most_points)


def _charted(key: str) -> bool:
    built_in = names.BUILT_IN.get(key.rpartition("/")[2] if key.startswith("rank") else key)
    return not key.startswith("system/") and (built_in is None or built_in.writer == "worker")


def _run(tracking_uri: str, run_id: str) -> Any:
    client, errors = _client(tracking_uri)
    try:
        return client.get_run(run_id)
    except errors as error:
        raise _unreadable(tracking_uri, run_id, error) from error


def _client(tracking_uri: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client, and what it raises."""
    import requests
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    file = store.sqlite_file(tracking_uri)
    if file is not None and not file.exists():
        raise SgpuError(f"there is no MLflow store at {file}", path=str(file))
    return MlflowClient(tracking_uri=tracking_uri), (MlflowException, requests.exceptions.RequestException, OSError)


def _thinned(tracking_uri: str, run_id: str, key: str, most_points: int) -> list[MetricPoint]:
    """Through the call that MLflow's own charts use: the server thins, one answer."""
    import requests
    from mlflow.exceptions import MlflowException
    from mlflow.utils import credentials, rest_utils

    http_request: Any = rest_utils.http_request
    host_of: Any = credentials.get_default_host_creds
    asked: dict[str, Any] = {"run_ids": [run_id], "metric_key": key, "max_results": most_points}
    try:
        answer = http_request(host_of(tracking_uri), _BULK_PATH, "GET", params=asked)
        if answer.status_code != 200:
            raise SgpuError(f"cannot read metric {key!r} of MLflow run {run_id} at {tracking_uri}: {answer.text[:300]}")
        found = json.loads(answer.text).get("metrics", [])
    except (MlflowException, requests.exceptions.RequestException, ValueError) as error:
        raise _unreadable(tracking_uri, run_id, error) from error
    return [_raw_point(m) for m in found]


def _raw_point(raw: mlflow_http.Raw) -> MetricPoint:
    return _point(raw.get("step", 0), raw["value"], raw["timestamp"])


def _point(step: Any, value: Any, timestamp_milliseconds: Any) -> MetricPoint:
    return MetricPoint(step=int(step), value=float(value), time_seconds=int(timestamp_milliseconds) / 1000)


def _by_step(points: Iterable[MetricPoint]) -> list[MetricPoint]:
    newest: dict[int, MetricPoint] = {}
    for point in points:
        held = newest.get(point.step)
        if held is None or point.time_seconds >= held.time_seconds:
            newest[point.step] = point
    return [newest[step] for step in sorted(newest)]


def _thin(points: list[MetricPoint], most_points: int | None) -> list[MetricPoint]:
    if most_points is None or len(points) <= most_points:
        return points
    last = len(points) - 1
    return [points[round(at * last / max(1, most_points - 1))] for at in range(most_points)]


def _unreadable(tracking_uri: str, run_id: str, error: Exception) -> SgpuError:
    return SgpuError(f"cannot read MLflow run {run_id} at {tracking_uri}: {error}", run_id=run_id)
