"""
What the kubelet gives away without asking us: CPUs, memory, and devices of other plugins.

It is read from PodResources with everything else, kept in the node's state, and said on the bus whenever it has changed, so
that predictions elsewhere know what is left. Only the newest reading matters: one that could not be said is not said later.
A stream that was lost or rolled back no longer has it, and somebody else may have spoken over it; so every now and then it
is checked. Over a forged reading it is said anew under a new epoch, because listeners drop what has no greater revision
than what they received in the same epoch.

After a start the kubelet's files may be read before PodResources has answered. An earlier version of a listener would take
that for a node on which nobody holds anything, so while the stream has what was said before the start, a reading without
containers waits: until PodResources has answered, at most `FIRST_SECONDS`.
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
from topoalign.runtime.speaker import FactPublisher

AGAIN_SECONDS = 2.0
"""Between two tries while the bus does not confirm."""
RENEW_SECONDS = 5.0
"""Between two epochs that begin because others have spoken over a reading: forged ones may come in any number."""
FIRST_SECONDS = 60.0
"""For so long after the start the first reading waits for PodResources: a kubelet that is away may stay away."""
HELD_SECONDS = 0.5
"""Between two checks whether the first reading still waits."""
POLL_SECONDS = 60.0
"""Between two checks whether the stream still has what was said."""

log = structlog.get_logger("topoalign.allocator.reconciliation.usage")


class UsageTeller:
    """Publishes the ledger's newest `UsageObserved` whenever it has changed, and again where the stream has lost it."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock, hub: Bus) -> None:
        """`hub` is the bus that everybody hears, where `bus` also has a shorter way to the services of this process."""
        self._ledger = ledger
        self._clock = clock
        self._hub = hub
        self._publisher = FactPublisher(bus, clock)
        self._said: UsageObserved | None = None
        self._position = 0
        """Of that in the stream."""
        self._waits_until = clock.monotonic() + FIRST_SECONDS
        """Monotonic seconds until which a first reading without containers may wait."""
        self._has_former = False
        """Whether the stream was seen to have what was said before the start."""
        self._shortened = False
        """Whether the last one was too large to be said whole."""
        self._renewed: float | None = None
        """Monotonic seconds at which the last epoch for a reading that was spoken over began."""

    async def run(self) -> None:
        """Publishes each new reading until cancelled, and tries again every `AGAIN_SECONDS` while the bus refuses it."""
        while True:
            version = self._ledger.version
            usage = self._ledger.state.usage
            if usage is not None and usage is not self._said:
                if await self._waits(usage):
                    await self._clock.sleep(HELD_SECONDS)
                    continue
                if not await self._say(usage):
                    await self._clock.sleep(AGAIN_SECONDS)
                    continue
            await self._ledger.wait_past(version)

    @property
    def has_said(self) -> bool:
        """Whether a reading was published since the start of this process."""
        return self._said is not None

    async def _waits(self, usage: UsageObserved) -> bool:
        """Whether this is a first reading without containers that would stand over what was said before the start."""
        if usage.containers_known or self.has_said or self._clock.monotonic() >= self._waits_until:
            return False
        if not self._has_former:
            try:
                self._has_former = await self._hub.last_position(Stream.NODES, wire.subject(usage)) > 0
            except Unavailable:
                return True  # a bus that cannot be asked does not take it either
        return self._has_former

    async def watch(self) -> None:
        """
        Checks the stream every `POLL_SECONDS` until cancelled; has the usage published again where it is not the
        newest.
        """
        while True:
            await self._clock.sleep(POLL_SECONDS)
            said = self._said
            if said is None:
                continue
            with suppress(Unavailable):
                position = await self._hub.last_position(Stream.NODES, wire.subject(said))
                if said is not self._ledger.state.usage:
                    continue
                if position < self._position:
                    self._ledger.hear(msgspec.structs.replace(said, revision=said.revision + 1))
                elif position > self._position:
                    self.announce()

    def announce(self) -> None:
        """Has the usage published under a new epoch, at most every `RENEW_SECONDS`; nothing where nothing was read."""
        usage = self._ledger.state.usage
        now = self._clock.monotonic()
        if usage is None or (self._renewed is not None and now < self._renewed + RENEW_SECONDS):
            return
        self._renewed = now
        epoch = max(int(self._clock.wall() * 1000), usage.epoch + 1)
        self._ledger.hear(msgspec.structs.replace(usage, epoch=epoch, revision=1))

    async def _say(self, usage: UsageObserved) -> bool:
        """Whether nothing more is to be done about it."""
        message = self._message(usage)
        if len(message.body) > wire.LARGEST_BODY:
            log.error("usage too large for the bus", containers=len(usage.containers), bytes=len(message.body))
        else:
            try:
                self._position = await self._publisher.publish(message)
            except Unavailable as error:
                log.debug("usage not said", finding=error.finding)
                return False
        self._said = usage
        return True

    def _message(self, usage: UsageObserved) -> Message:
        """
        What is said. Where all of it is more than a message holds, what the kubelet holds is left out, and that is said; the
        predictions of this node itself know all of it.
        """
        message = wire.encode_event(usage, self._clock.wall())
        size = len(message.body)
        had = self._shortened
        self._shortened = size > wire.LARGEST_BODY
        if not self._shortened:
            return message
        if not had:
            log.error("what predictions stand on is too large for the bus: listeners cannot predict", bytes=size)
        return wire.encode_event(without_details(usage, size), self._clock.wall())


def without_details(usage: UsageObserved, size: int) -> UsageObserved:
    """The same usage with the kubelet's rules, without what it holds, and with the reason. `size`: bytes of the whole."""
    if usage.kubelet is None:
        return usage
    why = f"what the kubelet holds is too much for one message: {size} bytes, and {wire.LARGEST_BODY} are the limit"
    had = usage.kubelet
    kubelet = KubeletObserved(version=had.version, rules=had.rules, record_doubt=had.record_doubt, unknown=why)
    return msgspec.structs.replace(usage, kubelet=kubelet)


def is_ours(hardware: Topology, resource: ResourceName, device: DeviceID) -> bool:
    """
    Whether a device id is of a card that this allocator keeps the record of: under a resource that is offered
    now, or, if it is a GPU, under any, for it may have been offered under another name before.
    """
    card = hardware.card_of(device)
    return card in hardware.gpu_by_id or (card in hardware.nic_by_id and resource in hardware.offers_of)


def usage_of_others(shown: Iterable[ContainerUsage], hardware: Topology) -> tuple[ContainerUsage, ...]:
    """CPUs, memory and foreign devices of all containers, sorted by owner; containers without any are left out."""
    containers = by_owner(shown)
    blocks = spread_memory_blocks([block for each in containers for block in each.memory], hardware)
    usage = [
        msgspec.structs.replace(
            each, memory=tuple(next(blocks) for _ in each.memory), devices=foreign(each.devices, hardware)
        )
        for each in containers
    ]
    return tuple(each for each in usage if each.cpus or each.memory or each.devices)


def by_owner(shown: Iterable[ContainerUsage]) -> list[ContainerUsage]:
    """One entry per owner, sorted: a pod that ends may be shown beside the one that replaces it under the same name."""
    found: dict[Owner, list[ContainerUsage]] = {}
    for each in shown:
        found.setdefault(each.owner, []).append(each)
    return [
        together(owner, found[owner])
        for owner in sorted(found, key=lambda owner: (owner.namespace, owner.pod, owner.container))
    ]


def together(owner: Owner, parts: Sequence[ContainerUsage]) -> ContainerUsage:
    """Joins several entries of one owner: all CPUs and devices of any of them, and all memory blocks."""
    devices: dict[ResourceName, set[DeviceID]] = {}
    for part in parts:
        for name, ids in part.devices.items():
            devices.setdefault(name, set()).update(ids)
    blocks = [block for part in parts for block in part.memory]
    return ContainerUsage(
        owner=owner,
        cpus=format_cpuset(cpu for part in parts for cpu in parse_cpuset(part.cpus)),
        memory=tuple(sorted(blocks, key=lambda block: (block.resource, block.nodes, block.size))),
        devices={name: tuple(sorted(ids)) for name, ids in devices.items()},
    )


def foreign(
    devices: dict[ResourceName, tuple[DeviceID, ...]], hardware: Topology
) -> dict[ResourceName, tuple[DeviceID, ...]]:
    """Those of the devices that are not ours (`is_ours`), by resource; resources without any are left out."""
    others = {name: tuple(d for d in ids if not is_ours(hardware, name, d)) for name, ids in devices.items()}
    return {name: ids for name, ids in others.items() if ids}
