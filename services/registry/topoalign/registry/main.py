"""Builds and runs the registry."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from secrets import token_hex

import anyio
import structlog
from anyio.abc import TaskStatus

from topoalign.client import Client
from topoalign.core.model.errors import InvalidField
from topoalign.registry.api import Api
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.node_metrics import NodeSeries
from topoalign.registry.ports import KubernetesApi
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment

log = structlog.get_logger("topoalign.registry")

YOUNG_OBJECTS = 2000
"""Number of new objects before a collection of them. Python's default of 700 is reached by two dozen new connections."""
MOST_PASSES = 10
"""
Number of collections of the youngest objects before one that covers all objects since the last freeze. When 5,000 nodes
publish at once, the event loop is blocked for 15 to 30 ms.
"""


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Builds the service from the context's settings and runs it. Raises InvalidField for an invalid setting."""
    settings = from_environment(RegistrySettings, context.environment)
    check_settings(settings)
    scheduling = settings.scheduler_port is not None
    client = Client(context.bus, context.clock, "registry", bodies=False, usage=scheduling)
    cluster = Cluster(usage=scheduling)
    metrics = RegistryMetrics(context.metrics, client)
    registry = Registry(context.bus, context.clock, client, cluster, metrics, settings)
    series = NodeSeries(cluster, context.clock, per_allocation=settings.registry_allocation_series)
    context.checks["streams"] = registry.behind
    foreign = ForeignNodes(context.clock, cluster.is_answering)
    context.routes.append(Api(cluster, context.clock, context.bus, foreign).mount())
    context.series.append(series.write)
    with freezing(asyncio.get_running_loop().call_soon_threadsafe):
        async with kubernetes(context, settings, replica := token_hex(6)) as api, anyio.create_task_group() as tasks:
            if scheduling:
                side = SchedulingService(context, settings, client, cluster, registry, api, replica, foreign)
                log.info("extender listens", url=await tasks.start(side.run))
            await registry.run(task_status=task_status)


def check_settings(settings: RegistrySettings) -> None:
    """Raises InvalidField for a setting that has no effect because another one, which it needs, is not set."""
    port = "TOPOALIGN_SCHEDULER_PORT"
    api_server = "TOPOALIGN_KUBERNETES"
    missing = {port: settings.scheduler_port is None, api_server: settings.kubernetes == "off"}
    for name, is_set, needed in (
        (api_server, settings.kubernetes != "off", port),
        ("TOPOALIGN_SCHEDULER_TLS_DIR", bool(settings.scheduler_tls_dir), port),
        ("TOPOALIGN_DELETE_REFUSED_PODS", settings.delete_refused_pods, api_server),
        ("TOPOALIGN_UNKNOWN_NODES", settings.unknown_nodes != "refuse", api_server),
        ("TOPOALIGN_PUBLISH_TOPOLOGIES", settings.publish_topologies, api_server),
    ):
        if is_set and missing[needed]:
            raise InvalidField(name, f"it has no effect without {needed}", f"set {needed}, or unset {name}")


@asynccontextmanager
async def kubernetes(context: Context, settings: RegistrySettings, replica: str) -> AsyncIterator[KubernetesApi | None]:
    """The API server; None if it is `off` in the settings. Raises InvalidField for an invalid setting."""
    if settings.kubernetes == "off":
        yield None
        return
    try:  # an optional dependency: without Kubernetes it is not needed
        from topoalign.registry.kubernetes.api_client import connect_kubernetes
    except ModuleNotFoundError as error:
        finding = f"{error.name} is not installed"
        raise InvalidField(
            "TOPOALIGN_KUBERNETES", finding, "install topoalign[kubernetes], or set this one to off"
        ) from error
    async with connect_kubernetes(settings.kubernetes, context.clock, replica) as api:
        yield api


@contextmanager
def freezing(soon: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """
    While the context is open, each garbage collection covers only the objects since the last one and freezes the survivors.
    When memory has doubled, a full collection follows (`soon` schedules it).
    """
    # A full collection of the facts of thousands of nodes blocks the event loop for tenths of a second. Nearly all
    # survivors are in use for a long time. Garbage among the frozen objects, such as a connection that was open during a
    # collection, waits for the full one.
    thresholds = gc.get_threshold()
    most_blocks = 2 * sys.getallocatedblocks()

    def freeze(phase: str, info: Mapping[str, int]) -> None:
        nonlocal most_blocks
        if phase == "start" or info["generation"] == 0:
            return
        if info["generation"] == 2:
            most_blocks = 2 * sys.getallocatedblocks()
        if sys.getallocatedblocks() < most_blocks:
            gc.freeze()
        else:
            gc.unfreeze()
            soon(gc.collect)  # not now: a collection cannot start within another one

    gc.callbacks.append(freeze)
    gc.set_threshold(YOUNG_OBJECTS, MOST_PASSES)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(freeze)
