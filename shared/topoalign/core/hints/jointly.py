"""
Pods whose GPUs and NICs are decided together, by Koordinator's annotations: what is asked, and on which NUMA nodes it fits.

They are decided so in mode `best`; the kubelet does not look at annotations. A set of NUMA nodes is a hint only where the
devices were really found, for a whole pod those of all its containers one after another. So what a policy admits as aligned
can be allocated, `SamePCIe` and required scopes included.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations, islice

from topoalign.core.errors import TooMuchWork
from topoalign.core.events import Allocation
from topoalign.core.hints.model import Hints, TopologyHint
from topoalign.core.hints.requested import device_limits
from topoalign.core.hints.reuse import allocations_of, held_by, reusable_devices, reusable_functions
from topoalign.core.hints.rules import EVERYWHERE
from topoalign.core.ids import GPU, NIC, ContainerName, ResourceName
from topoalign.core.joint.candidates import Asked, Chooser
from topoalign.core.joint.demand import Demand
from topoalign.core.joint.inventory import ANYWHERE, Device
from topoalign.core.joint.names import DeviceType
from topoalign.core.joint.node_devices import (
    RESOURCES,
    ContainerDevices,
    asked_of,
    check_keys,
    check_whole,
    container_demand,
    holds,
    is_joint,
    joint_devices,
)
from topoalign.core.joint.node_inventory import LeftOver
from topoalign.core.joint.refusals import DevicesDoNotFit
from topoalign.core.requests import AdmissionRules, ContainerRequest, Mode, PodRequest
from topoalign.core.state import NodeState
from topoalign.core.topology.bitmask import Mask, mask_of

MOST_NODES = 10
MOST_TRIED = (1 << MOST_NODES) - 1
"""Sets of NUMA nodes on which the devices are looked for: all that ten nodes have."""


def decided_jointly(pod: PodRequest, rules: AdmissionRules) -> bool:
    return rules.mode is Mode.BEST and is_joint(pod.annotations)


def joint_part(container: ContainerRequest) -> dict[ResourceName, int]:
    """What a container of such a pod asks for jointly."""
    return {name: amount for name, amount in device_limits(container).items() if name in RESOURCES and amount}


def check_annotations(pod: PodRequest, rules: AdmissionRules) -> None:
    """Raises InvalidField for annotations, and for requests beside them, that cannot be meant; the kubelet reads none."""
    if rules.mode is Mode.BEST:
        check_keys(pod.annotations)
    for container in joint_containers(pod, rules):
        demand_of(pod, container, rules)


def check_shares(pod: PodRequest, rules: AdmissionRules) -> None:
    """Raises SharesRefused where a part of a GPU is asked for."""
    for container in joint_containers(pod, rules):
        check_whole(demand_of(pod, container, rules))


def joint_containers(pod: PodRequest, rules: AdmissionRules) -> tuple[ContainerRequest, ...]:
    """The containers that ask for devices that are decided jointly, in the order in which they are decided."""
    if not decided_jointly(pod, rules):
        return ()
    return tuple(each for each in (*pod.init_containers, *pod.containers) if joint_part(each))


def demand_of(pod: PodRequest, container: ContainerRequest, rules: AdmissionRules) -> Demand:
    """Raises InvalidField."""
    return container_demand(pod.annotations, joint_part(container), compat=rules.compat == "koordinator")


def asked_for(
    state: NodeState,
    pod: PodRequest,
    container: ContainerRequest,
    rules: AdmissionRules,
    chooser: Chooser | None = None,
) -> Asked:
    """What a container asks of the node as it is now, with what init containers of its pod left. Raises InvalidField."""
    return asked_of(state, demand_of(pod, container, rules), left_to(state, pod), chooser)


def left_to(state: NodeState, pod: PodRequest) -> LeftOver:
    held = allocations_of(state, pod)
    return LeftOver(reusable_devices(held, GPU) | reusable_devices(held, NIC), reusable_functions(held))


def is_held(
    state: NodeState, pod: PodRequest, container: ContainerRequest, rules: AdmissionRules, held: Allocation
) -> bool:
    """Whether an allocation is what a container of a pod that is decided jointly asks for. Raises InvalidField."""
    return holds(state, demand_of(pod, container, rules), ContainerDevices(held.devices, held.virtual_functions))


def joint_hints(state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules) -> Hints:
    """
    The hints for all that a container, or the whole pod, asks for jointly: they are the same for each resource.

    Only sets that hold no smaller one are named, because mode `best` aligns to any set that holds a hint. With `compat` the
    whole machine has to do as well, as for Koordinator. Raises InvalidField, TooMuchWork as joint allocation does, and where
    no set is found among `MOST_TRIED`.
    """
    places = places_of_pod(state, pod, container, rules)
    anywhere = places.fit(None)
    if not places.nodes or (rules.compat and not anywhere):
        return None if anywhere else ()
    found = places.smallest()
    if not found and anywhere and len(places.nodes) > MOST_NODES:
        raise TooMuchWork(
            f"hints for devices on {len(places.nodes)} NUMA nodes: none found among {MOST_TRIED} sets of them",
            f"ask for other numbers, use policy none, or a machine with devices on at most {MOST_NODES} NUMA nodes",
        )
    least = min((mask.bit_count() for mask in found), default=0)
    return tuple(TopologyHint(mask, mask.bit_count() == least) for mask in found)


def check_anywhere(state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules) -> None:
    """Raises DevicesDoNotFit where no NUMA nodes at all have devices as they are asked for, and TooMuchWork."""
    places = places_of_pod(state, pod, container, rules)
    if places.containers and (rules.compat or not places.smallest()):
        places.give(None)


def nodes_within(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules, affinity: Mask
) -> Mask:
    """
    The NUMA nodes of an alignment on which the devices are found together: all of them, or else the smallest part.

    More nodes can spoil it: `ApplyForAll` then means more devices, and Koordinator's `SamePCIe` is not searched for. Where
    no part will do, the alignment as it is. Raises InvalidField and TooMuchWork.
    """
    places = places_of_pod(state, pod, container, rules)
    if not places.containers or places.fit(affinity):
        return affinity
    return next(iter(places.smallest(within=affinity)), affinity)


def places_of_pod(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> "Places":
    return Places(state, pod, [each for each in joint_containers(pod, rules) if container in (None, each.name)], rules)


class Places:
    """On which NUMA nodes some containers of a pod find their devices, decided one after another."""

    def __init__(
        self, state: NodeState, pod: PodRequest, containers: Sequence[ContainerRequest], rules: AdmissionRules
    ) -> None:
        self.state, self.pod, self.containers, self.rules = state, pod, containers, rules
        self.first = [asked_for(state, pod, each, rules) for each in containers]
        """Each container as if it were the first one."""
        kinds = {kind for asked in self.first for kind in asked.demand.requests}
        devices = (device for asked in self.first[:1] for kind in kinds for device in asked.inventory.by_type[kind])
        self.nodes = sorted({node_of(device) for device in devices} - {ANYWHERE})

    def give(self, mask: Mask | None) -> None:
        """Raises DevicesDoNotFit where not all of them find theirs there, and TooMuchWork."""
        state = self.state
        for container, asked in zip(self.containers, self.first, strict=True):
            if state is not self.state:
                asked = asked_for(state, self.pod, container, self.rules)
            given = joint_devices(asked, mask)
            if container is not self.containers[-1]:
                state = state.holding(held_by(self.pod, container, given.devices, given.functions))

    def fit(self, mask: Mask | None) -> bool:
        try:
            self.give(mask)
        except DevicesDoNotFit:
            return False
        return True

    def smallest(self, within: Mask = EVERYWHERE) -> list[Mask]:
        """Sets of nodes that will do and hold no smaller one that does, ascending."""
        nodes = [node for node in self.nodes if within >> node & 1]
        fewest = max(map(fewest_nodes, self.first))
        sizes = range(fewest, len(nodes) + 1)
        masks = (mask_of(chosen) for size in sizes for chosen in combinations(nodes, size))
        found: list[Mask] = []
        for mask in islice(masks, MOST_TRIED):
            if all(less & ~mask for less in found) and self.fit(mask):
                found.append(mask)
        return found


def fewest_nodes(asked: Asked) -> int:
    """How many NUMA nodes the GPUs need at least."""
    gpus = asked.inventory.by_type[DeviceType.GPU]
    free: Mapping[int, int] = Counter(node_of(gpu) for gpu in gpus if not gpu.busy)
    still = (asked.demand.gpu.count if asked.demand.gpu is not None else 0) - free.get(ANYWHERE, 0)
    richest = sorted((amount for node, amount in free.items() if node != ANYWHERE), reverse=True)
    return next((nodes for nodes, total in enumerate(accumulate(richest), 1) if total >= still), 1)


def node_of(device: Device) -> int:
    return device.place.node if device.place is not None else ANYWHERE
