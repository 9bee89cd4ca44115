"""Tracking URIs: which local file, which page, which command opens them. Pure text."""

from __future__ import annotations

import pathlib
import shlex
import urllib.parse


def default_uri(home: pathlib.Path) -> str:
    """The SQLite store of this user."""
    return f"sqlite:///{home.absolute() / 'mlflow.db'}"


def sqlite_file(uri: str) -> pathlib.Path | None:
    """The file behind a SQLite URI; None for anything else."""
    scheme, _, rest = uri.partition("://")
    if scheme.partition("+")[0] != "sqlite" or not rest.startswith("/"):
        return None
    path = rest[1:].partition("?")[0]
    return pathlib.Path(path) if path and path != ":memory:" else None


def absolute(uri: str, folder: pathlib.Path) -> str:
    """The same store when named from another working folder: relative paths are taken from `folder`."""
    file = sqlite_file(uri)
    if file is not None:
        scheme, _, rest = uri.partition("://")
        query = rest.partition("?")[2]
        return f"{scheme}:///{folder / file}{'?' + query if query else ''}"
    if "://" not in uri and uri and not uri.startswith(("databricks", "file:")):
        return str(folder / uri)
    return uri


def artifact_location(uri: str) -> str | None:
    """Where a new experiment of a local store keeps files: beside the store. None: the server decides."""
    file = sqlite_file(uri)
    return (file.parent.absolute() / "mlartifacts").as_uri() if file is not None else None


def run_url(uri: str, experiment_id: str, run_id: str) -> str | None:
    """The run's page; a user name and password in the URI stay out of it."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"


def open_command(uri: str) -> str | None:
    """What shows a local store in the browser; None where a server does."""
    if urllib.parse.urlsplit(uri).scheme in ("http", "https", "databricks") or uri.startswith("databricks"):
        return None
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
