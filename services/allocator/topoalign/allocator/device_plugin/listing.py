"""
What ListAndWatch says of one resource: all its devices, each with its health and its NUMA nodes, as bytes.

A GPU that is shared a few thousand ways is a few thousand devices to the kubelet, and a codec needs half a second for
17,500 of them, in which nothing else in this process gets its turn. But all shares of a device have its NUMA nodes and its
health, so they differ by a number only. The bytes of each device, all its shares together, are therefore made once when the
topology changes, for a healthy device and for one that is not; after a change of health they are only put together anew.

Sources: the device plugin API v1beta1 (messages Device, TopologyInfo, NUMANode) and protobuf's wire format.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from anyio.lowlevel import checkpoint

from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.holdings import SHARE, base_of, handed_out, is_share
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.plugin_api import HEALTHY, UNHEALTHY
from topoalign.kubelet.grpc.protobuf import field, number_field

SLICE = 500
"""Devices or shares after which others get their turn: a millisecond or two of work."""


class Encoded(NamedTuple):
    """A device of ours and all its shares, as they stand in a ListAndWatchResponse."""

    device: DeviceID
    healthy: bytes
    unhealthy: bytes


class Listing:
    """Makes the ListAndWatch responses of a resource; it is the same object again while nothing has changed."""

    def __init__(self, resource: ResourceName) -> None:
        self.resource = resource
        self.response = EncodedDevices(b"")
        self._prepared: tuple[TopologyDiscovered | None, list[Encoded]] = (None, [])

    async def of(self, state: NodeState) -> "EncodedDevices":
        """
        The response for this state. It yields to other tasks while it works: `state` may be an old one when it returns.
        """
        topology, devices = self._prepared
        if topology is not state.topology:
            devices = await prepared(state.hardware, self.resource)
            self._prepared = (state.topology, devices)
            await checkpoint()
        parts = []
        differing = {base_of(device) for device in state.told if is_share(device)}
        for i, each in enumerate(devices, 1):
            if each.device in differing:
                parts += shares_one_by_one(state, self.resource, each.device)
            else:
                parts.append(each.healthy if state.health_of(each.device).usable else each.unhealthy)
            if i % SLICE == 0:
                await checkpoint()
        parts += [encoded(device, 1, UNHEALTHY, None) for device in left_over(state, self.resource)]
        said = b"".join(parts)
        if said != self.response.encoded:
            self.response = EncodedDevices(said)
        return self.response


class EncodedDevices(v1beta1.ListAndWatchResponse):
    """
    A ListAndWatchResponse that is encoded already. It has no fields: a generated message that is subclassed elsewhere cannot
    resolve the types of its own, and only its bytes are used.
    """

    encoded: bytes

    def __init__(self, encoded: bytes) -> None:
        self.__dict__["encoded"] = encoded

    def SerializeToString(self) -> bytes:
        """The bytes that were encoded before; betterproto2 calls this to send the message."""
        return self.encoded


def shares_one_by_one(state: NodeState, resource: ResourceName, base: DeviceID) -> list[bytes]:
    """The encoded shares of a device, where the health of single shares is known and may differ."""
    replicas, listed = state.hardware.offer_by_base[base].replicas, state.hardware.devices[resource]
    return [
        encoded(share, 1, HEALTHY if state.health_of(share).usable else UNHEALTHY, listed[share])
        for share in handed_out(base, replicas)
    ]


def left_over(state: NodeState, resource: ResourceName) -> list[DeviceID]:
    """
    The ids that containers hold of a resource although they are offered no more: listed as unhealthy until it is
    released, so that the kubelet counts it and gives it to nobody else.
    """
    return state.ownership.unlisted(resource)


async def prepared(hardware: Topology, resource: ResourceName) -> list[Encoded]:
    """The encoded devices of a resource, in the order in which they are offered. It yields to other tasks while it works."""
    listed = hardware.devices.get(resource, {})
    devices: list[Encoded] = []
    unpaused = 0
    for offer in hardware.offers_of.get(resource, ()):
        for base in offer.devices:
            unpaused += offer.replicas
            if unpaused > SLICE:
                await checkpoint()
                unpaused = 0
            nodes = listed[next(handed_out(base, offer.replicas))]
            healthy, unhealthy = (encoded(base, offer.replicas, health, nodes) for health in (HEALTHY, UNHEALTHY))
            devices.append(Encoded(base, healthy, unhealthy))
    return devices


def encoded(base: DeviceID, replicas: int, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """
    Encodes a device, whole (`replicas` 1) or in shares. One whose NUMA node is unknown (None) is listed without a topology,
    because unknown is not node 0.
    """
    after = field(2, health.encode()) + (b"" if nodes is None else field(3, topology_info(nodes)))
    if replicas == 1:
        return field(1, field(1, base.encode()) + after)
    shares = []
    for _, numbers in groupby((b"%d" % n for n in range(replicas)), key=len):  # of equal length, so that lengths agree
        some = list(numbers)
        blank = (base + SHARE).encode()
        length = len(blank) + len(some[0])
        head = field(1, field(1, bytes(length)) + after)
        before = head[: -len(after) - length] + blank
        shares += [before, (after + before).join(some), after]
    return b"".join(shares)


def topology_info(nodes: Iterable[int]) -> bytes:
    """Encodes a TopologyInfo message with these NUMA nodes."""
    return b"".join(field(1, number_field(1, node)) for node in nodes)
