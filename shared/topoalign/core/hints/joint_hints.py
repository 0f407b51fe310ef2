"""
Finds the NUMA nodes for pods whose GPUs and NICs are decided together, by Koordinator's annotations.

They are aligned so in mode `best`; a kubelet aligns each resource by itself (`admission.joint`). A set of NUMA
nodes is a hint only where the devices were really found, for a whole pod those of all its containers one after another. So
what a policy admits as aligned can be allocated, `SamePCIe` and required scopes included. Sets are tried one by one, the
small ones first, under one limit on work for all of them and all containers.
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
"""Sets of NUMA nodes that are named: as many as ten nodes have of which none holds another (Sperner)."""


def asked_for(state: NodeState, demand: ContainerDemand, chooser: Chooser | None = None) -> JointRequest:
    """What a container asks of the node as it is now, with what init containers of its pod left."""
    return put_demand_to_node(state, demand.joint or NO_JOINT_DEMAND, left_to(state, demand), chooser)


def left_to(state: NodeState, demand: Demand) -> LeftOver:
    """What init containers of the pod left to its other containers."""
    held = held_by_pod(state, demand)
    names = (GPU, NIC, *resources_in_units(state.hardware))
    devices = (reusable_devices(held, each, co_allocated=True) for each in names)
    return LeftOver(frozenset[DeviceID]().union(*devices), reusable_functions(held))


def is_held(state: NodeState, demand: ContainerDemand, held: Allocation) -> bool:
    """Whether an allocation is what a container of a pod with devices that are decided together asks for."""
    got = ContainerDevices(held.devices, held.virtual_functions)
    return holds_demanded(state, demand.joint or NO_JOINT_DEMAND, got)


def decided_together(state: NodeState, demand: ContainerDemand) -> frozenset[ResourceName]:
    """By which resources a container asks for what is decided together, and under which it holds that."""
    return RESOURCES | (resources_given(state.hardware, demand.joint) if demand.joint is not None else frozenset())


def joint_hints(asked: HintRequest) -> Hints:
    """
    The hints for all that a container, or the whole pod, asks for together: the same for each resource. Only sets that hold
    no smaller one are named, because mode `best` aligns to any set that holds a hint. With `compat` the whole machine has
    to do as well, as for Koordinator. Raises TooMuchWork as joint allocation does and where no set was found within the
    limit on work.
    """
    places = Places(asked)
    anywhere = places.fit(None)
    if not places.nodes or (places.compat and not anywhere):
        return None if anywhere else ()
    found = [*places.smallest()]
    least = min((mask.bit_count() for mask in found), default=0)
    return tuple(TopologyHint(mask, mask.bit_count() == least) for mask in found)


def check_anywhere(asked: HintRequest) -> None:
    """Raises DevicesDoNotFit where no NUMA nodes at all have devices as they are asked for, and TooMuchWork."""
    places = Places(asked)
    if places.containers and (places.compat or not any(places.smallest())):
        places.give(None)


def nodes_within(asked: HintRequest, affinity: Mask) -> Mask:
    """
    The NUMA nodes of an alignment on which the devices are found together: all of them, or else the smallest part. More
    nodes can spoil it: `ApplyForAll` then means more devices, and Koordinator's `SamePCIe` is not searched for. Where no
    part will do, the alignment as it is. Raises TooMuchWork.
    """
    places = Places(asked)
    if not places.containers or places.fit(affinity):
        return affinity
    return next(places.smallest(within=affinity), affinity)


class Places:
    """On which NUMA nodes the containers of a demand find their devices, decided one after another."""

    def __init__(self, asked: HintRequest) -> None:
        """`containers`: those of the demand that ask for devices together."""
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
        """What a container asks of the node in this state, under the limit on work for all of them."""
        return msgspec.structs.replace(asked_for(state, container), step=self.work.step)

    def give(self, mask: Mask | None) -> None:
        """Raises DevicesDoNotFit where not all of them find theirs there, and TooMuchWork."""
        state = self.state
        for container, asked in zip(self.containers, self.first, strict=True):
            if state is not self.state:
                asked = self.asked(state, container)
            self.work.step(len(asked.inventory.devices))
            given = joint_devices(asked, mask)
            if container is not self.containers[-1]:
                state = state.holding(allocation_for(container, given.devices, given.functions))

    def fit(self, mask: Mask | None) -> bool:
        """Whether all of them find their devices there. Raises TooMuchWork."""
        try:
            self.give(mask)
        except DevicesDoNotFit:
            return False
        return True

    def smallest(self, within: Mask = EVERYWHERE) -> Iterator[Mask]:
        """
        Sets of nodes that will do and hold no smaller one that does, the smallest first; single nodes only where the policy
        takes no others. At most MOST_FOUND, and fewer where the limit on work ends it. Raises TooMuchWork where it ends
        before there is one.
        """
        nodes = [node for node in self.nodes if within >> node & 1]
        most = 1 if self.single_node else len(nodes)
        found: list[Mask] = []
        try:
            for size in range(self.fewest_nodes(), most + 1):
                covered = True  # where each set of a size is or holds one that was found, so does each larger one
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
        """How many NUMA nodes have as many GPUs as the containers need at least; one more than there are: none have."""
        if any(
            asked.units is not None for asked in self.first
        ):  # of how many GPUs the parts are shows when they are chosen
            return 1
        counts = [asked.demand.gpu.count if asked.demand.gpu is not None else 0 for asked in self.first]
        together = sum(count for each, count in zip(self.containers, counts, strict=True) if each.role == "app")
        gpus = self.first[0].inventory.by_type[DeviceType.GPU]
        free: Mapping[int, int] = Counter(_numa_node_of_device(gpu) for gpu in gpus if not gpu.busy)
        still = max(together, *counts) - free.get(ANYWHERE, 0)
        there = [amount for node, amount in free.items() if node != ANYWHERE]
        return fewest_with(there, still) or len(there) + 1 if still > 0 else 1


def _numa_node_of_device(device: InventoryDevice) -> int:
    """The NUMA node of a device; ANYWHERE where it is not known."""
    return device.place.node if device.place is not None else ANYWHERE
