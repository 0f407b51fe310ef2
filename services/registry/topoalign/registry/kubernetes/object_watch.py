"""
Follows all objects of one kind: a list in pages, then a watch, and so on without end.

A watch that ends or breaks is resumed after the newest version that was received, also in a bookmark. If the API server no
longer has the changes after it (410), everything is listed again, and objects that are missing in the list are reported as
gone. So only the keys of the objects are kept here. After a failure it waits 0.2 s, doubled with each further one up to
10 s.

lightkube's own watch is not used (docs/decisions/0015-lightkube.md): it has no time-out, resumes after 410 without a list,
so that deletions are lost, and decodes whole objects.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec
import structlog

from topoalign.core.model.errors import Undecodable
from topoalign.core.ports import Clock
from topoalign.registry.kubernetes import objects
from topoalign.registry.kubernetes.api_requests import Expired, Requests, answer_error
from topoalign.registry.ports import (
    ApiConflict,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    Gone,
    SeenNode,
    SeenPod,
    SeenQuota,
    Synced,
)
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.request_turns import TaskTurns

S = TypeVar("S", bound=SeenPod | SeenNode | SeenQuota)

PAGE = 500
"""Objects of a page: some megabytes of pods."""
WATCH_SECONDS = 290
"""After so long the API server ends a watch, so that it may go on at another one."""
SILENT_SECONDS = 90.0
"""A watch without data for so long is assumed to be dead: an API server sends a bookmark every minute."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0

log = structlog.get_logger("topoalign.registry.kubernetes")


class Listed(msgspec.Struct, frozen=True):
    """A page of a list."""

    items: list[msgspec.Raw] = []
    metadata: objects.ListMetadata = objects.ListMetadata()


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class ObjectWatch(Generic[S]):
    """Follows one kind, for one reader."""

    def __init__(
        self,
        requests: Requests,
        clock: Clock,
        path: str,
        kind: type[objects.ApiObject[S]],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._path = path
        self._kind = kind
        self._silent = silent_seconds
        self._version = ""
        self._failures = 0
        self._known: set[str] = set()
        """Keys of the objects that the API server has."""
        self.trouble: str | None = None

    async def follow(self) -> AsyncGenerator[S | Gone | Synced, None]:
        """Yields all objects, `Synced`, then each change, without end. Raises nothing."""
        turns = TaskTurns(self._clock)
        self.trouble = f"{self._path} is not listed yet"
        while True:
            try:
                async with aclosing(self._changes() if self._version else self._list()) as steps:
                    async for each in steps:
                        yield each
                        await turns.give()
            except Expired:
                self._version = ""
                await self._pause("the API server no longer has the changes since then")
            except (ApiUnavailable, ApiRefused, ApiNotFound, ApiConflict, Undecodable) as error:
                await self._pause(error.finding)

    async def _list(self) -> AsyncGenerator[S | Gone | Synced, None]:
        here: set[str] = set()
        parameters = {"limit": str(PAGE)}
        while True:
            page = objects.decode_object(await self._requests.page(self._path, parameters), Listed)
            for raw in page.items:
                if (seen := self._decode(raw)) is not None:
                    here.add(seen.key)
                    self._known.add(seen.key)
                    yield seen
            if not page.metadata.next_page:
                break
            parameters["continue"] = page.metadata.next_page
        for key in self._known - here:
            yield Gone(key)
        self._known = here
        self._version = page.metadata.resource_version
        self._end_trouble()
        yield Synced()

    async def _changes(self) -> AsyncGenerator[S | Gone, None]:
        parameters = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._requests.lines(self._path, parameters, self._silent) as lines:
            async for line in lines:
                event = objects.decode_object(line, WatchEvent)
                self._end_trouble()
                if event.type == "ERROR":
                    raise answer_error(0, event.object)
                if event.type != "BOOKMARK" and (seen := self._decode(event.object)) is not None:
                    if event.type == "DELETED":
                        self._known.discard(seen.key)
                        yield Gone(seen.key)
                    else:
                        self._known.add(seen.key)
                        yield seen
                self._version = objects.decode_object(event.object, objects.AnyObject).metadata.resource_version

    def _decode(self, raw: msgspec.Raw) -> S | None:
        try:
            return objects.decode_object(raw, self._kind).to_seen()
        except Undecodable as error:
            log.warning("an object is skipped", path=self._path, finding=error.finding)
            return None

    def _end_trouble(self) -> None:
        if self.trouble is not None:
            log.info("followed", path=self._path)
        self._failures = 0
        self.trouble = None

    async def _pause(self, why: str) -> None:
        self._failures += 1
        if self.trouble is None:
            log.warning("not followed", path=self._path, finding=why)
        self.trouble = f"{self._path}: {why}"
        await self._clock.sleep(backoff_seconds(self._failures, FIRST_PAUSE, LONGEST_PAUSE))
