"""
Merges the hints of the hint providers into the alignment of a container. The container is refused if the policy does
not admit the merged hint.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from topoalign.core.hints.hint_rules import narrowest_hint
from topoalign.core.hints.memory_hints import MemoryProvider
from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.decisions import Alignment, PlacementContext
from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.hints import HintAnswer, TopologyHint
from topoalign.core.model.ids import NIC, ContainerName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, node_mask, nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.placement.device_choice import split_by_affinity
from topoalign.core.placement.gpus.topology import SetOrder
from topoalign.core.placement.preference import PLACEMENTS, build_gpu_choice, choose_gpu_set, positions_by_gpu
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.closest_numa import Distances, MaskOrder
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY, offers_of_providers
from topoalign.core.policy.topology_policy import MergeQuestion
from topoalign.core.profile import profile_of


class NotAligned(NoFit):
    """Raised when the topology policy refuses the best alignment that the providers' hints allow."""

    def __init__(
        self, rules: AdmissionRules, container: ContainerName | None, alignment: Alignment, amounts: str = ""
    ) -> None:
        """`amounts`: the needed and the free amounts (`describe_free_amounts`). Empty: not computed."""
        whose = "the pod" if container is None else f"container {container!r}"
        unmet = sorted({name for hints in alignment.hints.values() for name, each in hints.items() if each == ()})
        mask = alignment.merged.affinity
        if unmet:
            why = f"{' and '.join(clean(name) for name in unmet)} cannot be met on any NUMA nodes"
        elif mask is None:
            why = "no NUMA nodes suit all that it asks for"
        else:
            nodes = f"NUMA node{'' if mask.bit_count() == 1 else 's'} {format_cpuset(nodes_of(mask))}"
            why = f"the best alignment is {nodes}, and it is not preferred by all"
        super().__init__(
            f"policy {rules.policy.value} refuses {whose}: {why}{f'; {amounts}' if amounts else ''}",
            "ask for less, wait until something is released, or use policy best-effort, which admits without alignment",
        )


class Aligned(NamedTuple):
    """The hints to which a container is aligned."""

    hint: TopologyHint
    memory: TopologyHint
    """The same as `hint`. In mode `best`: the narrowest hint within it that has the memory."""
    together: Mask | None = None
    """The NUMA nodes for devices that are chosen together. None: any."""


def align(asked: HintRequest, answer: HintAnswer, work: NumaSearchBudget) -> tuple[Alignment, Aligned]:
    """Aligns a container or a whole pod. `work`: the remaining budget of the decision. Raises TooMuchWork."""
    rules = asked.rules
    topology = asked.state.hardware
    policy = POLICIES[rules.policy]
    merged = policy.merge(
        MergeQuestion(
            offers_of_providers(answer.providers.values()),
            node_mask(topology.node_ids or (0,)),
            distances_for(topology, rules),
            rules.mode,
            work,
            _order_by_gpus(asked),
        )
    )
    memory = _memory_within(merged, answer) if profile_of(rules.mode).narrows_after_merge else merged
    alignment = Alignment(
        container=asked.demand.container,
        hints=answer.providers,
        merged=merged,
        admitted=policy.admits(merged),
    )
    return alignment, Aligned(merged, memory)


def distances_for(topology: Topology, rules: AdmissionRules) -> Distances | None:
    """The NUMA distances, if they are known and compared: if the option is set, and always in mode `best`."""
    wanted = rules.prefer_closest_numa_nodes or profile_of(rules.mode).always_compares_distances
    if topology.distances is None or not wanted:
        return None
    return _distance_table(topology.node_ids, topology.distances)


@lru_cache(maxsize=16)
def _distance_table(nodes: tuple[int, ...], distances: tuple[tuple[int, ...], ...]) -> Distances:
    return {node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, distances, strict=True)}


def _memory_within(merged: TopologyHint, answer: HintAnswer) -> TopologyHint:
    # memory that fits on one NUMA node must not block the next one; all memory resources have the same hints
    hints = next(iter(answer.providers[MemoryProvider.name].values()), None)
    within = EVERYWHERE if merged.affinity is None else merged.affinity
    return (narrowest_hint(hints, within=within) if hints else None) or NO_AFFINITY


NO_SET = (1,)
"""Sorts after every set of GPUs."""


def _order_by_gpus(asked: HintRequest) -> MaskOrder | None:
    """
    The sort key by which mode `best` orders equally narrow sets of NUMA nodes: by the GPUs that the demand would get
    there, in the order of device policy `topology`. None: the lowest nodes are preferred, as by a kubelet: in other
    modes, if the demand requests no whole GPUs, or if devices are chosen together.

        8 GPUs on an NVSwitch, four on each of two NUMA nodes, and GPU-0 on node 0 has lost its NVLinks:
        4 GPUs are aligned to node 1, 1 GPU is aligned to node 0
    """
    state = asked.state
    devices = asked.demand.devices
    hardware = state.hardware
    gpus = [(name, amount) for name, amount in devices.items() if amount and hardware.kind_of(name) == "gpu"]
    if not gpus or asked.demand.together or not profile_of(asked.rules.mode).compares_gpus_of_nodes:
        return None
    nics = devices.get(NIC, 0)
    free_nics = state.ownership.free(NIC) if nics else ()
    questions = []
    for name, amount in gpus:
        free = state.ownership.free(name)
        context = PlacementContext(free=free, nics=free_nics, nics_wanted=nics)
        choice = build_gpu_choice(hardware, free, (), amount, context)
        questions.append((name, free, choice, SetOrder(choice.scorer, choice.free, choice.nics)))
    position = positions_by_gpu(hardware)
    policy = PLACEMENTS[asked.rules.placement]

    def key(mask: Mask) -> tuple[Any, ...]:
        found = []
        for name, free, choice, order in questions:
            aligned = split_by_affinity(hardware.devices[name], free, mask).aligned
            members = choose_gpu_set(policy, choice._replace(available=[position[gpu] for gpu in aligned]))
            found.append((0, *order.rank(members)[:-1]) if members else NO_SET)
        return tuple(found)

    return key
