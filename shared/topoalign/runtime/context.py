"""Defines the context that a service receives when it starts: the same type for all services."""

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
"""Returns the body and the content type of a page. If it raises a TopoalignError, that is the response."""

Series = Callable[[], AsyncIterator[bytes]]
"""Writes whole metric families in Prometheus' text format, in chunks. Other tasks can run between two chunks."""


class Reload:
    """An operator's request to read files again (SIGHUP). One task waits for it on behalf of all."""

    def __init__(self) -> None:
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Requests that files are read again, as SIGHUP does."""
        self._asked.set()

    async def wait(self) -> None:
        """Waits for a request; returns at once if one came since the last call."""
        await self._asked.wait()
        self._asked = anyio.Event()


class Drain:
    """The time between SIGTERM and the stop of the services. No readiness page is ready, so clients move elsewhere."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Set by a service that drains; by default, the services stop at once."""
        self.begun = anyio.Event()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a service receives at its start. All services of one process share one context."""

    bus: Bus
    hub: Bus | None = None
    """The bus to other processes, if `bus` is a NodeBus; None: `bus` itself is that bus."""
    near: Bus | None = None
    """The bus within this process, if `bus` is a NodeBus; None: there is none."""
    clock: Clock
    environment: Mapping[str, str]
    """`TOPOALIGN_*` settings: options of the command line, or the environment of the process."""
    checks: dict[str, Check] = field(default_factory=dict)
    """Readiness checks by name; a service adds its own."""
    readiness: dict[str, dict[str, Check]] = field(default_factory=dict)
    """
    Name of a Service -> the readiness checks that it needs, shown by /readyz/NAME; a service adds its own before it
    reports that it has started.
    """
    life: dict[str, Check] = field(default_factory=dict)
    """Checks of /livez by name: failures that only a restart of the process can correct."""
    notes: dict[str, Check] = field(default_factory=dict)
    """Conditions that an operator should know although the process is ready, by name; shown by /readyz?verbose."""
    reload: Reload = field(default_factory=Reload)
    drain: Drain = field(default_factory=Drain)
    turns: RequestTurns = field(default_factory=RequestTurns)
    """The turns of the requests to the HTTP servers of the process."""
    routes: "list[BaseRoute]" = field(default_factory=list)
    """HTTP routes in addition to /livez, /readyz and /metrics; a service adds its own before it reports its start."""
    pages: dict[str, Page] = field(default_factory=dict)
    """Pages by path that take no parameters; a service adds its own before it reports that it has started."""
    collectors: list[Collector] = field(default_factory=list)
    """The metrics of /metrics; a service adds its own."""
    series: list[Series] = field(default_factory=list)
    """
    Metric families that /metrics shows after `metrics`. Services write them directly, because they have too many series
    to be rebuilt at each scrape.
    """
    superseded: anyio.Event = field(default_factory=anyio.Event)
    """Set by a service when another process replaces this one: all services stop, and this process awaits its stop."""

    @cached_property
    def metrics(self) -> "CollectorRegistry":
        """The Prometheus registry of /metrics: the collectors, and metrics that services register here directly."""
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
