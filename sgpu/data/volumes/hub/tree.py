"""What is in a repository on Hugging Face's hub.

The hub gives a list in pages of a thousand, one after the other. One that goes on for long is given up for those of its
folders, several at a time, if these are large enough to be worth a request each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from sgpu.data.volumes.hub.client import HubClient

_AT_ONCE = 16
_PAGES = 2  # of a list that is not given up

Info = dict[str, Any]


class _Found(NamedTuple):
    files: list[Info]
    folders: list[str]  # that are still to be listed


def tree(client: HubClient, revision: str, folder: str) -> list[Info]:
    """All files below a folder (empty: of the repository). Raises FileNotFoundError: there is no such folder."""
    files = list[Info]()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: set[Future[_Found]] = {pool.submit(_below, client, revision, folder)}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in done:
                    found = one.result()
                    files += found.files
                    waiting |= {pool.submit(_below, client, revision, below) for below in found.folders}
        finally:
            for one in waiting:
                one.cancel()
    return files


def names(client: HubClient, revision: str, folder: str) -> list[str]:
    """Of files and folders in a folder. Raises FileNotFoundError."""
    return [info["path"].rpartition("/")[2] for page, _ in _pages(client, revision, folder, False) for info in page]


def _below(client: HubClient, revision: str, folder: str) -> _Found:
    files, in_folders, longest = list[Info](), Counter[str](), 0
    above = len(folder) + 1 if folder else 0
    for number, (page, is_last) in enumerate(_pages(client, revision, folder, True), 1):
        files += _files(page)
        longest = max(longest, len(page))
        in_folders.update(first for first, slash, _ in (info["path"][above:].partition("/") for info in page) if slash)
        if not is_last and number >= _PAGES and in_folders and in_folders.total() >= longest * len(in_folders):
            break
    else:
        return _Found(files, [])
    children = [info for page, _ in _pages(client, revision, folder, False) for info in page]
    return _Found(_files(children), [info["path"] for info in children if info["type"] == "directory"])


def _files(page: list[Info]) -> list[Info]:
    return [info for info in page if info["type"] == "file"]


def _pages(client: HubClient, revision: str, folder: str, is_deep: bool) -> Iterator[tuple[list[Info], bool]]:
    """And whether each is the last."""
    query = {"recursive": str(is_deep).lower(), "expand": "false"}
    page, following = client.page("tree", revision, *([folder] if folder else []), **query)
    yield page, following is None
    while following is not None:
        page, following = client.page_at(following)
        yield page, following is None
