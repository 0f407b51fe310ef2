"""
Checks a pod that requests shares of GPUs: on every set of NUMA nodes to which the kubelet can align it, a GPU must have
enough free capacity, no matter which pods end before the pod is admitted.

A kubelet counts units, slots with NUMA nodes, CPUs and memory by NUMA node. It does not count the free capacity of each
GPU. So a pod for which only node 1 has a suitable GPU can be aligned to node 0 after another pod releases CPUs there.
It is then refused (`ShareSplit`):

    requested: 60 hundredths of a GPU and 4 CPUs
    NUMA node 0: free slots, 40 free hundredths on its GPUs, 2 CPUs; NUMA node 1: enough of everything
    the pod is aligned to node 1; if a pod with 8 CPUs of node 0 ends, to node 0, where no GPU has 60 free hundredths

A set of NUMA nodes that the kubelet prefers to the predicted one is a risk if (1) none of its GPUs has enough free
capacity, and (2) enough of what the kubelet counts can become free there while none of its GPUs gets enough. The GPUs,
CPUs and memory of a pod become free together.

    the pod with the 8 CPUs also holds 60 hundredths of a GPU of node 0: both become free when it ends, so no risk

Pods that can be admitted first are competitors. Each can take its share on any of the GPUs. A pod must get exactly the
GPUs that are reserved for it if it limits its GPUs, spreads its units over several, or requests whole GPUs and memory.
For such a pod, every other set is a risk. Devices that become healthy are not taken into account.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from topoalign.core.admission.feasibility import are_listed
from topoalign.core.admission.free_amounts import Free, NodeSets, count_free, first_with_room, sets_for
from topoalign.core.demand.pod_demand import ContainerDemand, Demand, PodDemand
from topoalign.core.demand.shares import (
    Share,
    SharesLeft,
    enough,
    may_be_on,
    unit_of,
)
from topoalign.core.hints.device_hints import real_nodes
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import CPU, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Scope
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.subsets import subsets
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import ShareLeft, slots_left, sum_amounts, units_left

Gpus = Mapping[DeviceID, int]
"""GPU, or MIG instance -> the number of the set of NUMA nodes that it is near."""


class AlignedContainer(NamedTuple):
    """A container that requests shares of GPUs, and the data by which its kubelet aligns it."""

    container: ContainerDemand
    share: Share
    gpus: Gpus
    """The GPUs of which the kubelet, which knows only NUMA nodes, can allocate a part to it."""
    aligned: NodeSets
    otherwise: tuple[NodeSets, ...]
    """
    The alignments if no preferred set has room: the kubelet then chooses the NUMA node of each resource separately.
    Empty: the pod is refused.
    """


def containers_aligned_to_gpus(topology: Topology, demand: PodDemand) -> tuple[AlignedContainer, ...]:
    """The containers of a pod that a kubelet can align to GPUs with too little free capacity."""
    rules = demand.rules
    policy = POLICIES[rules.policy]
    by_machine = profile_of(rules.mode).prefers_by_empty_machine
    if not policy.asks or not by_machine or not are_listed(topology, demand):
        return ()
    found = []
    for each in demand.containers:
        share = each.share(topology)
        if share is None:
            continue
        units = (name for name, amount in each.devices.items() if amount and unit_of(topology, name))
        resource = share.resource or next(units)  # a resource under which the GPUs are listed
        if not any(topology.devices[resource].by_nodes):
            continue
        aligned: Demand = demand if rules.scope is Scope.POD else each
        otherwise: tuple[NodeSets, ...] = ()
        if policy.admits(NO_AFFINITY):
            names = (name for name in each.devices if topology.kind_of(name) in ("unit", "slot"))
            single = tuple(1 << node for node in range(len(topology.node_ids)))
            otherwise = tuple(NodeSets(preferred=single, near=((name, 1),), memory=()) for name in names)
        found.append(
            AlignedContainer(each, share, _near_gpus(topology, resource), sets_for(topology, rules, aligned), otherwise)
        )
    return tuple(found)


def _near_gpus(topology: Topology, resource: ResourceName) -> Gpus:
    """The GPUs of a resource that have a known NUMA node."""
    devices = topology.devices[resource]
    numbers = subsets(topology.node_ids).numbers
    here = node_mask(topology.node_ids)
    return {
        base: numbers[mask]
        for listed, there in devices.by_nodes.items()
        if (mask := real_nodes(listed or ()) & here)
        for base, parts in devices.by_base.items()
        if (parts & there).bits
    }


def finds_gpus(state: NodeState, pod: PodDemand, others: Sequence[PodDemand] = ()) -> bool:
    """
    Whether each container has GPUs with enough free capacity wherever the kubelet aligns it, no matter which pods end
    first and in which order the `others` are admitted. Precondition: the pod alone fits on the node in this state.
    """
    parts = containers_aligned_to_gpus(state.hardware, pod)
    if not parts:
        return True
    free = count_free(state, pod.rules)
    other_containers = [each for other in others for each in other.containers]
    for part in parts:
        besides = [each for each in pod.containers if each is not part.container]
        shares = (each.share(state.hardware) for each in (*besides, *other_containers))
        search = AlignmentSearch(state, pod.rules, part, [share for share in shares if share is not None])
        room = part.aligned.first_with_room(free)
        before = other_containers if pod.rules.scope is Scope.POD else (*besides, *other_containers)
        for sets, number in _iterate_possible_alignments(part, free, before):
            if number == room and not search.competitors:
                continue
            if not search.suffices(number, is_here=number == room) and search.can_be_reached(sets, number):
                return False
    return True


def _iterate_possible_alignments(
    part: AlignedContainer, free: Free, competitors: Sequence[ContainerDemand]
) -> Iterator[tuple[NodeSets, int]]:
    """The sets to which a container can be aligned, up to the first with room for it and all competitors."""
    taken = Counter[ResourceName]()
    for each in competitors:
        taken.update(each.devices)
        taken.update({CPU: each.cpus})
        taken.update(each.memory)
    by_memory = any(each.memory for each in competitors)  # competitors can also use memory in groups
    aligned = part.aligned
    near = tuple((name, amount + taken[name]) for name, amount in aligned.near)
    for number in aligned.preferred:
        yield aligned, number
        is_open = not aligned.memory or not by_memory
        if is_open and first_with_room((number,), near, aligned.memory, free):
            return
    yield from ((sets, number) for sets in part.otherwise for number in sets.preferred)


class AlignmentSearch:
    """Checks whether sets of NUMA nodes have GPUs for one container, and whether a kubelet can align it to them."""

    def __init__(
        self, state: NodeState, rules: AdmissionRules, part: AlignedContainer, competitors: Sequence[Share]
    ) -> None:
        self._state = state
        self._rules = rules
        self._part = part
        self.competitors = competitors
        self._in_slots = part.share.resource is not None

    def _gpus(self, number: int) -> list[DeviceID]:
        return [gpu for gpu, near in self._part.gpus.items() if near & number]

    def _left(self, state: NodeState) -> SharesLeft:
        return state.ownership.slots_left if self._in_slots else state.ownership.units_left

    def suffices(self, number: int, left: SharesLeft | None = None, *, is_here: bool = False) -> bool:
        """
        Whether enough GPUs near this set have room for the container, whatever its competitors take. `left`: the free
        capacity of the GPUs. None: the current one. `is_here`: it is aligned to this set now.
        """
        left = self._left(self._state) if left is None else left
        share = self._part.share
        if not self._in_slots:
            is_free = not share.memory if share.whole else share.gpus == 1
            return (is_free or is_here) and self._are_enough(left, number)
        if share.rules.limits and not is_here:
            return False
        if not share.rules.numa_bind:
            return self._are_enough(left, number)
        nodes = range(len(self._state.hardware.node_ids))
        return any(self._are_enough(left, 1 << node) for node in nodes if number >> node & 1)

    def _are_enough(self, left: SharesLeft, number: int) -> bool:
        hardware = self._state.hardware
        share = self._part.share
        fit = [
            gpu for gpu in self._gpus(number) if gpu in left and _fits_with_competitors(hardware, gpu, left[gpu], share)
        ]
        kept = [gpu for gpu in fit if _fits_with_competitors(hardware, gpu, left[gpu], share, self.competitors)]
        lost = min(len(fit) - len(kept), sum(each.gpus for each in self.competitors))
        return len(fit) - lost >= share.gpus

    def can_be_reached(self, sets: NodeSets, number: int) -> bool:
        """Whether the kubelet can align to this set after pods end, none of which releases enough on its GPUs."""
        parent_of = self._state.hardware.parent_of
        gpus = {parent_of(gpu) for gpu in self._gpus(number)}
        near = list[list[Allocation]]()
        far = list[Allocation]()
        for held in group_by_pod(self._state.allocations.values()).values():
            if gpus.isdisjoint(parent_of(device) for each in held for device in each.device_ids):
                far += held
            else:
                near.append(held)
        if self._has_room(far, sets, number):
            return True
        idle = [held for held in near if not self.suffices(number, self._left_after(held, near, number))]
        return bool(idle) and self._has_room((*far, *chain.from_iterable(idle)), sets, number)

    def _left_after(self, ended: list[Allocation], near: list[list[Allocation]], number: int) -> SharesLeft:
        """The free capacity of a set's GPUs after a pod ends. `near`: the allocations of pods on these GPUs, by pod."""
        hardware = self._state.hardware
        handed_out = self._state.ownership.handed_out
        usable = all(handed_out.health_of(gpu).usable for gpu in self._gpus(number))
        if not usable:  # an allocation under a former offer can block a GPU (`Ownership.blocked`)
            return self._left(without_all(self._state, ended))
        # by amounts alone, as computing the ownership of the node for each of its pods takes four times as long
        live = chain.from_iterable(held for held in near if held is not ended)
        return slots_left(hardware, live, handed_out) if self._in_slots else units_left(hardware, live, handed_out)

    def _has_room(self, ended: Iterable[Allocation], sets: NodeSets, number: int) -> bool:
        free = count_free(without_all(self._state, ended), self._rules)
        return first_with_room((number,), sets.near, sets.memory, free) > 0


def _fits_with_competitors(
    topology: Topology,
    gpu: DeviceID,
    left: ShareLeft,
    share: Share,
    competitors: Sequence[Share] = (),
) -> bool:
    """Whether a GPU with this free capacity has enough for a share and for all of these competing shares."""
    others = [
        each.amount_of(left.offered) for each in competitors if (each.resource is None) == (share.resource is None)
    ]
    if others and left.profiles:  # it is unknown which placements a competitor's MIG instance takes
        return False
    rest = msgspec.structs.replace(left, sharers=left.sharers + len(others), held=sum_amounts((left.held, *others)))
    return may_be_on(topology, share, gpu) and enough(rest, share)


def group_by_pod(allocations: Iterable[Allocation]) -> dict[str, list[Allocation]]:
    """
    Groups allocations that become free together: by the UID of their pod, or `namespace/name` if the UID is unknown. An
    allocation of an unknown pod is a group of its own.
    """
    found = defaultdict[str, list[Allocation]](list)
    for each in allocations:
        owner = each.owner
        if each.pod_uid or owner is None:
            pod = each.pod_uid or each.id
        else:  # allocations that a prediction added have no namespace; their `pod` is the UID
            pod = f"{owner.namespace}/{owner.pod}" if owner.namespace else owner.pod
        found[pod].append(each)
    return found


def without_all(state: NodeState, gone: Iterable[Allocation]) -> NodeState:
    """The node's state without these allocations."""
    state = msgspec.structs.replace(state)  # without cached ownership: it is computed once, not after each removal
    for each in gone:
        state = state.without(each.id)
    return state
