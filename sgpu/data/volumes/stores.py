"""How each store's client in fsspec is asked, so that nothing of what the store tells is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import fsspec

from sgpu.contract.errors import DataError
from sgpu.data.volumes import azure
from sgpu.data.volumes.versions import Answer, Facts

_LOOK_SECONDS = 10.0  # a bucket may hold millions


def files_below(filesystem: Any, root: str) -> dict[str, Facts]:
    """What is there now, by its whole name. Raises what the client raises."""
    if azure.is_azure(filesystem):
        blobs: dict[str, Facts] = fsspec.asyn.sync(filesystem.loop, azure.find, filesystem, root)
        return blobs
    filesystem.invalidate_cache()
    found: dict[str, Facts] = filesystem.find(root, detail=True)
    return found


def facts_of(filesystem: Any, name: str) -> Facts:
    """What the store tells of a file now. Raises what the client raises."""
    if azure.is_azure(filesystem):
        told: Facts = fsspec.asyn.sync(filesystem.loop, azure.facts_of, filesystem, name)
        return told
    filesystem.invalidate_cache()
    facts: Facts = filesystem.info(name)
    return facts


def why_nothing(filesystem: Any, root: str) -> str:
    """Why there is nothing below `root`, and what to do; empty where the store does not tell."""
    try:
        facts = facts_of(filesystem, root)
    except FileNotFoundError as problem:
        reason = problem.__cause__  # fsspec's client of HTTP finds nothing where nobody answers
        return (
            f"cannot be reached: {reason}. Check its address, and that this machine may connect to it."
            if isinstance(reason, OSError)
            else ""
        )
    if facts.get("type") != "file" or str(facts.get("mimetype", "")).startswith("text/html"):  # a page without links
        return ""
    return f"is a file. Expected a folder or prefix with files: name what is above it, and pattern={_name(root)!r}."


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def seen_above(filesystem: Any, root: str) -> tuple[str, list[str]]:
    """Where nothing is at `root`: the nearest place above it that holds something, and what; ("", []): not known."""
    if not filesystem.async_impl or "://" in root:  # a page of links lists where it likes to
        return "", []
    looked = fsspec.asyn.sync(filesystem.loop, _tried, asyncio.wait_for(_look_above(filesystem, root), _LOOK_SECONDS))
    return ("", []) if isinstance(looked, BaseException) else looked


async def _look_above(filesystem: Any, root: str) -> tuple[str, list[str]]:
    above = root
    while above:
        above = above.rpartition("/")[0]
        names = await _tried(filesystem._ls(above, detail=False))
        if isinstance(names, list) and names:
            return above, [_name(name) for name in names]
    return "", []


async def _tried(asked: Awaitable[Any]) -> Any:
    """The answer, or the exception instead: each store has errors of its own."""
    return (await asyncio.gather(asked, return_exceptions=True))[0]


async def answer_of(filesystem: Any, name: str, start: int | None, stop: int | None) -> Answer:
    """A file, or `start` to `stop` of it. Where it can be had, the version comes in the same reply."""
    limits = {} if start is None or stop is None else {"Range": f"bytes={start}-{stop - 1}"}
    if hasattr(filesystem, "_call_s3"):
        return await _of_s3(filesystem, name, limits)
    if hasattr(filesystem, "set_session") and hasattr(filesystem, "encode_url"):
        return await _of_http(filesystem, name, limits)
    if azure.is_azure(filesystem):
        return await azure.answer_of(filesystem, name, start, stop)
    if "gs" in filesystem.protocol and hasattr(filesystem, "_call"):
        return await _of_google(filesystem, name, start, stop, limits)
    bounds = {} if start is None else {"start": start, "end": stop}
    return Answer(await filesystem._cat_file(name, **bounds), None)


async def _of_s3(filesystem: Any, name: str, limits: dict[str, str]) -> Answer:
    bucket, key, _ = filesystem.split_path(name)
    reply = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **limits, **filesystem.req_kw)
    body = reply["Body"]
    try:
        return Answer(await body.read(), reply)
    finally:
        body.close()


async def _of_http(filesystem: Any, name: str, limits: dict[str, str]) -> Answer:
    told = dict(filesystem.kwargs)
    # the tag of a compressed reply is another one
    headers = {**told.pop("headers", {}), "Accept-Encoding": "identity", **limits}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(name), headers=headers, **told) as reply:
        body = await reply.read()
        filesystem._raise_not_found_for_status(reply, name)
        return Answer(body, {key: reply.headers[key] for key in ("ETag", "Last-Modified") if key in reply.headers})


async def _of_google(filesystem: Any, name: str, start: int | None, stop: int | None, limits: dict[str, str]) -> Answer:
    bucket, _, _ = filesystem.split_path(name)
    if hasattr(filesystem, "_is_zonal_bucket") and await filesystem._is_zonal_bucket(bucket):  # these know no HTTP
        return Answer(await filesystem._cat_file(name, start=start, end=stop), None)
    told, body = await filesystem._call("GET", filesystem.url(name), headers={"Accept-Encoding": "identity", **limits})
    if (encoding := told.get("X-Goog-Stored-Content-Encoding", "identity")) != "identity":
        raise DataError(
            f"gs://{name} is marked as compressed (Content-Encoding: {encoding}), so that the store gives other bytes "
            "than it keeps, which no size or checksum fits. Take the mark away (gcloud storage objects update "
            "--clear-content-encoding), or upload the file without it."
        )
    sums = dict(part.strip().split("=", 1) for part in told.get("X-Goog-Hash", "").split(",") if "=" in part)
    return Answer(body, {"md5Hash": sums["md5"]} if "md5" in sums else None)  # what was composed of parts has none
