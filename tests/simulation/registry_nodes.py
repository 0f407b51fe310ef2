"""
A node of the simulation of registries: the product's allocator, and a kubelet that asks it for GPUs and names no pod.

The kubelet takes a while to admit what is bound to it. It gives a pod what is reserved for any that asks for as many GPUs,
or aligns it anew, with GPUs that are reserved for nobody. What comes with GPUs the allocator decides. Its process may end:
the next one knows what is reserved.
"""

from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from device_allocations_support import start_allocations
from simulation.bus import happens
from simulation.world import Violation

from topoalign.allocator.allocate.co_allocation import CoAllocatedLacking
from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.ledger.ledger import Binding
from topoalign.allocator.ports import KubeletListing, ReportedDevices, ResourceEntry
from topoalign.core import wire
from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.deviceshare.node_inventory import locate_devices
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Stream

if TYPE_CHECKING:
    from simulation.registries import Cluster

ANEW = 0.3
"""How likely a kubelet aligns a pod anew where that is possible."""


class Node:
    """One node. `run` begins it."""

    def __init__(self, world: "Cluster", name: NodeName) -> None:
        self._world = world
        self.name = name
        self.ledger = world.site.ledgers[name]
        self.refused: list[str] = []
        """Pods that the kubelet refused although it need not."""
        self.lacking: list[str] = []
        """Pods that were refused because the kubelet took other GPUs for them than those with their NICs."""
        self.given: list[str] = []
        """Pods that got NICs with their GPUs."""
        self._life = anyio.CancelScope()
        self.start()

    @property
    def chance(self) -> Random:
        return self._world.chance

    def start(self) -> None:
        """The allocator begins anew."""
        world = self._world
        self._reservations = NodeReservationList(self.ledger, world.broker.bus, world.clock)
        self._allocations = start_allocations(
            self.ledger,
            Record(self),
            compat=world.rules.compat,
            reservations=self._reservations,
        )
        self._life.cancel()

    async def run(self) -> None:
        """Admits what is bound to the node, until cancelled."""
        known = set[str]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._live)
            while True:
                await anyio.sleep(self.chance.choice((0.2, 1.0, 5.0)))
                if happens(self._world.faults / 10, self.chance):
                    self.start()
                for pod in self._in_turn([*self._world.site.cluster.pods]):
                    uid = pod["metadata"]["uid"]
                    if pod["spec"].get("nodeName") == self.name and uid not in known:
                        known.add(uid)
                        await self._admit(pod, uid)

    def _in_turn(self, pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pods in the order in which the kubelet hears of them."""
        return pods

    async def reserved(self) -> tuple[Reservation, ...]:
        """What is reserved on the node, as the newest message says."""
        newest = await self._world.broker.bus.newest(Stream.RESERVATIONS, wire.reservation_subject(self.name))
        said = wire.decode_event(newest.message) if newest is not None else None
        return said.reservations if isinstance(said, ReservationsChanged) else ()

    async def _live(self) -> None:
        """Follows what is reserved on the node, each time that the allocator begins anew."""
        while True:
            with anyio.CancelScope() as self._life:
                await self._reservations.run()

    async def _admit(self, pod: dict[str, Any], uid: str) -> None:
        """The kubelet: it chooses GPUs, and the allocator says what comes with them."""
        name, is_joint = pod["metadata"]["name"], JOINT_ANNOTATION in pod["metadata"]["annotations"]
        said = await self.reserved()
        gpus = self._chosen(said, int(pod["spec"]["containers"][0]["resources"]["limits"][GPU]))
        if not gpus:
            self.refused.append(name)
            return
        try:
            (made,) = await self._allocations.allocate(GPU, [gpus])
        except CoAllocatedLacking:
            own = any(each.pod_uid == uid and gpus_of(each) == gpus for each in said)
            (self.refused if own or not is_joint else self.lacking).append(name)
            return
        owner = Owner(namespace=Namespace("ml"), pod=PodName(name), container=ContainerName("main"))
        self.ledger.bind([Binding(made.id, owner, uid)])
        if is_joint:
            self._check_beside(name, made)
            self.given.append(name)
        elif made.co_allocated:
            raise Violation("co_allocated", f"{name} has not asked for {made.co_allocated}")

    def _chosen(self, said: tuple[Reservation, ...], count: int) -> tuple[DeviceID, ...]:
        """The GPUs that a pod gets; none: it is refused."""
        state = self.ledger.state
        free = {each for each in state.healthy(GPU) if not state.ownership.is_held(each)}
        reserved = [gpus_of(each) for each in said]
        unreserved = sorted(free.difference(*reserved))
        if len(unreserved) >= count and happens(ANEW, self.chance):
            return tuple(unreserved[:count])
        fitting = [gpus for gpus in reserved if len(gpus) == count and free.issuperset(gpus)]
        if fitting:
            return self.chance.choice(fitting)
        spared = sorted(free, key=lambda gpu: (any(gpu in gpus for gpus in reserved), gpu))
        return tuple(spared[:count]) if len(free) >= count else ()

    def _check_beside(self, name: str, made: Allocation) -> None:
        places = locate_devices(self.ledger.state.hardware)
        beside = {places[nic].switch for nic in made.co_allocated}
        if apart := [gpu for gpu in made.devices[GPU] if places[gpu].switch not in beside]:
            raise Violation("apart", f"{name} has {apart} without a NIC beside: {made}")


class Record:
    """What the kubelet of a node says of its containers: what it has given, and nothing of what came with it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def written(self) -> tuple[int, ...]:
        return ()

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        await anyio.lowlevel.checkpoint()
        live = [each for each in self._node.ledger.state.allocations.values() if each.owner is not None]
        shown = [
            ReportedDevices(owner=each.owner, resource=resource, devices=frozenset(devices))
            for each in live
            for resource, devices in each.from_kubelet.items()
            if each.owner is not None
        ]
        return KubeletListing(
            kubelet=(1,),
            since=0.0,
            pods=len(live) + 1,
            holdings=tuple(shown),
            checkpoint=frozenset((each.resource, device) for each in shown for device in each.devices),
            parts=tuple(ResourceEntry(each.resource, each.devices) for each in shown),
        )


def devices_of(reservation: Reservation) -> list[DeviceID]:
    """All that a kubelet is to give a pod."""
    return [device for each in reservation.containers for ids in each.devices.values() for device in ids]


def gpus_of(reservation: Reservation) -> tuple[DeviceID, ...]:
    """All GPUs that are reserved for a pod."""
    return tuple(gpu for each in reservation.containers for gpu in each.devices.get(GPU, ()))


def co_allocated_of(reservation: Reservation) -> tuple[DeviceID, ...]:
    """All NICs that are reserved with the GPUs of a pod."""
    return tuple(nic for each in reservation.containers for nic in each.co_allocated.get(NIC, ()))
