"""The context that a service receives when it starts. It is the same type for all services."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
from anyio.abc import TaskStatus

from topoalign.core.ports import Bus, Clock
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.runtime.metrics import Collector, registry_of
from topoalign.runtime.request_turns import RequestTurns

if TYPE_CHECKING:  # a process without HTTP needs neither
    from prometheus_client import CollectorRegistry
    from starlette.routing import BaseRoute

Check = Callable[[], str | None]
"""Says why the process is not ready, or None when it is."""

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class HttpAnswer(NamedTuple):
    """A page as it is sent."""

    body: bytes
    content_type: str


Page = Callable[[], Awaitable[HttpAnswer]]
"""Makes a page at each request for it. A TopoalignError that it raises is the answer then."""

Series = Callable[[], AsyncIterator[bytes]]
"""Writes whole families in Prometheus' text format, in chunks between which the loop gets a turn."""


class Reload:
    """That whoever runs the process wants its files read anew: SIGHUP. One task waits for it, on behalf of all."""

    def __init__(self) -> None:
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Request that files are read again, as SIGHUP does."""
        self._asked.set()

    async def wait(self) -> None:
        """Until it is asked for, or at once if it was since the last time, so that no wish is lost while files are read."""
        await self._asked.wait()
        self._asked = anyio.Event()


class Drain:
    """
    The time between SIGTERM and the end of the services, in which clients of a server move to another replica.

    From SIGTERM on no readiness page is ready; the services end `seconds` later.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """A service that drains sets its own; the default ends the services at once."""
        self.begun = anyio.Event()


@dataclass(frozen=True, kw_only=True)
class Context:
    """The world of one service: in tests and in one process shared, in four processes one each."""

    bus: Bus
    hub: Bus | None = None
    """The bus that everybody hears, where `bus` is a shorter way to the services of this process; None if they are one."""
    near: Bus | None = None
    """The bus of this process alone, where `bus` is that and `hub`; None if there is none."""
    clock: Clock
    environment: Mapping[str, str]
    """`TOPOALIGN_*` settings: the process environment under what the command line said."""
    checks: dict[str, Check] = field(default_factory=dict)
    """Readiness checks by name; a service adds its own."""
    readiness: dict[str, dict[str, Check]] = field(default_factory=dict)
    """
    Name of a Service -> the readiness checks of what it needs, which /readyz/NAME answers; a service adds its own before it
    reports that it has started.
    """
    life: dict[str, Check] = field(default_factory=dict)
    """Checks of /livez by name: what only a new start of the process can mend."""
    notes: dict[str, Check] = field(default_factory=dict)
    """What an operator should know though the process is ready, by name; shown by /readyz?verbose."""
    reload: Reload = field(default_factory=Reload)
    drain: Drain = field(default_factory=Drain)
    turns: RequestTurns = field(default_factory=RequestTurns)
    """In which the HTTP servers of the process answer."""
    routes: "list[BaseRoute]" = field(default_factory=list)
    """HTTP routes beside /livez, /readyz and /metrics; a service adds its own before it reports that it has started."""
    pages: dict[str, Page] = field(default_factory=dict)
    """Pages by path that take no parameters; a service adds its own before it reports that it has started."""
    figures: list[Collector] = field(default_factory=list)
    """What /metrics shows; a service adds its own."""
    series: list[Series] = field(default_factory=list)
    """What /metrics shows behind `metrics`: families that a service writes itself, because they have too many series to be
    made again at each scrape."""
    superseded: anyio.Event = field(default_factory=anyio.Event)
    """Set by a service when another process takes this one's place: all services end, and this one waits to be stopped."""

    @cached_property
    def metrics(self) -> "CollectorRegistry":
        """What /metrics shows, for Prometheus: the figures, and what a service registers here itself."""
        return registry_of(self.figures)

    @cached_property
    def configuration(self) -> ConfigurationFile:
        """
        What the devices are offered as, one for all services of the process: whoever uses it also calls `keep_up`. The first
        to ask for it reads it, and raises NotFound, InvalidDocument or InvalidField if it is wrong.
        """
        file = ConfigurationFile(self.environment)
        self.notes.setdefault("configuration", lambda: file.trouble)
        return file


class Serve(Protocol):
    """A service's entry: runs until cancelled, and calls `task_status.started()` once it serves."""

    def __call__(self, context: Context, *, task_status: TaskStatus[None]) -> Coroutine[Any, Any, None]: ...
