"""
Runs services: one alone in its container, or all of them in one process.

Services are found by entry point (group `topoalign.services`), so shared code imports none of them. The bus opens
first, the services start one after another, and the HTTP pages start last. They stop in the reverse order. If a service
fails, the process ends with the error of that service. A service that stops without a request to stop counts as failed.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup, TaskStatus

from topoalign.core import wire
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus
from topoalign.runtime import systemd
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.context import Context, Reload, Serve
from topoalign.runtime.installed import ServiceFailed, find_unknown_variables, start_order
from topoalign.runtime.nats_bus import NatsBus, connect_bus
from topoalign.runtime.node_bus import NodeBus
from topoalign.runtime.settings import RuntimeSettings, from_environment
from topoalign.runtime.tasks import StoppedUnasked, background, run_until_cancelled
from topoalign.runtime.watchdog import Watchdog

CONNECT_SECONDS = 1.0
"""How long the start waits for NATS before it continues without NATS."""
START_SECONDS = 30.0
"""Time-out of the start of one service. No service takes nearly as long, even on a node with slow drivers."""

log = structlog.get_logger("topoalign.runtime.runner")


class RunningServices(msgspec.Struct, frozen=True, kw_only=True):
    """The running services and their addresses, for the caller."""

    services: tuple[str, ...]
    node: NodeName
    nats: str | None
    """URL, without credentials; None if the caller passed the bus."""
    http: str | None
    """URL; None without HTTP."""


async def run_services(
    services: Mapping[str, Serve],
    environment: Mapping[str, str],
    *,
    bus: Bus | None = None,
    ready: Callable[[RunningServices], None] | None = None,
    signals: bool = True,
) -> None:
    """
    Runs these services (`installed.load_services`) until SIGTERM, SIGINT or cancellation; calls `ready` once all serve.

    If `bus` is None, it connects to NATS as the settings say. If `signals` is False, only cancellation stops the
    services. This is for services that are part of a larger program (`runtime.shutdown`). Raises InvalidField,
    ServiceFailed, AddressInUse, StoppedUnasked, and any error that ended a service.
    """
    settings = from_environment(RuntimeSettings, environment)
    if unknown := [*find_unknown_variables(environment, services)]:
        log.warning("variables that are no settings have no effect", findings=unknown)
    node = NodeName(settings.node or socket.gethostname().lower())
    names = sorted(services, key=start_order)
    environment = {**environment, "TOPOALIGN_NODE": node}
    stopping = anyio.Event()
    async with bus_of(settings, services, node, bus) as used:
        hub = used.hub if isinstance(used, NodeBus) else used
        context = Context(
            bus=used,
            hub=hub if isinstance(used, NodeBus) else None,
            near=used.near if isinstance(used, NodeBus) else None,
            clock=SystemClock(),
            environment=environment,
        )
        nats = hub if isinstance(hub, NatsBus) else None
        context.checks["bus"] = lambda: (
            None if hub.connected else (nats.reason_not_connected if nats is not None else None) or "not connected"
        )
        watchdog = Watchdog(context.clock)
        context.collectors.extend(watchdog.metrics())
        context.life["event loop"] = watchdog.reason_not_alive
        with reload_on_signal(context.reload) if signals else nullcontext():
            async with background() as tasks:
                if signals:
                    tasks.start_soon(stop_on_signal, context, stopping, tasks.cancel_scope)
                tasks.start_soon(watchdog.run)
                async with background() as serving:
                    for name in names:
                        await start_service(serving, name, services[name], context)
                    http = None
                    if settings.http_port is not None:
                        from topoalign.runtime.health_pages import (
                            serve_http,
                        )  # it loads a hundred modules: only if needed

                        http = await tasks.start(serve_http, context, settings.http_host, settings.http_port)
                    tasks.start_soon(systemd.keep_watchdog, environment)
                    systemd.notify(environment, "READY=1")
                    log.info("running", services=names, node=node, http=http)
                    if ready is not None:
                        url = nats.url if nats is not None else None
                        ready(RunningServices(services=tuple(names), node=node, nats=url, http=http))
                    await context.superseded.wait()
                context.checks.clear()
                context.checks["superseded"] = lambda: "another process has taken this one's place: stop this one"
                log.warning("another process has taken this one's place: nothing is served here any more")
                await anyio.sleep_forever()
    if not stopping.is_set():
        raise StoppedUnasked(" and ".join(names) or "topoalign", "a task of it was cancelled")


@asynccontextmanager
async def bus_of(
    settings: RuntimeSettings, services: Mapping[str, Serve], node: NodeName, bus: Bus | None
) -> AsyncIterator[Bus]:
    """Yields the given bus, or a connection to NATS for these services, in a node agent as a NodeBus."""
    if bus is not None:
        yield bus
        return
    async with connect_bus(
        settings.nats_url,
        name=f"topoalign-{next(iter(services))}" if len(services) == 1 else "topoalign",
        wait=settings.nats_wait,
        access=settings,
        node=node if "registry" not in services else None,
        publishes=published_subjects(services, node),
    ) as connected:
        with anyio.move_on_after(CONNECT_SECONDS):  # NATS is usually up; then no message has to be published twice
            await connected.up()
        # A node agent continues without its hub: messages between its own services do not need it.
        yield NodeBus(connected, node) if "discovery" in services and len(services) > 1 else connected


def published_subjects(services: Mapping[str, Serve], node: NodeName) -> list[str]:
    """The subjects that these services publish on. The permission for them is tested at the start."""
    return [
        f"{wire.PREFIX}.{pattern.format(node=wire.encode_node_token(node))}"
        for pattern, writer in wire.SUBJECTS.values()
        if writer.split("-")[0] in services
    ]


async def start_service(tasks: TaskGroup, name: str, serve: Serve, context: Context) -> None:
    """Starts a service and waits until it is ready. Raises ServiceFailed after START_SECONDS."""

    async def run(*, task_status: TaskStatus[None]) -> None:
        structlog.contextvars.bind_contextvars(service=name)  # in each of its log lines
        await run_until_cancelled(name, lambda: serve(context, task_status=task_status))

    with anyio.move_on_after(START_SECONDS) as scope:
        await tasks.start(run)
    if scope.cancelled_caught:
        raise ServiceFailed(
            f"{name} did not start within {START_SECONDS:g} s", "its last log lines name what it was waiting for"
        )


@contextmanager
def reload_on_signal(reload: Reload) -> Iterator[None]:
    """Reloads on SIGHUP until the context closes, so that it does not end the process during the stop."""
    loop = asyncio.get_running_loop()

    def asked(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(reload.ask)

    before = signal.signal(signal.SIGHUP, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


async def stop_on_signal(context: Context, stopping: anyio.Event, scope: anyio.CancelScope) -> None:
    """
    Stops everything in order at the first SIGTERM or SIGINT; the interpreter handles a second one. From the first
    signal on, the process is not ready. After SIGTERM, the services continue for the drain time (`Context.drain`).
    """
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("stopping", signal=signal.Signals(number).name)
            systemd.notify(context.environment, "STOPPING=1")
            stopping.set()
            break
    for checks in (context.checks, *context.readiness.values()):
        checks["stopping"] = lambda: "the process was asked to stop"
    context.drain.begun.set()
    if number == signal.SIGTERM:
        await context.clock.sleep(context.drain.seconds)
    scope.cancel()
