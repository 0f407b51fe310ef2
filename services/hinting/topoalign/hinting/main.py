"""Builds and runs the hinting service of one node."""

import anyio
from anyio.abc import TaskStatus

from topoalign.hinting.service import Hinting
from topoalign.hinting.settings import HintingSettings
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Builds the service from the context's settings and runs it. Raises InvalidField for an invalid setting."""
    settings = from_environment(HintingSettings, context.environment)
    hinting = Hinting(settings.node, context.bus, context.clock)
    context.checks["hinting"] = hinting.topology_unknown
    await hinting.run(task_status=task_status)
