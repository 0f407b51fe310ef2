"""What a service is handed when it starts. Services differ in what they do with it, never in what they get."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyio.abc import TaskStatus
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

from topoalign.core.ports import Bus, Clock

Check = Callable[[], str | None]
"""Says why the process is not ready, or None when it is."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The world of one service: in tests and in one process shared, in four processes one each."""

    bus: Bus
    hub: Bus | None = None
    """The bus that everybody hears, where `bus` is a shorter way to the services of this process; None if they are one."""
    clock: Clock
    environment: Mapping[str, str]
    """`TOPOALIGN_*` settings: the process environment under what the command line said."""
    checks: dict[str, Check] = field(default_factory=dict)
    """Readiness checks by name; a service adds its own."""
    routes: list[BaseRoute] = field(default_factory=list)
    """HTTP routes beside /livez, /readyz and /metrics; a service adds its own before it reports that it has started."""
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)


class Serve(Protocol):
    """A service's entry: runs until cancelled, and calls `task_status.started()` once it serves."""

    def __call__(self, context: Context, *, task_status: TaskStatus[None]) -> Coroutine[Any, Any, None]: ...
