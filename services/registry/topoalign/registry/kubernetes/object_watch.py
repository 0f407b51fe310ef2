"""
Follows all objects of one kind: a list in pages, then a watch, and so on without end.

A watch that ends or breaks is resumed after the newest version that was seen (bookmarks count). Where the API server no
longer has the changes after it (410), everything is listed again, and what is missing in the list is reported as gone; so
nothing but the names of the objects is kept here. Failures in a row are waited out: 0.2 s, doubled up to 10 s.

lightkube's own watch is not used (docs/decisions/0015-lightkube.md): it has no time-out, resumes after 410 without a list,
so that deletions are lost, and decodes whole objects.
"""

from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import structlog

from topoalign.core.model.errors import Undecodable
from topoalign.core.ports import Clock
from topoalign.registry.kubernetes import objects
from topoalign.registry.kubernetes.api_requests import Expired, Requests, answer_error
from topoalign.registry.ports import ApiConflict, ApiNotFound, ApiRefused, ApiUnavailable, Synced
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.request_turns import TaskTurns

S = TypeVar("S")
G = TypeVar("G", bound=Hashable)

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


@dataclass(frozen=True)
class WatchedKind(Generic[S, G]):
    """What is followed."""

    path: str
    read: Callable[[bytes | msgspec.Raw], tuple[S, G]]
    """From the JSON of an object what it is, and what it will be when it is gone. Raises Undecodable."""


class ObjectWatch(Generic[S, G]):
    """One kind that is followed, by one follower."""

    def __init__(
        self, requests: Requests, clock: Clock, kind: WatchedKind[S, G], silent_seconds: float = SILENT_SECONDS
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._kind = kind
        self._silent = silent_seconds
        self._version = ""
        self._failures = 0
        self._known: set[G] = set()
        self.trouble: str | None = None

    async def follow(self) -> AsyncGenerator[S | G | Synced, None]:
        """All objects, `Synced`, then each change, without end. Raises nothing."""
        turns = TaskTurns(self._clock)
        self.trouble = f"{self._kind.path} is not listed yet"
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

    async def _list(self) -> AsyncGenerator[S | G | Synced, None]:
        here: set[G] = set()
        parameters = {"limit": str(PAGE)}
        while True:
            page = objects.decode_object(await self._requests.page(self._kind.path, parameters), Listed)
            for raw in page.items:
                if (read := self._read(raw)) is not None:
                    here.add(read[1])
                    self._known.add(read[1])
                    yield read[0]
            if not page.metadata.next_page:
                break
            parameters["continue"] = page.metadata.next_page
        for gone in self._known - here:
            yield gone
        self._known = here
        self._version = page.metadata.resource_version
        self._well()
        yield Synced()

    async def _changes(self) -> AsyncGenerator[S | G, None]:
        parameters = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._requests.lines(self._kind.path, parameters, self._silent) as lines:
            async for line in lines:
                event = objects.decode_object(line, WatchEvent)
                self._well()
                if event.type == "ERROR":
                    raise answer_error(0, event.object)
                if event.type != "BOOKMARK" and (read := self._read(event.object)) is not None:
                    seen, gone = read
                    (self._known.discard if event.type == "DELETED" else self._known.add)(gone)
                    yield gone if event.type == "DELETED" else seen
                self._version = objects.object_version(event.object)

    def _read(self, raw: msgspec.Raw) -> tuple[S, G] | None:
        try:
            return self._kind.read(raw)
        except Undecodable as error:
            log.warning("an object is skipped", path=self._kind.path, finding=error.finding)
            return None

    def _well(self) -> None:
        if self.trouble is not None:
            log.info("followed", path=self._kind.path)
        self._failures = 0
        self.trouble = None

    async def _pause(self, why: str) -> None:
        self._failures += 1
        if self.trouble is None:
            log.warning("not followed", path=self._kind.path, finding=why)
        self.trouble = f"{self._kind.path}: {why}"
        await self._clock.sleep(backoff_seconds(self._failures, FIRST_PAUSE, LONGEST_PAUSE))
