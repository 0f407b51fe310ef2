"""The context that a service receives when it starts. It is the same type for all services."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

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
"""Returns why the process is not ready; None if it is."""

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


Page = Callable[[], Awaitable[tuple[bytes, str]]]
"""Makes a page at each request for it: its body and content type. A TopoalignError that it raises is the answer then."""

Series = Callable[[], AsyncIterator[bytes]]
"""Writes whole families in Prometheus' text format, in chunks between which the loop gets a turn."""


class Reload:
    """A request of the operator to read files again (SIGHUP). One task waits for it, on behalf of all."""

    def __init__(self) -> None:
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Request that files are read again, as SIGHUP does."""
        self._asked.set()

    async def wait(self) -> None:
        """Waits for a request; returns at once if one came since the last call."""
        await self._asked.wait()
        self._asked = anyio.Event()


class Drain:
    """The time between SIGTERM and the end of the services: no readiness page is ready, and clients move elsewhere."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """A service that drains sets its own; the default ends the services at once."""
        self.begun = anyio.Event()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a service receives at its start. Services of one process share it; services in four processes have one each."""

    bus: Bus
    hub: Bus | None = None
    """The bus to other processes, if `bus` is a shorter path to the services of this process; None if they are the same."""
    near: Bus | None = None
    """The bus of this process alone, where `bus` is that and `hub`; None if there is none."""
    clock: Clock
    environment: Mapping[str, str]
    """`TOPOALIGN_*` settings: options of the command line, else the environment of the process."""
    checks: dict[str, Check] = field(default_factory=dict)
    """Readiness checks by name; a service adds its own."""
    readiness: dict[str, dict[str, Check]] = field(default_factory=dict)
    """
    Name of a Service -> the readiness checks of what it needs, which /readyz/NAME answers; a service adds its own before it
    reports that it has started.
    """
    life: dict[str, Check] = field(default_factory=dict)
    """Checks of /livez by name: failures that only a restart of the process can end."""
    notes: dict[str, Check] = field(default_factory=dict)
    """Conditions that an operator should know although the process is ready, by name; shown by /readyz?verbose."""
    reload: Reload = field(default_factory=Reload)
    drain: Drain = field(default_factory=Drain)
    turns: RequestTurns = field(default_factory=RequestTurns)
    """The turns in which the HTTP servers of the process answer."""
    routes: "list[BaseRoute]" = field(default_factory=list)
    """HTTP routes in addition to /livez, /readyz and /metrics; a service adds its own before it reports its start."""
    pages: dict[str, Page] = field(default_factory=dict)
    """Pages by path that take no parameters; a service adds its own before it reports that it has started."""
    collectors: list[Collector] = field(default_factory=list)
    """The metrics of /metrics; a service adds its own."""
    series: list[Series] = field(default_factory=list)
    """What /metrics shows behind `metrics`: families that a service writes itself, because they have too many series to be
    made again at each scrape."""
    superseded: anyio.Event = field(default_factory=anyio.Event)
    """Set by a service when another process takes this one's place: all services end, and this one waits to be stopped."""

    @cached_property
    def metrics(self) -> "CollectorRegistry":
        """The registry of Prometheus behind /metrics: the collectors, and what a service registers here itself."""
        return registry_of(self.collectors)

    @cached_property
    def configuration(self) -> ConfigurationFile:
        """The configuration file, read at the first access. Each user calls `keep_up`. Raises NotFound, BadRequest."""
        file = ConfigurationFile(self.environment)
        self.notes.setdefault("configuration", lambda: file.reason_not_current)
        return file


class Serve(Protocol):
    """The entry of a service: runs until cancelled, and calls `task_status.started()` once it serves."""

    def __call__(self, context: Context, *, task_status: TaskStatus[None]) -> Coroutine[Any, Any, None]: ...
