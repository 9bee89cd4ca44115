"""Where clouds and schedulers say that a machine is to be given back: metadata services, or a file that appears.

Sources: AWS EC2 user guide, "Spot Instance interruption notices" (two minutes) and "rebalance recommendations"; Google
Compute Engine, "Preemptible VM instances" (30 s) and "Host maintenance events"; Azure, "Scheduled Events for Linux VMs"
(a pre-empted machine gets 30 s or more).
"""

from __future__ import annotations

import json
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

_TIMEOUT_SECONDS = 2.0
_TOKEN_SECONDS = 21600
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for another machine
_ENDING = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})  # of Azure's types of events; a freeze is short


@dataclass(frozen=True, kw_only=True)
class Notice:
    """This machine is to be given back.

    Attributes:
        cause: for people.
        deadline: when it goes, seconds since 1970; None: nobody said.
    """

    cause: str
    deadline: float | None = None


class NoticeSource(Protocol):
    """Asked again and again, `every_seconds` apart."""

    every_seconds: float

    def look(self) -> Notice | None:
        """What it says now. Raises OSError where it cannot be asked."""


class Aws:
    """Instance metadata, version 2: spot interruption. A rebalance recommendation alone stops nothing."""

    every_seconds = 5.0

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._base, self._token, self._until = base, "", 0.0

    def look(self) -> Notice | None:
        if time.monotonic() > self._until:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            self._token = _get(f"{self._base}/latest/api/token", asked, method="PUT") or ""
            self._until = time.monotonic() + _TOKEN_SECONDS / 2
        path = f"{self._base}/latest/meta-data/spot/instance-action"
        text = _get(path, {"X-aws-ec2-metadata-token": self._token})
        if text is None:
            return None
        told = _json(text)
        action = str(told.get("action", "interrupt"))
        return Notice(cause=f"AWS: the spot instance is to {action}", deadline=_iso_seconds(told.get("time")))


class Gcp:
    """Compute Engine's metadata server: preemption, and maintenance that ends the machine."""

    every_seconds = 1.0

    def __init__(self, base: str = "http://metadata.google.internal") -> None:
        self._base = f"{base}/computeMetadata/v1/instance"

    def look(self) -> Notice | None:
        asked = {"Metadata-Flavor": "Google"}
        if (_get(f"{self._base}/preempted", asked) or "").strip().upper() == "TRUE":
            return Notice(cause="Google Cloud: the instance is preempted", deadline=time.time() + 30.0)
        event = (_get(f"{self._base}/maintenance-event", asked) or "").strip()
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(cause="Google Cloud: the host's maintenance ends the instance")
        return None


class Azure:
    """Scheduled events of this virtual machine, by its name: a document may tell of its neighbours too."""

    every_seconds = 1.0

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._base, self._name = f"{base}/metadata", ""

    def look(self) -> Notice | None:
        asked = {"Metadata": "true"}
        if not self._name:
            path = f"{self._base}/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (_get(path, asked) or "").strip()
        told = _json(_get(f"{self._base}/scheduledevents?api-version=2020-07-01", asked) or "{}")
        for event in told.get("Events") or []:
            resources = [str(name).lower() for name in event.get("Resources") or []]
            if event.get("EventType") in _ENDING and self._name.lower() in resources:
                return Notice(
                    cause=f"Azure: scheduled event {event['EventType']}", deadline=_http_seconds(event.get("NotBefore"))
                )
        return None


class NoticeFile:
    """A file that somebody writes. It may hold when the machine goes: seconds from then on, or an ISO 8601 time."""

    every_seconds = 0.5

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def look(self) -> Notice | None:
        try:
            text, written = self._path.read_text().strip(), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            deadline: float | None = written + float(text)
        except ValueError:
            deadline = _iso_seconds(text)
        return Notice(cause=f"the file {self._path}", deadline=deadline)


_CLOUDS: Mapping[str, tuple[type[Aws] | type[Gcp] | type[Azure], str]] = {
    "aws": (Aws, "Amazon EC2"),
    "gcp": (Gcp, "Google"),
    "azure": (Azure, "Microsoft Corporation"),
}
CLOUDS = tuple(_CLOUDS)


def source_of(kind: str, where: str, *, vendor: pathlib.Path) -> NoticeSource | None:
    """The source that a setting names.

    Args:
        kind: of CLOUDS; "file" (then `where` is its path); "auto": the cloud that this machine's firmware names; "off".
        where: another address than the cloud's own; "": that one.
        vendor: the file in which the kernel tells the firmware's vendor.
    """
    if kind == "off":
        return None
    if kind == "file":
        return NoticeFile(pathlib.Path(where))
    if kind == "auto":
        try:
            told = vendor.read_text().strip()
        except OSError:
            return None
        kind = next((name for name, (_, firmware) in _CLOUDS.items() if firmware == told), "")
        if not kind:
            return None
    cloud = _CLOUDS[kind][0]
    return cloud(where.rstrip("/")) if where else cloud()


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """None: there is no such thing (yet)."""
    try:
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read(65536).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
        raise


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _iso_seconds(text: object) -> float | None:
    try:
        told = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (told if told.tzinfo else told.replace(tzinfo=timezone.utc)).timestamp()


def _http_seconds(text: object) -> float | None:
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except (TypeError, ValueError):
        return None
