"""
Reads the hardware again and again, and says what it is and how it is when that changes.

A reading that fails changes what is known of nothing: the topology stays, and the health of all devices becomes unknown
with the reason. A reading that lacks a device keeps it listed as lost. Whoever asks is told everything anew, and so is a
stream that has lost it.
"""

from collections.abc import Mapping

import anyio
import structlog
from anyio.abc import TaskStatus

from topoalign.core import wire
from topoalign.core.errors import DriverFault, HardwareUnknown, InvalidField
from topoalign.core.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.ids import DeviceID, NodeName
from topoalign.core.ports import Bus, Clock, Driver, Endpoint, Inventory
from topoalign.core.requests import AliveRequest, AnnounceRequest
from topoalign.core.topology.model import Topology
from topoalign.discovery.announcer import Announcer
from topoalign.discovery.lost import with_lost
from topoalign.discovery.metrics import Metrics
from topoalign.runtime.answers import answering

SERVICE = "topoalign-discovery"

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between tries for as long as nothing could be read at all; doubled each time."""

log = structlog.get_logger("topoalign.discovery")


class Discovery:
    """The service: `run` it."""

    def __init__(
        self,
        node: NodeName,
        driver: Driver,
        bus: Bus,
        clock: Clock,
        metrics: Metrics,
        *,
        read_seconds: float,
        boot_id: str | None,
        hub: Bus | None = None,
    ) -> None:
        """
        `hub` is the bus that everybody hears, if `bus` is a shorter way to the services of this process.

        `boot_id` is None where there is no kernel to ask, as for a described machine: then this run stands for a boot.
        """
        self._node, self._driver, self._bus, self._clock, self._metrics = node, driver, bus, clock, metrics
        self._read_seconds = read_seconds
        self._epoch = int(clock.wall() * 1000)
        self._boot_id = boot_id or f"run-{self._epoch}"
        self._announcer = Announcer(bus, hub or bus, clock)
        self._topology: TopologyDiscovered | None = None
        self._health: DeviceHealthChanged | None = None
        self._findings: tuple[str, ...] = ()
        self._trouble: str | None = "the hardware has not been read yet"

    def trouble(self) -> str | None:
        """Readiness: why the newest reading cannot be relied on."""
        return self._trouble

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started once questions are answered; the first reading may take longer."""
        endpoints = [
            Endpoint(
                name="announce",
                subject=wire.announce_subject(self._node),
                answer=answering(AnnounceRequest, self._asked_anew),
            ),
            Endpoint(name="alive", subject=wire.alive_subject(self._node), answer=answering(AliveRequest, self._asked)),
        ]
        async with self._bus.serve(SERVICE, endpoints), anyio.create_task_group() as tasks:
            tasks.start_soon(self._announcer.run)
            tasks.start_soon(self._announcer.watch, self.announce)
            tasks.start_soon(self._read_regularly)
            task_status.started()

    def announce(self) -> None:
        """Says everything anew, under new revisions. Does nothing as long as nothing was read."""
        if self._topology is not None and self._health is not None:
            self._say_topology(self._topology.source, self._topology.topology)
            self._say_health(self._health.devices)

    async def _asked_anew(self, request: AnnounceRequest) -> dict[str, tuple[int, int]]:
        self._newest(request.node)
        self.announce()
        return self._newest(request.node)

    async def _asked(self, request: AliveRequest) -> dict[str, tuple[int, int]]:
        return self._newest(request.node)

    def _newest(self, node: NodeName) -> dict[str, tuple[int, int]]:
        """Epoch and revision of what was said last. Raises InvalidField for another node, HardwareUnknown for nothing."""
        if node != self._node:
            raise InvalidField("node", f"this is the discovery service of {self._node}", "ask that node's own")
        if self._topology is None or self._health is None:
            raise HardwareUnknown(self._node, self._trouble or "it has not been read yet")
        return {
            "topology": (self._epoch, self._topology.revision),
            "health": (self._epoch, self._health.revision),
        }

    async def _read_regularly(self) -> None:
        pause = FIRST_PAUSE
        while True:
            await self.read()
            if self._topology is not None:
                await self._clock.sleep(self._read_seconds)
            else:
                await self._clock.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 2)

    async def read(self) -> None:
        """Reads once, and says what changed."""
        self._metrics.reads.inc()
        began = self._clock.monotonic()
        try:
            inventory = await self._driver.read()
        except DriverFault as fault:
            self._metrics.failures.inc()
            self._failed(fault)
        else:
            self._found(inventory)
        self._metrics.seconds.observe(self._clock.monotonic() - began)

    def _failed(self, fault: DriverFault) -> None:
        """Says in the log once what is wrong, not at every try."""
        if self._trouble != fault.finding:
            log.warning(
                "hardware cannot be read", driver=self._driver.source, finding=fault.finding, remedy=fault.remedy
            )
        self._trouble = fault.finding
        if self._health is not None:
            unknown = DeviceHealth(state=HealthState.UNKNOWN, reason=fault.finding)
            self._change_health(dict.fromkeys(self._health.devices, unknown))

    def _found(self, inventory: Inventory) -> None:
        if inventory.findings != self._findings:
            self._findings = inventory.findings
            log.warning("oddities of the hardware changed", findings=inventory.findings)
        had = self._topology
        topology = with_lost(had.topology, inventory.topology) if had is not None else inventory.topology
        source = self._driver.source
        if had is None or (source, topology) != (had.source, had.topology):
            self._say_topology(source, topology)
        self._change_health(health_of(topology, inventory, source))
        if self._trouble is not None:
            log.info("hardware read", driver=source, machine=topology.describe())
        self._trouble = None

    def _change_health(self, devices: dict[DeviceID, DeviceHealth]) -> None:
        if self._health is None or devices != self._health.devices:
            self._say_health(devices)

    def _say_topology(self, source: str, topology: Topology) -> None:
        self._topology = TopologyDiscovered(
            node=self._node,
            epoch=self._epoch,
            revision=self._topology.revision + 1 if self._topology is not None else 1,
            boot_id=self._boot_id,
            source=source,
            topology=topology,
        )
        self._announcer.say(self._topology)

    def _say_health(self, devices: dict[DeviceID, DeviceHealth]) -> None:
        self._health = DeviceHealthChanged(
            node=self._node,
            epoch=self._epoch,
            revision=self._health.revision + 1 if self._health is not None else 1,
            devices=devices,
        )
        self._announcer.say(self._health)


def health_of(topology: Topology, inventory: Inventory, source: str) -> dict[DeviceID, DeviceHealth]:
    """Of all devices: as the driver says, or lost."""
    found: Mapping[DeviceID, object] = {**inventory.topology.gpu_by_id, **inventory.topology.nic_by_id}
    lost = DeviceHealth(state=HealthState.UNHEALTHY, reason=f"lost: {source} no longer finds it")
    unjudged = DeviceHealth(state=HealthState.UNKNOWN, reason=f"{source} does not say how it is")
    return {
        device: inventory.health.get(device, unjudged) if device in found else lost
        for device in (*topology.gpu_by_id, *topology.nic_by_id)
    }
