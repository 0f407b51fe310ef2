"""
Reads the hardware repeatedly, and publishes topology and health when they change.

After a failed reading the topology stays, and the health of all devices becomes unknown with the reason. A device that is
missing in a reading stays listed as lost. The `HealthKeeper` combines the readings with the errors that the driver
reports between them, and with operator overrides. A change of health is published at once, and the next one not before
the hold-down time has passed. Everything is published again on request, and when the stream has lost it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeVar

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from topoalign.core import wire
from topoalign.core.model.errors import DriverFault, HardwareUnknown, InvalidField
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.maintenance import DevicesRequest, Override
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.model import Gpu, Nic, PciBridge, Topology
from topoalign.core.ports import Bus, Clock, Driver, Endpoint, HardwareEvent, Inventory
from topoalign.core.state.holding_health import HandedOut
from topoalign.discovery.announcer import Announcer
from topoalign.discovery.device_lookup import find_devices
from topoalign.discovery.drivers.reading_health import unknown_health
from topoalign.discovery.health_keeper import HealthKeeper
from topoalign.discovery.metrics import DiscoveryMetrics
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.replies import answer_with

# Keeps devices listed that are no longer found.
#
# A GPU that falls off the bus still has a container on it, and a kubelet forgets a device that is no longer listed. So
# a missing device keeps its place with its last known values, until it comes back under the same uuid, at any index. It
# is dropped only when another device has its PCI address.


D = TypeVar("D", Gpu, Nic)


def with_lost(had: Topology, found: Topology) -> Topology:
    """Returns `found` with the GPUs and NICs of `had` that it lacks."""
    nodes = set(found.node_ids)
    gpus = _with_missing_devices(had.gpus, found.gpus, nodes)
    nics = _with_missing_devices(had.nics, found.nics, nodes)
    if len(gpus) == len(found.gpus) and len(nics) == len(found.nics):
        return found
    pairs = combinations([*(gpu.id for gpu in gpus), *(nic.id for nic in nics)], 2)
    links = [found.link_by_pair.get(pair) or had.link_by_pair.get(pair) for pair in pairs]
    return msgspec.structs.replace(
        found,
        gpus=gpus,
        nics=nics,
        bridges=_merge_bridges(had, found, gpus, nics),
        links=tuple(link for link in links if link is not None),
    )


def _with_missing_devices(had: Sequence[D], found: Sequence[D], nodes: set[int]) -> tuple[D, ...]:
    # a missing device gets a new index if another device has its index
    ids = {device.id for device in found}
    addresses = {device.pci for device in found}
    taken = {device.index for device in found}
    listed: list[D] = list(found)
    for device in had:
        if device.id in ids or (device.pci is not None and device.pci in addresses):
            continue
        index = device.index if device.index not in taken else 1 + max(taken)
        taken.add(index)
        if isinstance(device, Gpu) and device.memory_node not in nodes:
            device = msgspec.structs.replace(device, memory_node=None)
        affinity = tuple(node for node in device.numa_affinity if node in nodes)
        listed.append(msgspec.structs.replace(device, index=index, numa_affinity=affinity))
    return tuple(sorted(listed, key=lambda device: device.index))


def _merge_bridges(had: Topology, found: Topology, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> tuple[PciBridge, ...]:
    # of the former bridges only those above a device stay
    old = {bridge.address: bridge for bridge in had.bridges}
    known = {bridge.address: bridge for bridge in found.bridges}
    for at in (*(gpu.bridge for gpu in gpus), *(nic.bridge for nic in nics)):
        chain: list[PciBridge] = []
        while at is not None and at not in known and at in old:
            chain.append(old[at])
            at = old[at].parent
        known |= {bridge.address: bridge for bridge in reversed(chain)}
    return tuple(known.values())


# The epoch of discovery's messages.
#
# A subscriber drops a message whose revision is not greater than the newest one of the same epoch. So a forged reading
# with a large revision would make everybody ignore discovery until the epoch ends. Therefore discovery begins a new
# epoch when another client has published for its node or a subscriber requests everything again. It begins at most one
# every few seconds, because each is recorded on disk and forged messages may come in any number.


RENEW_SECONDS = 5.0
"""
Minimum time between epochs of one run, below the ten seconds after which a registry or allocator requests all again.
"""


class Epochs:
    """Numbers the epochs of one run."""

    def __init__(self, begin: Callable[[], int], clock: Clock) -> None:
        """`begin` gives a number above those of earlier runs, as far as they are on record."""
        self._begin = begin
        self._clock = clock
        self.current = begin()
        self._since = clock.monotonic()

    def renew(self) -> bool:
        """Begins a new epoch, unless one has just begun. Returns whether it did."""
        if self._clock.monotonic() < self._since + RENEW_SECONDS:
            return False
        self.current = max(self._begin(), self.current + 1)
        self._since = self._clock.monotonic()
        return True


SERVICE = "topoalign-discovery"

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds between attempts until the first reading succeeds; doubled each time."""
SOON_SECONDS = 1.0
"""Between an event and the reading that follows it. One reading covers all events within this time."""
DEGRADED_REMEDY = (
    "compare with `nvidia-smi nvlink -s` and `nvidia-smi -q`; check that the fabric manager runs, then reset the GPU or "
    "have the board examined"
)
OVERRIDES: tuple[Override, ...] = ("cordon", "uncordon", "heal", "report")

log = structlog.get_logger("topoalign.discovery")


class ReadingSettings(NamedTuple):
    """How the hardware of a node is read and announced."""

    node: NodeName
    boot_id: str
    """Of the kernel: a restart of the node changes it."""
    read_seconds: float
    """Between two readings."""
    hold_down_seconds: float
    """Between two announcements of health. If the configuration changes, `follow` replaces this value."""


class Discovery:
    """The discovery service of one node; `run` serves until cancelled."""

    def __init__(
        self,
        settings: ReadingSettings,
        driver: Driver,
        bus: Bus,
        clock: Clock,
        metrics: DiscoveryMetrics,
        health_keeper: HealthKeeper,
        offered: Callable[[Topology, Topology | None], Topology],
        announcer: Announcer,
        answers: Sequence[Endpoint] = (),
    ) -> None:
        """`offered` adds the offers to a topology, given the previous one. `answers`: further endpoints."""
        self._settings = settings
        self._node = settings.node
        self._driver = driver
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._health_keeper = health_keeper
        self._offered = offered
        self._hold_down_seconds = settings.hold_down_seconds
        self._epochs = Epochs(health_keeper.new_epoch, clock)
        self._answers = answers
        self.announcer = announcer
        self._topology: TopologyDiscovered | None = None
        self._health: DeviceHealthChanged | None = None
        self._degraded: Mapping[DeviceID, str] = {}
        """GPU -> what is degraded."""
        self._findings: tuple[str, ...] = ()
        self._failure: str | None = "the hardware has not been read yet"
        self._reading = anyio.Lock(fast_acquire=True)
        self._subscription_loss: str | None = None
        self._held_until = 0.0
        """Monotonic seconds before which health is not announced again."""
        self._held = anyio.Event()
        """Set when health is to be announced after the hold-down."""
        self._look = anyio.Event()
        """Set when a reading should follow soon."""

    def not_ready_reason(self) -> str | None:
        """Readiness: why the newest reading cannot be relied on."""
        return self._failure

    def hardware_findings(self) -> str | None:
        """For /readyz?verbose: the findings of the newest reading, such as GPUs that do not answer."""
        return "; ".join(self._findings) or None

    def subscription_loss(self) -> str | None:
        """Readiness: why events of the hardware are not received."""
        return self._subscription_loss

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled. Reports `started` when requests can be answered; the first reading may take longer."""
        answers = {
            "announce": (
                wire.discovery_subject(self._node, "announce"),
                answer_with(NodeRequest, self._answer_announce),
            ),
            "alive": (wire.discovery_subject(self._node, "alive"), answer_with(NodeRequest, self._answer_alive)),
        }
        for override in OVERRIDES:
            answer = answer_with(DevicesRequest, partial(self._answer_override, override))
            answers[override] = (wire.devices_subject(self._node, override), answer)
        own = [Endpoint(name=name, subject=subject, answer=answer) for name, (subject, answer) in answers.items()]
        endpoints = [*own, self.announcer.endpoint(self._node), *self._answers]
        async with self._bus.serve(SERVICE, endpoints), anyio.create_task_group() as tasks:
            tasks.start_soon(self.announcer.run)
            tasks.start_soon(self.announcer.watch, self.announce)
            tasks.start_soon(self._read_regularly)
            tasks.start_soon(self._read_when_something_happens)
            tasks.start_soon(self._driver.watch, self)
            tasks.start_soon(self._publish_held_health)
            task_status.started()

    def announce(self) -> None:
        """Publishes everything again, under new revisions and a new epoch (`Epochs`)."""
        if self._topology is not None and self._health is not None:
            if self._epochs.renew():
                self._metrics.epochs += 1
            else:
                self.announcer.request_announce()
            self._announce_topology(self._topology.source, self._topology.topology)
            self._announce_health(self._health.devices)

    def follow(self, hold_down_seconds: float) -> None:
        """Applies a changed configuration: the hold-down time, and the offers of the hardware found."""
        self._hold_down_seconds = hold_down_seconds
        if self._topology is not None:
            had = self._topology
            topology = self._offered(had.topology, had.topology)
            if topology != had.topology:
                self._announce_topology(had.source, topology)

    async def _answer_announce(self, request: NodeRequest) -> dict[str, tuple[int, int]]:
        self._newest(request.node)
        self.announce()
        return self._newest(request.node)

    async def _answer_alive(self, request: NodeRequest) -> dict[str, tuple[int, int]]:
        return self._newest(request.node)

    def _newest(self, node: NodeName) -> dict[str, tuple[int, int]]:
        """Epoch and revision last published. Raises InvalidField for another node, HardwareUnknown before a reading."""
        if node != self._node:
            raise InvalidField("node", f"this is the discovery service of {self._node}", "ask that node's own")
        if self._topology is None or self._health is None:
            raise HardwareUnknown(self._node, self._failure or "it has not been read yet")
        return {
            "topology": (self._topology.epoch, self._topology.revision),
            "health": (self._health.epoch, self._health.revision),
        }

    async def _answer_override(self, override: Override, request: DevicesRequest) -> dict[DeviceID, DeviceHealth]:
        """Applies an override and returns the health of each device. Raises NotFound, StateFault and as `_newest`."""
        self._newest(request.node)
        devices = find_devices(self._hardware, request.devices, self._health_keeper.cordons)
        self._health_keeper.apply_override(override, devices, request.reason)
        self._publish_health()
        now = HandedOut(self._hardware, self._health_keeper.health_by_device())
        return {device: now.health_of(device) for device in devices}

    @property
    def _hardware(self) -> Topology:
        return self._topology.topology if self._topology is not None else Topology()

    def receive(self, event: HardwareEvent) -> None:
        """Takes an event of the driver between two readings."""
        self._metrics.observe(event)
        if self._health_keeper.observe(event, self._hardware):
            self._look.set()
        self._publish_health()

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        """Called by the driver: events of these GPUs cannot be received for this reason; None: all are received."""
        self._subscription_loss = reason
        self._health_keeper.lose_subscription(reason, gpus)
        self._look.set()
        self._publish_health()

    async def _read_regularly(self) -> None:
        failures = 0
        while True:
            await self.read()
            if self._topology is not None:
                await self._clock.sleep(self._settings.read_seconds)
            else:
                failures += 1
                await self._clock.sleep(backoff_seconds(failures, FIRST_PAUSE, LONGEST_PAUSE))

    async def _read_when_something_happens(self) -> None:
        while True:
            await self._look.wait()
            await self._clock.sleep(SOON_SECONDS)
            self._look = anyio.Event()
            await self.read()

    async def read(self) -> None:
        """Reads the hardware once, and publishes what changed."""
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        self._metrics.reads += 1
        began = self._clock.monotonic()
        try:
            inventory = await self._driver.read()
        except DriverFault as fault:
            self._metrics.failures += 1
            self._failed(fault)
        else:
            self._found(inventory, began)
        self._metrics.seconds.observe(self._clock.monotonic() - began)

    def _failed(self, fault: DriverFault) -> None:
        if self._failure != fault.finding:
            log.warning(
                "hardware cannot be read", driver=self._driver.source, finding=fault.finding, remedy=fault.remedy
            )
        self._failure = fault.finding
        self._health_keeper.failed(fault.finding)
        self._publish_health()

    def _found(self, inventory: Inventory, began: float) -> None:
        if inventory.findings != self._findings:
            self._findings = inventory.findings
            log.warning("findings about the hardware changed", findings=inventory.findings)
        had = self._topology
        topology = with_lost(had.topology, inventory.topology) if had is not None else inventory.topology
        topology = self._offered(topology, had.topology if had is not None else None)
        source = self._driver.source
        if had is None or (source, topology) != (had.source, had.topology):
            self._announce_topology(source, topology)
        self._report_degraded(topology)
        lost = DeviceHealth(state=HealthState.UNHEALTHY, reason=f"lost: {source} no longer finds it")
        health = dict.fromkeys((*topology.gpu_by_id, *topology.nic_by_id), lost)
        for device in (*inventory.topology.gpu_by_id, *inventory.topology.nic_by_id):
            health[device] = inventory.health.get(device) or unknown_health(f"{source} does not report its health")
        self._health_keeper.read(health, inventory, began)
        self._publish_health()
        if self._failure is not None:
            log.info("hardware read", driver=source, machine=topology.describe())
        self._failure = None

    def _report_degraded(self, topology: Topology) -> None:
        # their health stays as it is, because a degraded GPU still works for pods with one GPU
        found = degraded_gpus(topology)
        for gpu, finding in found.items():
            if self._degraded.get(gpu) != finding:
                log.warning("a GPU is degraded", gpu=gpu, finding=finding, remedy=DEGRADED_REMEDY)
        for gpu in self._degraded.keys() - found.keys():
            log.info("a GPU is no longer degraded", gpu=gpu)
        self._degraded = found
        self._metrics.set_degraded({gpu.id: gpu.links_down for gpu in topology.gpus}, found)

    def _publish_health(self) -> None:
        """Publishes the health of the devices if it has changed: now, or at the end of the hold-down."""
        devices = self._health_keeper.health_by_device()
        if self._topology is None or (self._health is not None and devices == self._health.devices):
            return
        now = self._clock.monotonic()
        if self._health is not None and now < self._held_until:
            self._held.set()
            return
        self._held_until = now + self._hold_down_seconds
        self._metrics.count_health_changes(self._health.devices if self._health is not None else {}, devices)
        self._announce_health(devices)

    async def _publish_held_health(self) -> None:
        while True:
            await self._held.wait()
            await self._clock.sleep(self._held_until - self._clock.monotonic())
            self._held = anyio.Event()
            self._publish_health()

    def _announce_topology(self, source: str, topology: Topology) -> None:
        self._topology = TopologyDiscovered(
            node=self._node,
            epoch=self._epochs.current,
            revision=self._topology.revision + 1 if self._topology is not None else 1,
            boot_id=self._settings.boot_id,
            source=source,
            topology=topology,
        )
        self.announcer.submit(self._topology)

    def _announce_health(self, devices: dict[DeviceID, DeviceHealth]) -> None:
        self._health = DeviceHealthChanged(
            node=self._node,
            epoch=self._epochs.current,
            revision=self._health.revision + 1 if self._health is not None else 1,
            devices=devices,
        )
        self.announcer.submit(self._health)
