"""Writes one MLflow run. Only the forwarder's process loads this file."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import requests
import sqlalchemy.exc
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import Tracking
from sgpu.metrics import store
from sgpu.metrics.progress import Point
from sgpu.metrics.writer import Link, RunStatus, TrackingDownError, TrackingRefusedError, read_link

_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"})
_GONE = "RESOURCE_DOES_NOT_EXIST"
_TAGS_A_BATCH = 100
_PARAMETER_CHARACTERS = 6000
_TAG_CHARACTERS = 5000


class MlflowWriter:
    """See `Writer` for the order of the calls."""

    def __init__(
        self,
        run: RunDir,
        tracking: Tracking,
        *,
        name: str,
        created_seconds: float,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        self._run, self._tracking, self._name, self._created = run, tracking, name, created_seconds
        self._parameters, self._tags = parameters, tags
        self._client: Any = None
        self._run_id = ""

    def open(self) -> Link:
        with _told("opening the run"):
            if self._client is None:
                with _one_at_a_time(self._tracking.uri):
                    client = MlflowClient(tracking_uri=self._tracking.uri)
                    client.search_experiments(max_results=1)  # a new local store makes its tables here
                self._client = client
            link = read_link(self._run) or self._find() or self._make()
            self._run_id = link.run_id
            held = self._get()
            if held.info.status != "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")
            self._describe({key: value for key, value in self._parameters.items() if key not in held.data.params})
        link.write(self._run)
        return link

    def marks(self) -> dict[str, int]:
        with _told("reading how far MLflow is"):
            data = self._get().data
            latest = getattr(data, "_metric_objs", None)
            if latest is None:  # another version of mlflow: the long way
                latest = [max(self._history(key), key=lambda metric: metric.step) for key in data.metrics]
            return {metric.key: int(metric.step) for metric in latest}

    def log(self, points: Sequence[Point]) -> None:
        metrics = [Metric(p.key, p.value, round(p.time_seconds * 1000), p.step) for p in points]
        with _told("writing metrics"):
            self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: RunStatus, *, ended_seconds: float, tags: Mapping[str, str]) -> None:
        with _told("ending the run"):
            self._log_tags(tags)
            self._client.set_terminated(self._run_id, status=status, end_time=round(ended_seconds * 1000))

    def save_text(self, name: str, text: str) -> None:
        with _told(f"saving {name}"):
            self._client.log_text(self._run_id, text, name)

    def _get(self) -> Any:
        held = self._client.get_run(self._run_id)
        if held.info.lifecycle_stage != "active":
            raise TrackingRefusedError(
                f"the MLflow run {self._run_id} at {self._tracking.uri} was deleted", code="RUN_DELETED", gone=True
            )
        return held

    def _history(self, key: str) -> list[Any]:
        return list(self._client.get_metric_history(self._run_id, key))

    def _find(self) -> Link | None:
        """The run that a forwarder made which died before it could write down its id."""
        experiment = self._experiment()
        if experiment is None:
            return None
        wanted = self._tags["sgpu.run_id"].replace("'", "")
        found = self._client.search_runs(
            [experiment.experiment_id], filter_string=f"tags.`sgpu.run_id` = '{wanted}'", max_results=1
        )
        return self._link(found[0].info) if found else None

    def _make(self) -> Link:
        made = self._client.create_run(
            self._experiment_id(),
            start_time=round(self._created * 1000),
            tags={key: value[:_TAG_CHARACTERS] for key, value in self._tags.items()},
            run_name=self._name,
        )
        return self._link(made.info)

    def _experiment(self) -> Any:
        """None where there is none of that name yet."""
        if self._tracking.experiment_id is not None:
            return self._client.get_experiment(self._tracking.experiment_id)
        return self._client.get_experiment_by_name(self._tracking.experiment)

    def _experiment_id(self) -> str:
        name, known = self._tracking.experiment, self._experiment()
        if known is None:
            try:
                place = store.artifact_location(self._tracking.uri)
                return str(self._client.create_experiment(name, artifact_location=place))
            except MlflowException:  # another run may have made it in the meantime
                known = self._experiment()
                if known is None:
                    raise
        if known.lifecycle_stage != "active":
            raise TrackingRefusedError(
                f"the MLflow experiment {known.name!r} at {self._tracking.uri} was deleted; restore it with "
                f"`mlflow experiments restore --experiment-id {known.experiment_id}` or choose another name",
                code="EXPERIMENT_DELETED",
                gone=True,
            )
        return str(known.experiment_id)

    def _link(self, info: Any) -> Link:
        uri = self._tracking.uri
        return Link(
            run_id=info.run_id,
            experiment_id=info.experiment_id,
            tracking_uri=uri,
            url=store.run_url(uri, info.experiment_id, info.run_id),
            open_command=store.open_command(uri),
        )

    def _describe(self, parameters: Mapping[str, str]) -> None:
        items = [Param(key, value[:_PARAMETER_CHARACTERS]) for key, value in parameters.items()]
        for at in range(0, len(items), _TAGS_A_BATCH):
            self._client.log_batch(self._run_id, params=items[at : at + _TAGS_A_BATCH])

    def _log_tags(self, tags: Mapping[str, str]) -> None:
        items = [RunTag(key, value[:_TAG_CHARACTERS]) for key, value in tags.items()]
        for at in range(0, len(items), _TAGS_A_BATCH):
            self._client.log_batch(self._run_id, tags=items[at : at + _TAGS_A_BATCH])


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns what MLflow raises into the two answers that matter here."""
    try:
        yield
    except MlflowException as error:
        text = f"{what}: {error.message}"
        if error.error_code == _GONE or error.error_code in _REFUSALS:
            raise TrackingRefusedError(text, code=error.error_code, gone=error.error_code == _GONE) from error
        raise TrackingDownError(text) from error
    except (requests.exceptions.RequestException, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        raise TrackingDownError(f"{what}: {error}") from error


@contextlib.contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """Two processes that migrate the same new SQLite file at once break it."""
    file = store.sqlite_file(uri)
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with pathlib.Path(f"{file}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
