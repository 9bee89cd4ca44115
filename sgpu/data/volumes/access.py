"""What s3fs reaches a volume with, for reads of it by other means."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import fsspec

from sgpu.data.volumes.quick_s3 import Access


def is_plain(filesystem: Any) -> bool:
    """Whether it is s3fs, and asks for nothing special, so that obstore would get the same."""
    return hasattr(filesystem, "_call_s3") and not filesystem.req_kw and not filesystem.version_aware


def access_of(filesystem: Any, root: str) -> Access | None:
    """For other processes, which would take half a second of CPU to find it out (a tenth, once they are forked).

    None where they had no use for it, or where there is none now, for whatever reason: who reads meets the same, and
    tells it.
    """
    if not is_plain(filesystem) or importlib.util.find_spec("obstore") is None:
        return None
    found = fsspec.asyn.sync(filesystem.loop, _tried, filesystem, root)
    return found if isinstance(found, Access) else None


def access_now(filesystem: Any, root: str) -> Access:
    """Raises what the file system raises, or ValueError."""
    found: Access = fsspec.asyn.sync(filesystem.loop, _asked_for_access, filesystem, root)
    return found


async def _tried(filesystem: Any, root: str) -> Access | BaseException:
    answers = await asyncio.gather(_asked_for_access(filesystem, root), return_exceptions=True)
    return answers[0]


async def _asked_for_access(filesystem: Any, root: str) -> Access:
    client = await filesystem.set_session()
    bucket, prefix, _ = filesystem.split_path(root)
    found = Access({}, client.meta.endpoint_url, client.meta.region_name, bucket, prefix)
    if filesystem.anon:
        return found._replace(keys={"skip_signature": True})
    credentials = client._request_signer._credentials
    if credentials is None:
        raise ValueError("s3fs has no credentials")
    frozen = await credentials.get_frozen_credentials()
    keys = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key}
    return found._replace(keys={**keys, "session_token": frozen.token} if frozen.token else keys)
