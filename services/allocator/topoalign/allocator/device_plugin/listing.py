"""
The ListAndWatch response of one resource: all its devices, each with its health and its NUMA nodes, as bytes.

A GPU with a few thousand shares is a few thousand devices to the kubelet, and the generated code needs half a second for
17,500 of them, in which no other task of this process runs. But all shares of a device have its NUMA nodes and its health,
so they are encoded here together. They are kept, 70 bytes per share, until the topology or the health of the device changes;
a grant does not change them. They are joined only when they are sent.

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
"""Devices that are checked and shares that are encoded before other tasks run: a millisecond or two of work."""


class DeviceListing:
    """Creates the ListAndWatch responses of a resource; the same object is returned while nothing has changed."""

    def __init__(self, resource: ResourceName, faults: Callable[[], Mapping[DeviceID, str]] = dict) -> None:
        """`faults`: the devices of which nothing can be allocated now, whatever their health is."""
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
                health = UNHEALTHY if base in faults else api_health(state, base)
                had = known.get(base)
                done += 1
                if base in differing and base not in faults:  # the health of single shares is known and may differ
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
        # What containers hold although it is no longer offered is listed as unhealthy until it is released, so that the
        # kubelet counts it and allocates it to no other container.
        parts += [encode_device(device, UNHEALTHY, None) for device in state.ownership.unlisted(self.resource)]
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


def api_health(state: NodeState, device: DeviceID) -> str:
    """
    The health of a device as the API names it. Devices that a container has in addition to its GPUs, without the kubelet's
    knowledge, are listed as unhealthy, so that the kubelet allocates them to no other container.
    """
    co_allocated = state.ownership.co_allocated
    if co_allocated and base_of(device) in co_allocated:
        return UNHEALTHY
    return HEALTHY if state.ownership.handed_out.listed_health_of(device).usable else UNHEALTHY


def encode_device(device: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """
    Encodes a device. One whose NUMA node is unknown (None) is listed without a topology, because unknown is not node 0.
    """
    return field(1, field(1, device.encode()) + health_and_nodes(health, nodes))


def encoded_by(offer: Offer, base: DeviceID, health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes a device of an offer, whole or as all its shares; otherwise as `encode_device`."""
    after = health_and_nodes(health, nodes)
    return b"".join([field(1, field(1, share.encode()) + after) for share in offer.handed_out(base)])


def health_and_nodes(health: str, nodes: tuple[int, ...] | None) -> bytes:
    """Encodes the fields of a device after its id."""
    topology = b"" if nodes is None else field(3, b"".join(field(1, number_field(1, node)) for node in nodes))
    return field(2, health.encode()) + topology
