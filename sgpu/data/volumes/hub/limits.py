"""Keeping to the rate at which Hugging Face's hub answers: who is told to wait waits, and so do all threads."""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sgpu.contract.errors import VolumeError

T = TypeVar("T")
_LIMITED, _SERVERS_FAULT = 429, 500
_BACKOFF_SECONDS = 0.1
_SECONDS = 10.0  # where it does not say
_LEAST_SECONDS = 1.0  # it rounds down
_LONGEST_SECONDS = 310.0  # its windows are of five minutes
_PATIENCE_SECONDS = 3600.0
_SPREAD_SECONDS = 0.5  # not all threads at the same moment
_RESET = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")

log = logging.getLogger("sgpu.data")


class Limits:
    """Of one repository, for all threads of a process."""

    def __init__(self, name: str, errors: type[Exception]) -> None:
        """
        Args:
            errors: of the hub's client, which have its `response` where there is one.
        """
        self._name, self._errors, self._until, self._lock = name, errors, 0.0, threading.Lock()

    def kept(self, call: Callable[[], T], tries: int) -> T:
        """What `call` answers, once it is not told to wait; of `tries` the last may fail for other reasons.

        Raises:
            VolumeError: there was no end of waiting.
        """
        gives_up, failed = time.monotonic() + _PATIENCE_SECONDS, 0
        while True:
            self._wait()
            try:
                return call()
            except self._errors as problem:
                reply = getattr(problem, "response", None)
                if reply is None or reply.status_code != _LIMITED:
                    failed += 1
                    if failed >= tries or (reply is not None and reply.status_code < _SERVERS_FAULT):
                        raise
                    time.sleep(random.uniform(0, _BACKOFF_SECONDS * 4 ** (failed - 1)))
                    continue
                if time.monotonic() > gives_up:
                    raise VolumeError(
                        f"the hub has not answered for {self._name} in {_PATIENCE_SECONDS / 60:.0f} minutes, as too "
                        "much is asked of it. With a token it answers more (HF_TOKEN, or credentials=); pack small "
                        "files into larger ones, or copy them to a folder or object store of yours.",
                        url=self._name,
                    ) from problem
                self._told(_seconds_of(reply.headers))

    def _wait(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(left + random.uniform(0, _SPREAD_SECONDS))

    def _told(self, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            is_new, self._until = now >= self._until, max(self._until, now + seconds)
        if is_new:
            log.warning(
                "the hub of Hugging Face limits how much is asked of it for %s: waiting %.0f s. With a token "
                "(HF_TOKEN) it answers more; large files cost fewer requests than small ones.",
                self._name, seconds,
            )  # fmt: skip


def _seconds_of(headers: Any) -> float:
    reset = _RESET.search(headers.get("ratelimit", ""))
    told = reset[1] if reset else headers.get("retry-after", "")
    return min(max(float(told), _LEAST_SECONDS), _LONGEST_SECONDS) if told.isdigit() else _SECONDS
