"""
The ListAndWatch response of one resource: all its devices, each with its health and its NUMA nodes, as bytes.

To the kubelet, each share of a GPU is a device. The generated code takes half a second to encode 17,500 devices, and
blocks the event loop for this time. All shares of a device have its NUMA nodes and its health, so this module encodes
them together. The encoded shares, 70 bytes each, are cached until the topology or the health of the device changes. An
allocation does not change them. They are concatenated when the response is sent.

Sources: the device plugin API v1beta1 (messages Device, TopologyInfo, NUMANode) and protobuf's wire format.
"""

from collections.abc import Callable, Mapping, Sequence

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
"""Number of devices checked, or shares encoded, before other tasks run: one or two milliseconds of work."""


class DeviceListing:
    """Creates the ListAndWatch responses of a resource; the same object is returned while nothing has changed."""

    def __init__(self, resource: ResourceName, faults: Callable[[], Mapping[DeviceID, str]] = dict) -> None:
        """`faults` returns devices that currently cannot be allocated, even if they are healthy."""
        self.resource = resource
        self._faults = faults
        self.response = EncodedDevices(())
        self._encoded: dict[DeviceID, tuple[str, bytes]] = {}
        """Device -> its health, and the encoded entries of the device or its shares."""
        self._topology: TopologyDiscovered | None = None
        """The topology for which the cached entries were encoded."""

    async def of(self, state: NodeState) -> "EncodedDevices":
        """The response for this state. Other tasks run meanwhile, so `state` may be outdated when this returns."""
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
                health = UNHEALTHY if base in faults else api_health(state, base)
                had = known.get(base)
                done += 1
                if base in differing and base not in faults:  # the health of individual shares can differ
                    parts += [
                        encode_device(share, api_health(state, share), listed[share])
                        for share in offer.handed_out(base)
                    ]
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
        # Held devices that are no longer offered are listed as unhealthy until they are released, so that the kubelet counts
        # them and does not allocate them again.
        parts += [encode_device(device, UNHEALTHY, None) for device in state.ownership.unlisted(self.resource)]
        if parts != self.response.parts:
            self.response = EncodedDevices(parts)
        self.response.parts = parts
        return self.response


class EncodedDevices(v1beta1.ListAndWatchResponse):
    """
    An encoded ListAndWatchResponse. It has no fields, because only its bytes are used, and because a subclass of a
    generated message cannot resolve field types.
    """

    parts: Sequence[bytes]
    """Encoded devices, one or more in each part."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.__dict__["parts"] = parts

    def SerializeToString(self) -> bytes:
        """The encoded bytes; betterproto2 calls this to send the message."""
        return b"".join(self.parts)


def api_health(state: NodeState, device: DeviceID) -> str:
    """
    The health of a device as a value of the API. Co-allocated devices are listed as unhealthy, because the kubelet does
    not count them as allocated and must not allocate them to other containers.
    """
    co_allocated = state.ownership.co_allocated
    if co_allocated and base_of(device) in co_allocated:
        return UNHEALTHY
    return HEALTHY if state.ownership.handed_out.listed_health_of(device).usable else UNHEALTHY


def encode_device(device: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes a device. If its NUMA nodes are unknown (None), it is listed without a topology: unknown is not node 0."""
    return field(1, field(1, device.encode()) + health_and_nodes(health, nodes))


def encoded_by(offer: Offer, base: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes a device of an offer, or all its shares, as `encode_device` does."""
    after = health_and_nodes(health, nodes)
    return b"".join([field(1, field(1, share.encode()) + after) for share in offer.handed_out(base)])


def health_and_nodes(health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes the fields of a device after its id."""
    topology = b"" if nodes is None else field(3, b"".join(field(1, number_field(1, node)) for node in nodes))
    return field(2, health.encode()) + topology
