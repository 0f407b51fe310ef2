"""
What ListAndWatch says of one resource: all its devices, each with its health and its NUMA nodes, as bytes.

A GPU that is shared a few thousand ways is a few thousand devices to the kubelet, and a codec needs half a second for
17,500 of them, in which nothing else in this process gets its turn. But all shares of a device have its NUMA nodes and its
health, so they differ by a number only, and their bytes are made together from one template. They are kept, 70 bytes a
share, until the topology or the health of the device changes; a grant makes none anew. They are joined only when they are
sent.

Sources: the device plugin API v1beta1 (messages Device, TopologyInfo, NUMANode) and protobuf's wire format.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from anyio.lowlevel import checkpoint

from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.holdings import SHARE, base_of, handed_out, is_share
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.plugin_api import HEALTHY, UNHEALTHY
from topoalign.kubelet.grpc.protobuf import field, number_field

SLICE = 500
"""Devices that are judged and shares that are encoded before others get their turn: a millisecond or two of work."""


class Listing:
    """Makes the ListAndWatch responses of a resource; it is the same object again while nothing has changed."""

    def __init__(self, resource: ResourceName) -> None:
        self.resource = resource
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
            self._topology, self._encoded = state.topology, {}
        known, listed = self._encoded, state.hardware.devices.get(self.resource, NO_DEVICES)
        differing = {base_of(device) for device in state.told if is_share(device)}
        parts: list[bytes] = []
        done = 0
        for offer in state.hardware.offers_of.get(self.resource, ()):
            for base in offer.devices:
                health, had = health_of(state, base), known.get(base)
                done += 1
                if base in differing:
                    parts += shares_one_by_one(state, self.resource, base)
                elif had is not None and had[0] == health:
                    parts.append(had[1])
                else:
                    nodes = listed[next(handed_out(base, offer.replicas))]
                    parts.append(encoded(base, offer.replicas, health, nodes))
                    known[base] = health, parts[-1]
                    done += offer.replicas
                if done >= SLICE:
                    await checkpoint()
                    done = 0
        parts += [encoded(device, 1, UNHEALTHY, None) for device in left_over(state, self.resource)]
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
    companions = state.ownership.companions
    if companions and base_of(device) in companions:
        return UNHEALTHY
    return HEALTHY if state.health_of(device).usable else UNHEALTHY


def shares_one_by_one(state: NodeState, resource: ResourceName, base: DeviceID) -> list[bytes]:
    """The encoded shares of a device, where the health of single shares is known and may differ."""
    replicas, listed = state.hardware.offer_by_base[base].replicas, state.hardware.devices[resource]
    return [encoded(share, 1, health_of(state, share), listed[share]) for share in handed_out(base, replicas)]


def left_over(state: NodeState, resource: ResourceName) -> list[DeviceID]:
    """
    The ids that containers hold of a resource although they are offered no more: listed as unhealthy until it is
    released, so that the kubelet counts it and gives it to nobody else.
    """
    return state.ownership.unlisted(resource)


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
