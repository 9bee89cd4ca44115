"""Which version of a file a store tells of: in its listing, and with the bytes that it sends."""

from __future__ import annotations

import base64
import datetime as dt
import email.utils
import hashlib
import zlib
from typing import Any, NamedTuple

from sgpu.data.volumes.entry import Entry

Facts = dict[str, Any]
_TAGS = ("ETag", "etag")
_TIMES = ("LastModified", "mtime", "last_modified", "Last-Modified", "updated", "modified", "created")
_SECOND = 1_000_000
_SHA256_DIGITS = 64


class Answer(NamedTuple):
    """Bytes that came, and what the store told of the file with them; None: its client does not pass that on."""

    body: bytes
    facts: Facts | None


def sum_of(entry: Entry) -> tuple[Any, bytes] | None:
    """What hashes a file's bytes, and the result that the listing tells; None where it tells none."""
    if entry.digest:
        return hashlib.md5(usedforsecurity=False), entry.digest
    if not entry.commit:
        return None
    if len(entry.etag) == _SHA256_DIGITS:  # in large file storage
        return hashlib.sha256(), bytes.fromhex(entry.etag)
    return hashlib.sha1(b"blob %d\0" % entry.size_bytes, usedforsecurity=False), bytes.fromhex(entry.etag)  # git's


def is_version(entry: Entry, facts: Facts) -> bool | None:
    """Whether a store tells of the version that was listed; None where it tells of none."""
    if (tag := etag_of(facts)) and entry.etag:
        return tag == entry.etag
    if (digest := digest_of(facts)) and entry.digest:
        return digest == entry.digest
    stamp = stamp_of(facts)
    if not stamp or not entry.stamp:
        return None
    # below a second there may be a tag's bits; and headers tell whole seconds, listings more
    coarse = tag or digest or entry.etag or entry.digest or 0 in (stamp % _SECOND, entry.stamp % _SECOND)
    return stamp // _SECOND == entry.stamp // _SECOND if coarse else stamp == entry.stamp


def stamp_of(facts: Facts) -> int:
    """The version of a file as a time: seconds of its last change, and its etag's bits below a second."""
    seconds = _seconds(next((facts[key] for key in _TIMES if facts.get(key)), 0))
    tag = next((str(facts[key]) for key in (*_TAGS, "md5Hash", "content_md5") if facts.get(key)), None)
    if tag is None:
        return int(seconds * _SECOND)
    return int(seconds) * _SECOND + zlib.crc32(tag.encode()) % _SECOND


def _seconds(told: Any) -> float:
    """Since 1970; 0 of what is no time."""
    if isinstance(told, str):
        for read in (email.utils.parsedate_to_datetime, dt.datetime.fromisoformat):
            try:
                return read(told.replace("Z", "+00:00")).timestamp()
            except ValueError:
                continue
        return 0.0
    if isinstance(told, dt.datetime):
        return told.timestamp()
    return float(told) if isinstance(told, int | float) else 0.0


def etag_of(facts: Facts) -> str:
    """The store's own name of this version of a file, without quotes; empty where it tells none."""
    return next((str(facts[key]).removeprefix("W/").strip('"') for key in _TAGS if facts.get(key)), "")


def digest_of(facts: Facts) -> bytes:
    """The MD5 that Google's and Azure's stores tell (an S3 etag is one only sometimes, and does not say when)."""
    told = facts.get("md5Hash") or facts.get("content_md5") or (facts.get("content_settings") or {}).get("content_md5")
    if isinstance(told, str):
        try:
            told = base64.b64decode(told, validate=True)
        except ValueError:
            return b""
    return bytes(told) if isinstance(told, bytes | bytearray) and len(told) == 16 else b""
