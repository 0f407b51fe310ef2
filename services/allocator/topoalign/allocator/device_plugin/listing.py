"""
What ListAndWatch says of one resource: all its devices, each with its health and its NUMA nodes, as bytes.

A GPU that is shared a few thousand ways is a few thousand devices to the kubelet, and a codec needs half a second for
17,500 of them, in which nothing else in this process gets its turn. But all shares of a device have its NUMA nodes and its
health, so they differ by a number only, and their bytes are made together from one template. They are kept, 70 bytes a
share, until the topology or the health of the device changes; a grant makes none anew. They are joined only when they are
sent.

Sources: the device plugin API v1beta1 (messages Device, TopologyInfo, NUMANode) and protobuf's wire format.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from anyio.lowlevel import checkpoint

from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.holdings import base_of, is_share_id
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import field, number_field
from topoalign.kubelet.grpc.plugin_api import HEALTHY, UNHEALTHY

SLICE = 500
"""Devices that are judged and shares that are encoded before others get their turn: a millisecond or two of work."""


class Listing:
    """Makes the ListAndWatch responses of a resource; it is the same object again while nothing has changed."""

    def __init__(self, resource: ResourceName, faults: Callable[[], Mapping[DeviceID, str]] = dict) -> None:
        """`faults`: the devices of which nothing can be given now, whatever their health is."""
        self.resource = resource
        self._faults = faults
        self.response = EncodedDevices(())
        self._encoded: dict[DeviceID, tuple[str, bytes]] = {}
        """Device -> its health, and itself and all its shares as they stand in the response."""
        self._topology: TopologyDiscovered | None = None
        """What this is of."""

    async def of(self, state: NodeState) -> "EncodedDevices":
        """
        The response for this state. It yields to other tasks while it works: `state` may be an old one when it returns.
        """
        if self._topology is not state.topology:
            self._topology = state.topology
            self._encoded = {}
        known = self._encoded
        listed = state.hardware.devices.get(self.resource, NO_DEVICES)
        differing = {
            base_of(device) for device in state.reported_health if is_share_id(device)
        } | state.ownership.spent_gpus
        faults = self._faults()
        parts = list[bytes]()
        done = 0
        for offer in state.hardware.offers_of.get(self.resource, ()):
            for base in offer.devices:
                health = UNHEALTHY if base in faults else health_of(state, base)
                had = known.get(base)
                done += 1
                if base in differing and base not in faults:
                    parts += shares_one_by_one(state, offer, base)
                elif had is not None and had[0] == health:
                    parts.append(had[1])
                else:
                    nodes = listed[next(offer.handed_out(base))]
                    parts.append(encoded_by(offer, base, health, nodes))
                    known[base] = health, parts[-1]
                    done += offer.replicas
                if done >= SLICE:
                    await checkpoint()
                    done = 0
        parts += [encoded(device, UNHEALTHY, None) for device in left_over(state, self.resource)]
        if parts != self.response.parts:
            self.response = EncodedDevices(parts)
        self.response.parts = parts
        return self.response


class EncodedDevices(v1beta1.ListAndWatchResponse):
    """
    A ListAndWatchResponse that is encoded already. It has no fields: a generated message that is subclassed elsewhere cannot
    resolve the types of its own, and only its bytes are used.
    """

    parts: Sequence[bytes]
    """Encoded devices, one or more in each part."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.__dict__["parts"] = parts

    def SerializeToString(self) -> bytes:
        """The bytes that were encoded before; betterproto2 calls this to send the message."""
        return b"".join(self.parts)


def health_of(state: NodeState, device: DeviceID) -> str:
    """
    The health of a device in the words of the API. What a container has beside its GPUs, without the kubelet's knowledge, is
    listed as unhealthy, so that the kubelet gives it to nobody else.
    """
    co_allocated = state.ownership.co_allocated
    if co_allocated and base_of(device) in co_allocated:
        return UNHEALTHY
    return HEALTHY if state.ownership.handed_out.listed_health_of(device).usable else UNHEALTHY


def shares_one_by_one(state: NodeState, offer: Offer, base: DeviceID) -> list[bytes]:
    """The encoded shares of a device, where the health of single shares is known and may differ."""
    listed = state.hardware.devices[offer.resource]
    return [encoded(share, health_of(state, share), listed[share]) for share in offer.handed_out(base)]


def left_over(state: NodeState, resource: ResourceName) -> list[DeviceID]:
    """
    The ids that containers hold of a resource although they are offered no more: listed as unhealthy until it is
    released, so that the kubelet counts it and gives it to nobody else.
    """
    return state.ownership.unlisted(resource)


def encoded(device: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """
    Encodes a device. One whose NUMA node is unknown (None) is listed without a topology, because unknown is not node 0.
    """
    return field(1, field(1, device.encode()) + health_and_nodes(health, nodes))


def encoded_by(offer: Offer, base: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes a device of an offer, whole or as all its shares; otherwise as `encoded`."""
    if not offer.shared:
        return encoded(base, health, nodes)
    after = health_and_nodes(health, nodes)
    shares = []
    for length, names in groupby((share.encode() for share in offer.handed_out(base)), key=len):
        before = field(1, field(1, bytes(length)) + after)[: -len(after) - length]  # tells lengths, and so is the same
        shares += [before, (after + before).join(names), after]
    return b"".join(shares)


def health_and_nodes(health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes the fields of a device after its id."""
    return field(2, health.encode()) + (b"" if nodes is None else field(3, topology_info(nodes)))


def topology_info(nodes: Iterable[int]) -> bytes:
    """Encodes a TopologyInfo message with these NUMA nodes."""
    return b"".join(field(1, number_field(1, node)) for node in nodes)
