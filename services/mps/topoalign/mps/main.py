"""Builds and runs the MPS daemons of one node."""

import anyio
from anyio.abc import TaskStatus

from topoalign.mps.daemons import Daemons
from topoalign.mps.settings import MpsSettings
from topoalign.runtime.context import Context
from topoalign.runtime.metrics import ServiceMetric
from topoalign.runtime.settings import from_environment
from topoalign.runtime.tasks import background


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Builds the service from the context's settings and runs it. Raises InvalidField for an invalid setting."""
    settings = from_environment(MpsSettings, context.environment)
    daemons = Daemons(context.configuration, settings.mps_control, context.environment, context.clock)
    context.checks["mps"] = daemons.reason
    context.collectors.extend(figures(daemons))
    async with background() as tasks:
        tasks.start_soon(context.configuration.keep_up, context.clock, context.reload.wait)
        task_status.started()
        await daemons.run()


def figures(daemons: Daemons) -> list[ServiceMetric]:
    """The metrics of the daemons. The label `resource` is the resource that a daemon serves."""
    return [
        ServiceMetric(
            "gauge",
            "topoalign_mps_ready",
            "1 while the MPS daemon of a resource serves.",
            lambda: {resource: each.reason is None for resource, each in daemons.daemons.items()},
            "resource",
        ),
        ServiceMetric(
            "counter",
            "topoalign_mps_starts",
            "Starts of the MPS daemon of a resource.",
            lambda: {resource: each.starts for resource, each in daemons.daemons.items()},
            "resource",
        ),
    ]
