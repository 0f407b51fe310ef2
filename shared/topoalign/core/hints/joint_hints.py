"""
Finds the NUMA nodes for pods whose GPUs and NICs are allocated together, by Koordinator's annotations.

This is how mode `best` aligns them. A kubelet aligns each resource separately (`admission.joint`). A set of NUMA nodes
is a hint only if the devices were found on it. For a whole pod, these are the devices of all its containers, one
container after another. So what a policy admits as aligned can be allocated, including `SamePCIe` and required scopes.
Sets are tried one by one, the smallest first. One limit on work applies to all sets and all containers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import comb

import msgspec

from topoalign.core.demand.pod_demand import ContainerDemand, Demand
from topoalign.core.demand.shares import resources_in_units
from topoalign.core.deviceshare.candidates import Chooser, JointRequest
from topoalign.core.deviceshare.demand import RESOURCES, JointDemand
from topoalign.core.deviceshare.inventory import ANYWHERE, InventoryDevice
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.node_devices import (
    ContainerDevices,
    holds_demanded,
    joint_devices,
    put_demand_to_node,
    resources_given,
)
from topoalign.core.deviceshare.node_inventory import LeftOver
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import allocation_for, held_by_pod, reusable_devices, reusable_functions
from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.events import Allocation
from topoalign.core.model.hints import Hints, TopologyHint
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, node_mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.numa_sets.subsets import fewest_with
from topoalign.core.policy import POLICIES
from topoalign.core.state.fold import NodeState

NO_JOINT_DEMAND = JointDemand()

MOST_FOUND = comb(10, 5)
"""The most sets of NUMA nodes in the hints. Of ten nodes, at most as many sets do not contain each other (Sperner)."""


def asked_for(state: NodeState, demand: ContainerDemand, chooser: Chooser | None = None) -> JointRequest:
    """The request of a container to the node in its current state, with what it can reuse from init containers."""
    return put_demand_to_node(state, demand.joint or NO_JOINT_DEMAND, left_to(state, demand), chooser)


def left_to(state: NodeState, demand: Demand) -> LeftOver:
    """What containers of the pod can reuse from its init containers."""
    held = held_by_pod(state, demand)
    names = (GPU, NIC, *resources_in_units(state.hardware))
    devices = (reusable_devices(held, each, co_allocated=True) for each in names)
    return LeftOver(frozenset[DeviceID]().union(*devices), reusable_functions(held))


def is_held(state: NodeState, demand: ContainerDemand, held: Allocation) -> bool:
    """Whether an allocation holds what a container requests, in a pod with devices that are allocated together."""
    got = ContainerDevices(held.devices, held.virtual_functions)
    return holds_demanded(state, demand.joint or NO_JOINT_DEMAND, got)


def decided_together(state: NodeState, demand: ContainerDemand) -> frozenset[ResourceName]:
    """The resources under which a container requests or holds devices that are allocated together."""
    return RESOURCES | (resources_given(state.hardware, demand.joint) if demand.joint is not None else frozenset())


def joint_hints(asked: HintRequest) -> Hints:
    """
    The hints for all devices that a container, or the whole pod, requests together. They are the same for each
    resource. Only minimal sets are hints, because mode `best` aligns to any set that contains a hint. With `compat`,
    the whole machine must be suitable as well, as for Koordinator. Raises TooMuchWork if joint allocation does, or if
    no set was found within the limit on work.
    """
    places = Places(asked)
    anywhere = places.fit(None)
    if not places.nodes or (places.compat and not anywhere):
        return None if anywhere else ()
    found = [*places.smallest()]
    least = min((mask.bit_count() for mask in found), default=0)
    return tuple(TopologyHint(mask, mask.bit_count() == least) for mask in found)


def check_anywhere(asked: HintRequest) -> None:
    """Raises DevicesDoNotFit if no set of NUMA nodes has the requested devices. Also raises TooMuchWork."""
    places = Places(asked)
    if places.containers and (places.compat or not any(places.smallest())):
        places.give(None)


def nodes_within(asked: HintRequest, affinity: Mask) -> Mask:
    """
    The NUMA nodes of an alignment on which the devices are found together: all of them if possible, else the smallest
    suitable subset. A larger set can be unsuitable although a subset is suitable: `ApplyForAll` then means more
    devices, and Koordinator does not search for `SamePCIe`. If no subset is suitable, the alignment is returned
    unchanged. Raises TooMuchWork.
    """
    places = Places(asked)
    if not places.containers or places.fit(affinity):
        return affinity
    return next(places.smallest(within=affinity), affinity)


class Places:
    """Finds the NUMA nodes with the devices for the containers of a demand, which are allocated one after another."""

    def __init__(self, asked: HintRequest) -> None:
        """`containers`: the containers of the demand that request devices together."""
        self.state = asked.state
        self.containers = [each for each in asked.demand.containers if each.together]
        self.compat = any(each.joint.compat for each in self.containers if each.joint is not None)
        self.single_node = POLICIES[asked.rules.policy].single_node
        self.work = NumaSearchBudget()
        self.first = [self.asked(self.state, each) for each in self.containers]
        """Each container as if it were the first one."""
        kinds = {kind for asked in self.first for kind in asked.demand.requests}
        devices = (device for asked in self.first for kind in kinds for device in asked.inventory.by_type[kind])
        self.nodes = sorted({_numa_node_of_device(device) for device in devices} - {ANYWHERE})

    def asked(self, state: NodeState, container: ContainerDemand) -> JointRequest:
        """The request of a container to the node in this state, under the common limit on work."""
        return msgspec.structs.replace(asked_for(state, container), step=self.work.step)

    def give(self, mask: Mask | None) -> None:
        """Allocates the devices of all containers there. Raises DevicesDoNotFit and TooMuchWork."""
        state = self.state
        for container, asked in zip(self.containers, self.first, strict=True):
            if state is not self.state:
                asked = self.asked(state, container)
            self.work.step(len(asked.inventory.devices))
            given = joint_devices(asked, mask)
            if container is not self.containers[-1]:
                state = state.holding(allocation_for(container, given.devices, given.functions))

    def fit(self, mask: Mask | None) -> bool:
        """Whether the devices of all containers fit there. Raises TooMuchWork."""
        try:
            self.give(mask)
        except DevicesDoNotFit:
            return False
        return True

    def smallest(self, within: Mask = EVERYWHERE) -> Iterator[Mask]:
        """
        Yields the minimal suitable sets of nodes, the smallest first. Yields only single nodes if the policy allows no
        others. Yields at most MOST_FOUND sets, and fewer if the limit on work is reached. Raises TooMuchWork if the
        limit is reached before a set is found.
        """
        nodes = [node for node in self.nodes if within >> node & 1]
        most = 1 if self.single_node else len(nodes)
        found: list[Mask] = []
        try:
            for size in range(self.fewest_nodes(), most + 1):
                covered = True  # if each set of a size contains a found set, so does each larger set
                for mask in map(node_mask, combinations(nodes, size)):
                    self.work.step(1 + len(found) // 8)
                    if any(not less & ~mask for less in found):
                        continue
                    if self.fit(mask):
                        found.append(mask)
                        yield mask
                        if len(found) == MOST_FOUND:
                            return
                    else:
                        covered = False
                if covered:
                    return
        except TooMuchWork:
            if not (found and self.work.ended):
                raise

    def fewest_nodes(self) -> int:
        """The fewest NUMA nodes with enough GPUs for the containers. If all have too few, one more than there are."""
        if any(
            asked.units is not None for asked in self.first
        ):  # how many GPUs the shares are on is known only when they are chosen
            return 1
        counts = [asked.demand.gpu.count if asked.demand.gpu is not None else 0 for asked in self.first]
        together = sum(count for each, count in zip(self.containers, counts, strict=True) if each.role == "app")
        gpus = self.first[0].inventory.by_type[DeviceType.GPU]
        free: Mapping[int, int] = Counter(_numa_node_of_device(gpu) for gpu in gpus if not gpu.busy)
        still = max(together, *counts) - free.get(ANYWHERE, 0)
        there = [amount for node, amount in free.items() if node != ANYWHERE]
        return fewest_with(there, still) or len(there) + 1 if still > 0 else 1


def _numa_node_of_device(device: InventoryDevice) -> int:
    """The NUMA node of a device, or ANYWHERE if it is unknown."""
    return device.place.node if device.place is not None else ANYWHERE
