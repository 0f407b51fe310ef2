"""Runs the discovery of one node."""

import anyio
from anyio.abc import TaskStatus

from topoalign.core.errors import InvalidField
from topoalign.core.ports import Clock, Driver
from topoalign.discovery.drivers.auto import AutoDriver
from topoalign.discovery.drivers.described import DescribedDriver
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.discovery.drivers.sysfs import SysfsDriver, boot_id
from topoalign.discovery.metrics import Metrics
from topoalign.discovery.service import Discovery
from topoalign.discovery.settings import DiscoverySettings
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    settings = from_environment(DiscoverySettings, context.environment)
    driver = driver_for(settings, context.clock)
    discovery = Discovery(
        settings.node,
        driver,
        context.bus,
        context.clock,
        Metrics(context.metrics),
        read_seconds=settings.read_seconds,
        boot_id=None if isinstance(driver, DescribedDriver) else boot_id(settings.sysfs_root),
        hub=context.hub,
    )
    context.checks["discovery"] = discovery.trouble
    await discovery.run(task_status=task_status)


def driver_for(settings: DiscoverySettings, clock: Clock) -> Driver:
    """Raises InvalidField for settings that contradict one another, and what `DescribedDriver` raises."""
    nvml = NvmlDriver(settings.sysfs_root, clock, settings.driver_seconds)
    sysfs = SysfsDriver(settings.sysfs_root, clock, settings.driver_seconds)
    match settings.driver:
        case "nvml":
            return nvml
        case "sysfs":
            return sysfs
        case "auto" if not settings.machine:
            return AutoDriver(nvml, sysfs)
    if not settings.machine:
        raise InvalidField("TOPOALIGN_MACHINE", "is not set", "name a machine for the driver `described`")
    return DescribedDriver(settings.machine)
