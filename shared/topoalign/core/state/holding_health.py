"""
Derives the health of everything that is handed out: whole GPUs, time slices, MIG instances and virtual functions.

`HandedOut.health_of` is the only function that derives it. Facts report the health of GPUs and of single unhealthy MIG
instances; a kubelet's files also report that of single shares. The health of a device is the worst one that is reported
for the device, for its base (the id without the number of a share), and for its GPU. For a GPU, the health of its
instances also counts, unless these are handed out themselves. Without a report, the health of a device is unknown, and
the device is not usable.

    reported {GPU-0: healthy, MIG-1 (of GPU-0): unhealthy}; offered MIG-0 and MIG-1: MIG-0::2 healthy, MIG-1::0
    unhealthy, GPU-0 healthy; offered GPU-0 as a whole: unhealthy
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.holdings import base_of, is_share_id
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology

UNKNOWN = DeviceHealth(state=HealthState.UNKNOWN, reason="not judged yet")

BLOCKED = DeviceHealth(
    state=HealthState.UNHEALTHY, reason="held by an allocation from before it was divided as it is offered now"
)


SPENT = DeviceHealth(
    state=HealthState.UNHEALTHY, reason="all computing time or all memory of its GPU is held: nothing is left of it"
)


BADNESS = (HealthState.HEALTHY, HealthState.UNKNOWN, HealthState.UNHEALTHY)


class HandedOut:
    """The health of all devices that a node hands out, at one time. It is computed once for all shares of a device."""

    def __init__(
        self,
        topology: Topology,
        reported_health: Mapping[DeviceID, DeviceHealth],
        blocked: Collection[DeviceID] = (),
        spent: Mapping[ResourceName, DeviceSet] = {},
    ) -> None:
        """
        `blocked`: bases that cannot be allocated before an allocation of a former offer ends (`Ownership.blocked`).
        `spent`: resource -> units and slots that no container holds, on GPUs without free capacity
        (`Ownership.spent_gpus`).
        """
        self._topology = topology
        self._reported = reported_health
        self._blocked = blocked
        self._spent = spent
        self._instances: dict[DeviceID, list[DeviceHealth]] = {}
        for device, health in reported_health.items():
            gpu = topology.parents.get(device)
            alone = device in topology.offers_by_base and device not in blocked
            if gpu is not None and not alone:  # blocked: a container may still hold the whole GPU
                self._instances.setdefault(gpu, []).append(health)
        self._bases: dict[DeviceID, DeviceHealth] = {}
        self._usable: dict[ResourceName, DeviceSet] = {}

    def health_of(self, device: DeviceID) -> DeviceHealth:
        """The health of a GPU, share, MIG instance or virtual function: the worst reported for it, its base or GPU."""
        base = base_of(device)
        if base in self._blocked:
            return BLOCKED
        if device != base and device in self._reported:
            return self._worst_reported(device, base)
        known = self._bases.get(base)
        if known is None:
            known = self._bases[base] = self._worst_reported(base)
        return known

    def listed_health_of(self, device: DeviceID) -> DeviceHealth:
        """The health that a kubelet gets. Free units and slots are unhealthy if their GPU has no free capacity."""
        if any(device in shares for shares in self._spent.values()):
            return SPENT
        return self.health_of(device)

    def healthy(self, resource: ResourceName) -> DeviceSet:
        """The devices of a resource that are listed as healthy, held or not."""
        usable = self.usable(resource)
        return usable - self._spent[resource] if resource in self._spent else usable

    def usable(self, resource: ResourceName) -> DeviceSet:
        """The devices of a resource whose health is usable (`health_of`), even if their GPU has no free capacity."""
        if resource not in self._usable:
            devices = self._topology.devices.get(resource, NO_DEVICES)
            found = devices.nothing
            for base, shares in devices.by_base.items():
                if self.health_of(base).usable:
                    found |= shares
            if shares_reported := [device for device in self._reported if is_share_id(device)]:
                apart = devices.some(shares_reported)
                good = devices.some(device for device in apart if self.health_of(device).usable)
                found = found - apart | good
            self._usable[resource] = found
        return self._usable[resource]

    def _worst_reported(self, *names: DeviceID) -> DeviceHealth:
        """`names`: a device, or a share and then its base."""
        base = names[-1]
        gpu = self._topology.parents.get(base, base)
        ways = names if gpu in names else (*names, gpu)
        reported_health = [self._reported[name] for name in ways if name in self._reported]
        return worst([*reported_health, *self._instances.get(base, ())]) if reported_health else UNKNOWN


def worst(healths: Sequence[DeviceHealth]) -> DeviceHealth:
    """The worst of several healths of one device and its GPU, with its reason; cordoned if any of them is."""
    if len(healths) == 1:
        return healths[0]
    found = max(reversed(healths), key=lambda health: (BADNESS.index(health.state), bool(health.reason)))
    cordoned = any(health.cordoned for health in healths)
    return found if found.cordoned == cordoned else msgspec.structs.replace(found, cordoned=cordoned)
