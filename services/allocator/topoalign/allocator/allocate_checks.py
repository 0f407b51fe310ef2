"""
Whether what a kubelet asks for in Allocate can be given at all, whoever holds it.

Devices have to be listed under the resource, healthy and not cordoned, and no more than a container may have of shares.
"""

from collections import Counter

from topoalign.allocator.ports import AskedDevices
from topoalign.core.model.errors import DeviceUnusable, HardwareUnknown, InvalidField, UnknownDevice, quoted
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.state.fold import NodeState

MOST_DEVICES = 20_000
"""Of one Allocate call: more than any node lists."""


def check_allocate(state: NodeState, resource: ResourceName, containers: AskedDevices) -> list[DeviceSet]:
    """
    The devices of one Allocate call, by containers, as sets. Raises InvalidField, HardwareUnknown, UnknownDevice and
    DeviceUnusable.
    """
    asked = [device for devices in containers for device in devices]
    if not containers or not all(containers):
        raise InvalidField("devices_ids", "empty", "the kubelet asks for at least one device")
    if len(asked) > MOST_DEVICES:
        raise InvalidField("devices_ids", f"{len(asked)} devices", f"no node has more than {MOST_DEVICES}")
    if len({*asked}) < len(asked):
        repeated = [device for device, times in Counter(asked).items() if times > 1]
        raise InvalidField("devices_ids", f"named more than once: {quoted(repeated)}", "name each device once")
    if state.topology is None or state.health is None:
        raise HardwareUnknown(state.node, "discovery has not been heard")
    known = state.hardware.devices.get(resource, NO_DEVICES)
    sets = [*map(known.some, containers)]
    if sum(map(len, sets)) < len(asked):
        raise UnknownDevice([device for device in asked if device not in known])
    usable = state.ownership.handed_out.usable(resource)
    if any(each - usable for each in sets):
        device = next(device for device in asked if device not in usable)
        health = state.health_of(device)
        raise DeviceUnusable(device, "cordoned" if health.cordoned else health.state, health.reason)
    return sets


def check_amount(state: NodeState, resource: ResourceName, amount: int) -> None:
    """Raises InvalidField for more devices of a resource than its offer allows one container."""
    offers = state.hardware.offers_of.get(resource, ())
    most = min((offer.most for offer in offers if offer.most is not None), default=None)
    if most is not None and amount > most:
        raise InvalidField(
            "devices_ids",
            f"{amount} of {resource}, of which a container may have {most}",
            f"let the pod ask for {most}: more shares are no more of a GPU (failRequestsGreaterThanOne)",
        )
