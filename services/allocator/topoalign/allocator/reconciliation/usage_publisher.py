"""
Publishes `UsageObserved`: CPUs, memory, and devices of other plugins. The kubelet allocates them without topoalign.

It is published at every change, because predictions in other processes need it. Only the newest reading is valid. If
the stream has lost it, it is published again. If another client has published a reading for this node, it is published
in a new epoch. Subscribers ignore messages of the same epoch unless the revision is greater.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.admission.prediction import spread_memory_blocks
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import ContainerUsage, KubeletObserved, Owner, UsageObserved
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Clock, Message, Stream
from topoalign.runtime.fact_publisher import FactPublisher

AGAIN_SECONDS = 2.0
"""Time between two attempts while the bus does not confirm a message."""
RENEW_SECONDS = 5.0
"""Minimum time between two new epochs, because another client can publish any number of readings."""
POLL_SECONDS = 60.0
"""Time between two checks of whether the stream still has the published reading."""

log = structlog.get_logger("topoalign.allocator.reconciliation.usage_publisher")


class UsagePublisher:
    """Publishes the ledger's newest `UsageObserved` when it changes, and again if the stream has lost it."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock, hub: Bus) -> None:
        """`hub`: the bus of all nodes. `bus`: the bus to publish on, which can include the bus inside this process."""
        self._ledger = ledger
        self._clock = clock
        self._hub = hub
        self._publisher = FactPublisher(bus)
        self._published: UsageObserved | None = None
        self._position = 0
        """The position of `_published` in the stream."""
        self._renewed: float | None = None
        """Monotonic seconds at which `announce` last started an epoch."""

    async def run(self) -> None:
        """Publishes each new reading until cancelled. Retries every `AGAIN_SECONDS` until the bus confirms it."""
        while True:
            version = self._ledger.version
            usage = self._ledger.state.usage
            if usage is not None and usage is not self._published and not await self._publish(usage):
                await self._clock.sleep(AGAIN_SECONDS)
                continue
            await self._ledger.wait_past(version)

    @property
    def has_published(self) -> bool:
        """Whether this process has published a reading."""
        return self._published is not None

    async def watch(self) -> None:
        """Publishes the reading again if it is not the stream's newest message. Checks every `POLL_SECONDS`."""
        while True:
            await self._clock.sleep(POLL_SECONDS)
            published = self._published
            if published is None:
                continue
            with suppress(Unavailable):
                position = await self._hub.last_position(Stream.NODES, wire.subject(published))
                if published is not self._ledger.state.usage:
                    continue
                if position < self._position:
                    self._ledger.take_reading(msgspec.structs.replace(published, revision=published.revision + 1))
                elif position > self._position:
                    self.announce()

    def announce(self) -> None:
        """
        Starts a new epoch for the usage, so that it is published again. Does nothing before the first reading, or
        within `RENEW_SECONDS` of the last new epoch.
        """
        usage = self._ledger.state.usage
        now = self._clock.monotonic()
        if usage is None or (self._renewed is not None and now < self._renewed + RENEW_SECONDS):
            return
        self._renewed = now
        epoch = max(int(self._clock.wall() * 1000), usage.epoch + 1)
        self._ledger.take_reading(msgspec.structs.replace(usage, epoch=epoch, revision=1))

    async def _publish(self, usage: UsageObserved) -> bool:
        """Publishes a reading. Returns False if it must be retried."""
        try:
            self._position = await self._publisher.publish(self._message(usage))
        except Unavailable as error:
            log.debug("usage not published", finding=error.finding)
            return False
        self._published = usage
        return True

    def _message(self, usage: UsageObserved) -> Message:
        """Builds the message. If it is too large, most of the kubelet's data is replaced by the reason."""
        message = wire.encode_event(usage, self._clock.wall())
        size = len(message.body)
        full = usage.kubelet
        if size <= wire.LARGEST_BODY or full is None:
            return message
        log.error("the data for predictions is too large for the bus: subscribers cannot predict", bytes=size)
        why = f"the data of the kubelet is too large for one message: {size} bytes, limit {wire.LARGEST_BODY}"
        rules = KubeletObserved(version=full.version, rules=full.rules, record_doubt=full.record_doubt, unknown=why)
        return wire.encode_event(msgspec.structs.replace(usage, kubelet=rules), self._clock.wall())


def is_recorded_here(hardware: Topology, resource: ResourceName, device: DeviceID) -> bool:
    """
    Whether this allocator records a device. GPUs are recorded under any resource, because the resource name may have
    changed. NICs are recorded only under resources that are currently offered.
    """
    owner = hardware.parent_of(device)
    return owner in hardware.gpu_by_id or (owner in hardware.nic_by_id and resource in hardware.offers_of)


def usage_of_others(shown: Iterable[ContainerUsage], hardware: Topology) -> tuple[ContainerUsage, ...]:
    """Returns the CPUs, memory and devices of other device plugins of all containers that have any, sorted by owner."""
    # A terminating pod may be reported together with a new pod that has the same name.
    found: dict[Owner, list[ContainerUsage]] = {}
    for each in shown:
        found.setdefault(each.owner, []).append(each)
    owners = sorted(found, key=lambda owner: (owner.namespace, owner.pod, owner.container))
    containers = [join_usages(owner, found[owner], hardware) for owner in owners]
    blocks = spread_memory_blocks([block for each in containers for block in each.memory], hardware)
    usage = [msgspec.structs.replace(each, memory=tuple(next(blocks) for _ in each.memory)) for each in containers]
    return tuple(each for each in usage if each.cpus or each.memory or each.devices)


def join_usages(owner: Owner, parts: Sequence[ContainerUsage], hardware: Topology) -> ContainerUsage:
    """Merges one owner's entries: the union of CPUs and of devices of other device plugins, and all memory blocks."""
    devices: dict[ResourceName, set[DeviceID]] = {}
    for part in parts:
        for name, ids in part.devices.items():
            if foreign := [each for each in ids if not is_recorded_here(hardware, name, each)]:
                devices.setdefault(name, set()).update(foreign)
    blocks = [block for part in parts for block in part.memory]
    return ContainerUsage(
        owner=owner,
        cpus=format_cpuset(cpu for part in parts for cpu in parse_cpuset(part.cpus)),
        memory=tuple(sorted(blocks, key=lambda block: (block.resource, block.nodes, block.size))),
        devices={name: tuple(sorted(ids)) for name, ids in devices.items()},
    )
