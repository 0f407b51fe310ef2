"""Builds and runs the discovery of one node."""

from collections.abc import Mapping

import anyio
from anyio.abc import TaskStatus

from topoalign.core.model.errors import InvalidField
from topoalign.core.ports import Clock, Driver, Inventory
from topoalign.discovery.announcer import Announcer
from topoalign.discovery.device_record import RecordFile
from topoalign.discovery.drivers.auto import AutoDriver, DescribedDriver, SysfsDriver
from topoalign.discovery.health_keeper import HealthKeeper
from topoalign.discovery.metrics import DiscoveryMetrics
from topoalign.discovery.offering import NodeOffering
from topoalign.discovery.service import Discovery, ReadingSettings
from topoalign.discovery.settings import DiscoverySettings
from topoalign.discovery.use_meter import UseMeter
from topoalign.discovery.xids import xid_rules
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.runtime.boot import boot_id
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment
from topoalign.runtime.tasks import background


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Builds the service from the context's settings and runs it. Raises InvalidField for an invalid setting."""
    settings = from_environment(DiscoverySettings, context.environment)
    driver = driver_for(settings, context.clock)
    # If the kernel reports no boot id, each run counts as a boot. A described machine boots with its host.
    boot = boot_id(settings.sysfs_root) or f"run-{int(context.clock.wall() * 1000)}"
    configuration = context.configuration
    health = configuration.current.health
    xids = xid_rules(health.ignored_xids, context.environment)
    health_keeper = HealthKeeper(RecordFile(settings.state_dir, boot), xids, health.quiet_seconds, context.clock)
    offering = NodeOffering(configuration)
    metrics = DiscoveryMetrics()
    announcer = Announcer(context.hub or context.bus, context.clock, context.near)
    discovery = Discovery(
        ReadingSettings(settings.node, boot, settings.read_seconds, health.hold_down_seconds),
        driver,
        context.bus,
        context.clock,
        metrics,
        health_keeper,
        offering.offered,
        announcer,
        [UseMeter(settings.node, driver, context.clock, settings.sysfs_root, settings.driver_seconds).endpoint()],
    )
    context.collectors.extend([*metrics.figures(), *offering.figures()])
    context.checks["discovery"] = discovery.not_ready_reason
    context.checks["hardware events"] = discovery.subscription_loss
    context.checks["device record"] = health_keeper.not_ready_reason
    context.notes["configuration"] = offering.note
    context.notes["hardware"] = discovery.hardware_findings
    context.notes["node name"] = announcer.contested_by
    context.notes["ids"] = announcer.facts.note
    async with background() as tasks:
        tasks.start_soon(configuration.keep_up, context.clock, context.reload.wait)
        tasks.start_soon(follow_configuration, configuration, discovery, health_keeper, context.environment)
        await discovery.run(task_status=task_status)


async def read_hardware(environment: Mapping[str, str]) -> Inventory:
    """Reads this machine once with these settings, for commands. Raises DriverFault and InvalidField."""
    settings = from_environment(DiscoverySettings, environment)
    return await driver_for(settings, SystemClock()).read()


async def follow_configuration(
    configuration: ConfigurationFile, discovery: Discovery, health_keeper: HealthKeeper, environment: Mapping[str, str]
) -> None:
    """Passes the health settings of each new configuration to the health keeper and to discovery."""
    while True:
        changed = configuration.changed
        health = configuration.current.health
        health_keeper.follow(xid_rules(health.ignored_xids, environment), health.quiet_seconds)
        discovery.follow(health.hold_down_seconds)
        await changed.wait()


def driver_for(settings: DiscoverySettings, clock: Clock) -> Driver:
    """Returns the driver that the settings name. Raises InvalidField, and what `DescribedDriver` raises."""
    if settings.driver == "described" or (settings.driver == "auto" and settings.machine):
        if not settings.machine:
            raise InvalidField("TOPOALIGN_MACHINE", "is not set", "name a machine for the driver `described`")
        return DescribedDriver(settings.machine)
    sysfs = SysfsDriver(settings.sysfs_root, clock, settings.driver_seconds)
    if settings.driver == "sysfs":
        return sysfs
    from topoalign.discovery.drivers.nvml.driver import NvmlDriver  # the other drivers do not need its library

    nvml = NvmlDriver(settings.sysfs_root, clock, settings.driver_seconds)
    return nvml if settings.driver == "nvml" else AutoDriver(nvml, sysfs)
