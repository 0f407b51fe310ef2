"""
Chooses the devices of a container that are chosen together (GPUs with NICs), and describes the chosen sets.

If the smallest scope with enough GPUs has several possible sets, the node's device policy chooses one. With `compat`,
Koordinator's rules do.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from topoalign.core.admission.alternatives import rank_alternatives
from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.deviceshare.candidates import DeviceCandidate, JointRequest
from topoalign.core.deviceshare.inventory import NodeInventory
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_same_pcie
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.node_devices import RESOURCE, ContainerDevices, joint_devices
from topoalign.core.hints.joint_hints import asked_for
from topoalign.core.model.decisions import Considered, PlacementContext
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Scope
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.device_choice import choose_for_container
from topoalign.core.placement.preference import prefer, prefer_gpus
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.sharing.choosers import gpus_given
from topoalign.core.state.fold import NodeState

CHOSEN = {
    GPU: "in the smallest part of the machine that has GPUs, and what goes with them, as the annotations ask",
    NIC: "nearest to the container's GPUs, of those that are as the annotations ask",
}
COMPAT = "as Koordinator chooses"


def place_jointly(
    state: NodeState, container: ContainerDemand, rules: AdmissionRules, affinity: Mask | None
) -> ContainerDevices:
    """Chooses the devices of a container on these NUMA nodes (None: any). Raises DevicesDoNotFit and TooMuchWork."""
    # In scope `pod`, GPUs are chosen by index, because its hints were computed that way.
    by_index = _follows_koordinator(container) or rules.scope is Scope.POD
    asked = asked_for(state, container, None if by_index else partial(_by_policy, state, rules.placement))
    # if these NUMA nodes do not suffice, a policy that admits unaligned pods takes devices of others
    return joint_devices(asked, affinity, spill=POLICIES[rules.policy].admits(NO_AFFINITY))


def _follows_koordinator(container: ContainerDemand) -> bool:
    return container.joint is not None and container.joint.compat


def _by_policy(state: NodeState, placement: str, gpus: Sequence[DeviceCandidate], count: int) -> list[DeviceCandidate]:
    """The GPUs that the device policy chooses among these. Those of earlier init containers come first."""
    by_id = {DeviceID(gpu.device.id): gpu for gpu in gpus}
    left = [device for device, gpu in by_id.items() if gpu.device.left]
    if by_id.keys() <= state.hardware.devices.get(GPU, NO_DEVICES).keys():
        context = PlacementContext(free=state.ownership.free(GPU))
        chosen = prefer(state.hardware, GPU, tuple(by_id), left[:count], count, placement, context=context)
    else:  # they are offered in units
        unused = tuple(gpu for gpu, units in state.ownership.units_left.items() if units.unused)
        chosen = prefer_gpus(
            state.hardware, tuple(by_id), left[:count], count, placement, PlacementContext(free=unused)
        )
    return [by_id[device] for device in chosen]


def describe_joint_devices(
    topology: Topology, container: ContainerDemand, got: ContainerDevices
) -> Iterator[Considered]:
    """The sets allocated to a container, with the reason for each choice. Other sets are not compared."""
    for resource, chosen in got.devices.items():
        near = gpus_given(topology, got.devices) if resource == NIC else ()
        for each in rank_alternatives(topology, resource, chosen, None, chosen, near, ""):
            yield msgspec.structs.replace(each, why=COMPAT if _follows_koordinator(container) else CHOSEN[resource])


# The devices of a container that are chosen together within the alignment of a kubelet.
#
# A kubelet aligns each resource separately, by amounts alone. Then it asks the resource's device plugin which devices
# to allocate. So GPUs and NICs are chosen together among those that the kubelet can allocate, and its plugins return
# that choice (`placement.reserved_choice`). NICs beyond the limits are co-allocated with the GPUs. They are on the NUMA
# nodes of the alignment, and on others only if the policy admits unaligned pods.
#
#     4 GPUs and 1 NIC in the limits, SamePCIe, aligned to NUMA node 0 with four switches, each with 2 GPUs and 2 NICs
#     the kubelet can take any 4 of 8 GPUs and any 1 of 8 NICs; chosen: GPU-0 to GPU-3, mlx5_0, and co-allocated mlx5_2
#
# If the kubelet always takes some devices, such as those of earlier init containers, the set that the device policy
# prefers with these is also tried.


Limits = Mapping[DeviceType, Collection[DeviceID]]
"""Type -> the devices of it that can be chosen. A type that is absent is not limited."""


class Bounds(NamedTuple):
    """Which devices of one resource a kubelet can allocate to a container."""

    amount: int
    fixed: tuple[DeviceID, ...]
    """The devices that it always allocates."""
    choice: tuple[DeviceID, ...]
    """The devices among which it chooses the others."""

    @property
    def allowed(self) -> frozenset[DeviceID]:
        """All devices that it can allocate."""
        return frozenset((*self.fixed, *self.choice))

    def taken(self, chosen: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """The chosen devices, up to `amount`. (): it would also allocate devices that are not chosen."""
        some = [device for device in (*self.fixed, *self.choice) if device in chosen]
        return tuple(some[: self.amount]) if len(some) >= self.amount and {*self.fixed} <= {*chosen} else ()


def place_within(
    state: NodeState, container: ContainerDemand, rules: AdmissionRules, affinity: Mask | None
) -> ContainerDevices:
    """The devices of a container that its kubelet has aligned to these NUMA nodes. Raises the kubelet's refusal."""
    bounds = {
        name: _bounds_of(state, container, name, affinity)
        for name in (GPU, NIC)
        if container.devices.get(name) and name in state.hardware.devices
    }
    spills = affinity is not None and POLICIES[rules.policy].admits(NO_AFFINITY)
    return place_among(state, container, rules, bounds, (affinity, None) if spills else (affinity,))


def place_among(
    state: NodeState,
    container: ContainerDemand,
    rules: AdmissionRules,
    bounds: Mapping[ResourceName, Bounds],
    affinities: Sequence[Mask | None],
) -> ContainerDevices:
    """`place_within` with these bounds, on the first of these sets of NUMA nodes (None: any) that suffices."""
    asked = asked_for(state, container, partial(_by_policy, state, rules.placement))
    misfit = refuse_same_pcie()
    for nodes in affinities:
        for limits in _iterate_limits(state, bounds, rules):
            try:
                found = joint_devices(_limit_to_devices(asked, limits), nodes)
            except DevicesDoNotFit as error:
                misfit = error
                continue
            given = _split_co_allocated(state, bounds, found)
            if given is not None:
                return given
    raise misfit


def _bounds_of(state: NodeState, container: ContainerDemand, resource: ResourceName, affinity: Mask | None) -> Bounds:
    """Which devices of a resource the kubelet can allocate. Raises its refusal of the container."""
    choice = choose_for_container(state, container, resource, affinity)
    must = choice.must_include
    return Bounds(choice.size, must, tuple(device for device in choice.available if device not in must))


def _iterate_limits(state: NodeState, bounds: Mapping[ResourceName, Bounds], rules: AdmissionRules) -> Iterator[Limits]:
    """The limits to try, in order: on the GPUs alone, then on the NICs as well."""
    for gpus in _sets_of(state, GPU, bounds, rules) or (None,):
        limits: dict[DeviceType, Collection[DeviceID]] = {} if gpus is None else {DeviceType.GPU: gpus}
        yield limits
        for nics in _sets_of(state, NIC, bounds, rules):
            yield {**limits, DeviceType.RDMA: nics}


def _sets_of(
    state: NodeState, resource: ResourceName, bounds: Mapping[ResourceName, Bounds], rules: AdmissionRules
) -> list[Collection[DeviceID]]:
    """All devices of a resource that the kubelet can allocate. If some are fixed: also the preferred set with them."""
    if resource not in bounds:
        return []
    amount, fixed, choice = bounds[resource]
    allowed = bounds[resource].allowed
    if not fixed or not choice:
        return [allowed]
    among = state.hardware.devices[resource].some(allowed)
    preferred = prefer(state.hardware, resource, among, fixed, amount, rules.placement)
    return [allowed, preferred or (*fixed, *choice[: amount - len(fixed)])]  # a static policy can have no preference


def _limit_to_devices(asked: JointRequest, limits: Limits) -> JointRequest:
    devices = tuple(
        each
        if each.kind not in limits or each.id in limits[each.kind]
        else msgspec.structs.replace(each, healthy=False)
        for each in asked.inventory.devices
    )
    had = asked.inventory
    inventory = NodeInventory(devices=devices, table=had.table)
    return msgspec.structs.replace(asked, inventory=inventory)


def _split_co_allocated(
    state: NodeState, bounds: Mapping[ResourceName, Bounds], found: ContainerDevices
) -> ContainerDevices | None:
    """Separates the co-allocated devices, beyond the limits. None: the kubelet would allocate other devices."""
    devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
    co_allocated: list[DeviceID] = []
    for resource in RESOURCE.values():
        chosen = found.devices.get(resource, ())
        limit = bounds.get(resource)
        listed = state.hardware.devices.get(resource, NO_DEVICES)
        taken = tuple(listed.some(limit.taken(chosen))) if limit is not None else ()
        if limit is not None and not taken:
            return None
        added = tuple(device for device in chosen if device not in taken) if GPU in bounds else ()
        if taken or added:
            devices[resource] = (*taken, *added)
        co_allocated += added
    functions = {nic: some for nic, some in found.functions.items() if nic in co_allocated}
    return ContainerDevices(devices, functions, tuple(co_allocated))
