"""Discovery with a driver that finds what it is told to, and a bus that fails as it is told to."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bus_support import FailingBus

from topoalign.core import wire
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, Event, HealthState, TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.processes import DeviceUse
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Bus as BusPort
from topoalign.core.ports import Clock, Driver, Endpoint, Inventory, Listener, Stream
from topoalign.discovery.announcer import Announcer
from topoalign.discovery.device_record import RecordFile
from topoalign.discovery.health_keeper import HealthKeeper
from topoalign.discovery.metrics import DiscoveryMetrics
from topoalign.discovery.offering import NodeOffering
from topoalign.discovery.service import Discovery, ReadingSettings
from topoalign.discovery.xids import XidRules
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.runtime.metrics import registry_of
from topoalign.runtime.node_bus import NodeBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

NODE = NodeName("rack1.node-1")
READ_SECONDS = 10.0
QUIET_SECONDS = 60.0
HOLD_DOWN_SECONDS = 1.0
NOWHERE = Path("/proc/nowhere")
"""A state directory that cannot be made, where nothing is to be remembered."""
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


def inventory(*gpus: int, index: tuple[int, ...] = (), sick: str = "", findings: tuple[str, ...] = ()) -> Inventory:
    """These GPUs; their indexes in order unless given; the first one is unhealthy for this reason."""
    ids = [DeviceID(f"GPU-{gpu}") for gpu in gpus]
    indexes = index or tuple(range(len(gpus)))
    health = dict.fromkeys(ids, HEALTHY)
    if sick:
        health[ids[0]] = DeviceHealth(state=HealthState.UNHEALTHY, reason=sick)
    cards = tuple(Gpu(id=name, index=i) for name, i in zip(ids, indexes, strict=True))
    return Inventory(topology=Topology(gpus=cards), health=health, findings=findings)


class Hardware:
    """A driver that finds what it is told to."""

    source = "test"

    def __init__(self) -> None:
        self.now: Inventory | DriverFault = inventory(0, 1)
        self.use: tuple[DeviceUse, ...] | DriverFault = ()
        self.reads = self.measurements = 0
        self.listener: Listener | None = None

    async def read(self) -> Inventory:
        self.reads += 1
        if isinstance(self.now, DriverFault):
            raise self.now
        return self.now

    async def watch(self, listener: Listener) -> None:
        self.listener = listener

    async def measure(self) -> tuple[DeviceUse, ...]:
        self.measurements += 1
        if isinstance(self.use, DriverFault):
            raise self.use
        return self.use


def discovery_with(
    driver: Driver,
    bus: BusPort,
    clock: Clock,
    metrics: DiscoveryMetrics | None = None,
    *,
    node: NodeName = NODE,
    health_keeper: HealthKeeper | None = None,
    read_seconds: float = READ_SECONDS,
    boot_id: str = "boot",
    environment: Mapping[str, str] | None = None,
    hub: BusPort | None = None,
    answers: Sequence[Endpoint] = (),
) -> Discovery:
    near = bus.near if isinstance(bus, NodeBus) else None
    return Discovery(
        ReadingSettings(node, boot_id, read_seconds, HOLD_DOWN_SECONDS),
        driver,
        bus,
        clock,
        metrics or DiscoveryMetrics(),
        health_keeper or HealthKeeper(RecordFile(NOWHERE, boot_id), XidRules(), QUIET_SECONDS, clock),
        NodeOffering(ConfigurationFile(environment or {})).offered,
        Announcer(hub or bus, clock, near),
        answers,
    )


class World:
    def __init__(
        self, state_dir: Path = NOWHERE, boot_id: str = "boot", environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` configures what is offered."""
        self.bus, self.clock, self.hardware, self.metrics = FailingBus(), ManualClock(), Hardware(), DiscoveryMetrics()
        self.registry = registry_of(self.metrics.figures())
        self.health_keeper = HealthKeeper(RecordFile(state_dir, boot_id), XidRules(), QUIET_SECONDS, self.clock)
        self.discovery = discovery_with(
            self.hardware,
            self.bus,
            self.clock,
            self.metrics,
            health_keeper=self.health_keeper,
            boot_id=boot_id,
            environment=environment,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background() as tasks:
            await tasks.start(lambda *, task_status: self.discovery.run(task_status=task_status))
            await self.clock.advance(0)
            yield

    async def becomes(self, now: Inventory | DriverFault, seconds: float = READ_SECONDS) -> None:
        self.hardware.now = now
        await self.clock.advance(seconds)

    async def said(self) -> list[Event]:
        """All events of the stream, oldest first."""
        last = await self.bus.last_position(Stream.NODES)
        events: list[Event] = []
        async with self.bus.follow(Stream.NODES, ">") as messages:
            async for received in messages:
                events.append(wire.decode_event(received.message))
                if received.position == last:
                    break
        return events

    async def topology(self) -> TopologyDiscovered:
        return [event for event in await self.said() if isinstance(event, TopologyDiscovered)][-1]

    async def health(self) -> DeviceHealthChanged:
        return [event for event in await self.said() if isinstance(event, DeviceHealthChanged)][-1]

    def counted(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)
