"""
Lists in pages and watches, as an API server answers them.

A watch sends a line of JSON for each change after a version, now and then in two chunks. Where the changes are no longer
kept it sends an ERROR with code 410 in the place of an object, and ends. Bookmarks tell how far it is. Every watch ends
after the seconds that the client names.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio.lowlevel
import msgspec

from topoalign.testing.fake_api_server.objects import ApiError, Object, Objects

BOOKMARK_SECONDS = 60.0
APART = 4
"""One change of so many comes in two chunks."""


class Pages:
    """Lists of which a client has not taken all pages yet."""

    def __init__(self) -> None:
        self._rest: dict[str, tuple[int, list[Object]]] = {}
        self._made = 0

    def page(self, kind: Objects, namespace: str | None, parameters: Mapping[str, str]) -> Object:
        """A list, or the next page of one (`limit`, `continue`). Raises ApiError 410 for a list that is too old."""
        if token := parameters.get("continue"):
            version, items = self._rest.pop(token, (-1, []))
            if version < kind.oldest:
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
        else:
            version = kind.newest
            items = [each for each in kind if is_in(each, namespace)]
        limit = int(parameters.get("limit") or 0) or len(items)
        metadata: Object = {"resourceVersion": str(version)}
        if items[limit:]:
            self._made += 1
            metadata |= {"continue": f"page-{self._made}", "remainingItemCount": len(items) - limit}
            self._rest[metadata["continue"]] = (version, items[limit:])
        said = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata}
        return {**said, "items": items[:limit]}


def is_in(each: Object, namespace: str | None) -> bool:
    """Whether the object is in the namespace; None: in all of them."""
    return namespace is None or each["metadata"].get("namespace") == namespace


async def watched(
    kind: Objects, namespace: str | None, parameters: Mapping[str, str], bookmark_seconds: float = BOOKMARK_SECONDS
) -> AsyncIterator[bytes]:
    """The body of a watch, until `timeoutSeconds` have passed."""
    version = int(parameters.get("resourceVersion") or 0)
    if version == 0:
        version = kind.newest
        for each in kind:
            yield line("ADDED", each)
    until = anyio.current_time() + float(parameters.get("timeoutSeconds") or 3600)
    bookmarks = parameters.get("allowWatchBookmarks") == "true"
    while anyio.current_time() < until:
        try:
            changes = kind.since(version)
        except ApiError as error:
            yield line("ERROR", error.status)
            return
        for change in changes:
            version = change.version
            if is_in(change.object, namespace):
                rest = line(change.type, change.object)
                if version % APART == 0:
                    part = rest[: len(rest) // 2]
                    rest = rest[len(rest) // 2 :]
                    yield part
                    await anyio.lowlevel.checkpoint()  # which sends it
                yield rest
        if changes:
            continue
        with anyio.move_on_after(min(bookmark_seconds, until - anyio.current_time())) as waiting:
            await kind.wait()
        if waiting.cancelled_caught and bookmarks:
            version = kind.newest if not kind.since(version) else version
            yield line("BOOKMARK", bookmark(kind, version))


def line(what: str, shown: Mapping[str, Any]) -> bytes:
    """A change as a watch sends it."""
    return msgspec.json.encode({"type": what, "object": shown}) + b"\n"


def bookmark(kind: Objects, version: int) -> Object:
    """An object of the kind with nothing but a version."""
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
