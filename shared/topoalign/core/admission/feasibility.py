"""
Determines from amounts alone whether a kubelet would admit a pod. It takes microseconds, for thousands of nodes.

In mode `kubelet`, the preferred sets of NUMA nodes depend on the empty machine. So they are computed once for each kind
of machine and demand (`need_of`). For each node, only the free amounts are compared (`judge_amounts`):

    2 NUMA nodes with 4 GPUs each, policy restricted, 3 GPUs and 8 CPUs: {0} and {1} are preferred
    free now: 2 GPUs on node 0, 4 on node 1; 30 CPUs on each: node 1 has enough of both, and the pod is admitted

The policies restricted and single-numa-node admit a pod if one preferred set has all requested amounts, because the
kubelet's merge prefers only equal sets (v1.36.3, topologymanager, mergePermutation). Under the other policies, the
totals of the node decide. Amounts alone do not decide, and a full decision is necessary, for:

- devices that are chosen together;
- several containers, if one of them is aligned to several NUMA nodes;
- memory that no preferred set has, under policy best-effort;
- more than eight NUMA nodes, under a policy that aligns.
"""

import hashlib
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from itertools import combinations
from operator import sub

import msgspec

from topoalign.core.admission.admit import drive
from topoalign.core.admission.alignment import NotAligned
from topoalign.core.admission.free_amounts import (
    Free,
    NodeSets,
    ResourceAmount,
    count_by_numa_node,
    first_with_room,
    preferred_sets,
    sets_for,
    usable_sets,
)
from topoalign.core.cpu_assignment.packed import NotEnoughCpus
from topoalign.core.demand.pod_demand import ContainerDemand, Demand, PodDemand
from topoalign.core.hints.hint_rules import MOST_LISTED
from topoalign.core.hints.preconditions import check_decidable
from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import CPU, DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, Scope
from topoalign.core.model.topology.bitmask import several
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import gpu_of
from topoalign.core.numa_sets.subsets import sums_by_subset
from topoalign.core.placement.device_choice import NoHealthyDevice, NotEnoughDevices, TooLarge, most_per_container
from topoalign.core.placement.exclusive_cpus import NotEnoughCores, SplitCore
from topoalign.core.placement.memory_blocks import MemoryGroupsWouldMix, MemoryNotExtendable, NotEnoughMemory
from topoalign.core.policy import POLICIES, PREFERRED_ALONE
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import initial_state
from topoalign.core.state.share_amounts import offered_in_slots

# For a pod in which several containers request resources, amounts decide in two cases:
#
# - The totals of the pod suffice, because it is aligned as a whole or admitted for every alignment (`_totals_decide`).
# - After each container, the free amounts of each NUMA node are known, because the container is allocated resources of
#   one NUMA node only (`_are_separable`).


NOT_COUNTED = {CpuOption.FULL_PCPUS_ONLY}
"""CPU manager options with which the number of allocated CPUs does not determine which cores remain whole."""
NOT_NEAR = {CpuOption.FULL_PCPUS_ONLY, CpuOption.ALIGN_BY_SOCKET}
"""These, and the option with which the CPUs can be on NUMA nodes to which the container is not aligned."""


def _totals_decide(topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand]) -> bool:
    rules = demand.rules
    policy = POLICIES[demand.rules.policy]
    if rules.scope is not Scope.POD and not policy.admits(NO_AFFINITY):
        return False
    if any(each.memory for each in asking):
        placed_as_one = rules.scope is Scope.POD and policy.asks
        left_over = any(each.memory and each.role == "init" for each in asking)
        whole = all(each.memory.keys() <= demand.memory.keys() for each in asking)
        if not placed_as_one or left_over or not whole:
            return False
    return _are_counted(topology, demand, asking, rules.cpu_options & NOT_COUNTED)


def _are_separable(topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand]) -> bool:
    """Whether the free amounts are known after each container, because each container is on one NUMA node."""
    rules = demand.rules
    if rules.scope is Scope.POD or not POLICIES[rules.policy].asks or any(each.role == "init" for each in asking):
        return False
    for name in demand.device_names & topology.devices.keys():
        widths = {mask.bit_count() for mask in count_by_numa_node(topology.devices[name].everything, topology.node_ids)}
        if len(widths) > 1 or max(widths) > 1:  # it is unknown which devices a container got
            return False
    return _are_counted(topology, demand, asking, rules.cpu_options & NOT_NEAR)


def _are_counted(
    topology: Topology, demand: PodDemand, asking: Sequence[ContainerDemand], hindering: Collection[CpuOption]
) -> bool:
    if any(each.cpus for each in asking) and (hindering or not topology.cpu_topology.is_even):
        return False
    return are_disjoint(*(topology.devices[name] for name in demand.device_names & topology.devices.keys()))


def are_disjoint(*some: Collection[DeviceID]) -> bool:
    """Whether no device is in two of these collections."""
    return len(frozenset().union(*some)) == sum(map(len, some))


class Step(msgspec.Struct, frozen=True):
    """
    What one container is allocated after its alignment. The alignment itself does not matter: if its NUMA nodes do not
    suffice, devices and CPUs of other NUMA nodes are added (kubelet v1.36.3, device manager and CPU manager).
    """

    devices: tuple[tuple[ResourceName, int, bool], ...]
    """In the order of allocation. True: more than a container can request."""
    cpus: int
    counted: bool
    """Whether too few free CPUs mean a refusal. On uneven machines, the kubelet can allocate CPUs that are in use."""
    whole_cores: bool
    splits_core: bool
    """Whether the CPUs must be allocated in whole cores, but their number would split a core."""
    stays: bool
    """Whether later containers cannot use its resources. False for regular init containers."""


def _step_of(topology: Topology, rules: AdmissionRules, container: ContainerDemand) -> Step:
    """What a container is allocated on this machine. The kubelet ignores resources that no device plugin lists."""
    known = ((name, amount) for name, amount in container.devices.items() if name in topology.devices)
    whole = CpuOption.FULL_PCPUS_ONLY in rules.cpu_options
    per_core = topology.cpu_topology.cpus_per_core
    return Step(
        devices=tuple((name, amount, amount > most_per_container(topology, name)) for name, amount in known),
        cpus=container.cpus,
        counted=topology.cpu_topology.is_even,
        whole_cores=whole,
        splits_core=whole and per_core > 0 and container.cpus % per_core > 0,
        stays=container.role != "init",
    )


def _lacking_in(step: Step, devices: Mapping[ResourceName, int], cpus: int, whole_cores: int) -> str | None:
    """The code of a container's shortage with these free amounts. Empty: none. None: amounts alone do not decide."""
    for name, amount, too_large in step.devices:
        if too_large:
            return TooLarge.code
        free = devices[name]
        if free < amount:
            return NoHealthyDevice.code if free < 0 else NotEnoughDevices.code
    if step.splits_core:
        return SplitCore.code
    if step.whole_cores and whole_cores < step.cpus:
        return NotEnoughCores.code
    if cpus < step.cpus:
        return NotEnoughCpus.code if step.counted else None
    return ""


class PodNeed(NodeSets, frozen=True, kw_only=True):
    """What a demand needs on one kind of machine, under the rules of its kubelet."""

    refused: str
    """Code of a refusal that does not depend on the free amounts. Empty: there is none."""
    asks: bool
    """Whether the policy considers NUMA nodes at all."""
    strict: bool
    """Whether the policy refuses a pod if no preferred set has room for it."""
    unplaced: tuple[ResourceAmount, ...]
    """Devices without a known NUMA node."""
    without_memory: tuple[int, ...]
    """The preferred sets if the memory fits nowhere: the memory manager then has no preference."""
    open: bool
    """Whether the policy sets no affinity if the alignment would be to all NUMA nodes."""
    steps: tuple[Step, ...]
    """One for each container that is allocated something after this alignment, in their order."""
    rest: "PodNeed | None"
    """The need of the containers after these."""
    complete: bool
    """Whether amounts can admit the pod. If not, they can only refuse it."""


NeedSteps = Generator[None, None, PodNeed | None]
"""Computes a need in steps, between which other tasks can run: 100 containers on 8 NUMA nodes take 50 ms."""


def need_of(topology: Topology, demand: PodDemand) -> PodNeed | None:
    """Computes what a demand needs on a machine. None: amounts alone do not decide."""
    return drive(need_steps(topology, demand), lambda _: None)


def need_steps(topology: Topology, demand: PodDemand) -> NeedSteps:
    """`need_of`, one container at a time."""
    by_amounts = any(topology.kind_of(name) in ("unit", "slot") for name in demand.devices)
    if by_amounts or any(each.joint is not None for each in demand.containers):
        return None
    return (yield from _steps_by_numbers(topology, demand))


def alignment_need(topology: Topology, demand: PodDemand) -> PodNeed | None:
    """The need as if the policy refused unaligned pods. Slots and units are compared by their numbers."""
    rules = demand.rules
    if POLICIES[rules.policy].asks and POLICIES[rules.policy].admits(NO_AFFINITY):
        strict = msgspec.structs.replace(rules, policy=PREFERRED_ALONE)
        demand = msgspec.structs.replace(demand, rules=strict)
    return drive(_steps_by_numbers(topology, demand), lambda _: None)


def _steps_by_numbers(topology: Topology, demand: PodDemand) -> NeedSteps:
    """`need_steps`, with slots and units compared by their numbers."""
    rules = demand.rules
    if not profile_of(rules.mode).prefers_by_empty_machine or not are_listed(topology, demand):
        return None
    asking = [each for each in demand.containers if each.devices or each.cpus or each.memory]
    one = asking[0] if asking else demand.containers[0]
    is_asked_alone = (one.devices, one.cpus, one.memory) == (demand.devices, demand.cpus, demand.memory)
    part_of = partial(_need_of_part, topology, demand, _find_certain_refusal(topology, demand))
    if len(asking) <= 1 and (rules.scope is Scope.CONTAINER or is_asked_alone):
        return part_of(one, asking)
    if _totals_decide(topology, demand, asking):
        return part_of(demand, asking)
    if not _are_separable(topology, demand, asking):
        if rules.scope is Scope.POD:
            return part_of(demand, [], complete=False)
        return part_of(one, [one], complete=False)
    rest: PodNeed | None = None
    for each in reversed(asking):
        yield
        rest = part_of(each, [each], rest)
    return rest


def _need_of_part(
    topology: Topology,
    demand: PodDemand,
    refusal: str,
    aligned: Demand,
    given: Sequence[ContainerDemand],
    rest: PodNeed | None = None,
    *,
    complete: bool = True,
) -> PodNeed:
    """The need of what is aligned as a whole, for the containers `given`, and of the rest of the pod."""
    rules = demand.rules
    policy = POLICIES[demand.rules.policy]
    devices = {name: amount for name, amount in aligned.devices.items() if name in topology.devices}
    strict = not policy.admits(NO_AFFINITY)
    looks = policy.asks and (strict or bool(aligned.memory))
    sets = sets_for(topology, rules, aligned, looks=looks)
    placed = dict(sets.near)
    return PodNeed(
        refused=refusal,
        asks=policy.asks,
        strict=strict,
        near=sets.near,
        unplaced=tuple((name, amount) for name, amount in devices.items() if name not in placed),
        memory=sets.memory,
        preferred=sets.preferred,
        without_memory=preferred_sets(topology, rules, aligned, memory=False) if looks and aligned.memory else (),
        open=policy.single_node,
        steps=tuple(_step_of(topology, rules, each) for each in given),
        rest=rest,
        complete=complete,
    )


def machine_key(topology: Topology) -> bytes:
    """A key of a machine. Machines with equal keys have equal needs (`need_of`), even if their device ids differ."""
    devices = topology.devices
    clashes = [pair for pair in combinations(sorted(devices), 2) if not are_disjoint(*(devices[name] for name in pair))]
    supplies = [
        (
            name,
            any(listed.by_nodes),
            sorted(count_by_numa_node(listed.everything, topology.node_ids).items()),
            [(offer.most, offer.unit, offer.slots) for offer in topology.offers_of.get(name, ())],
        )
        for name, listed in sorted(devices.items())
    ]
    sizes = offered_in_slots(topology)
    gpus = ((base, gpu_of(topology, base)) for base in offered_in_slots(topology))
    in_slots = [(sizes[base].memory, gpu.name, gpu.numa_affinity) for base, gpu in gpus]
    return order_free_digest((topology.cpus, topology.nodes, topology.distances, supplies, clashes, in_slots))


def order_free_digest(parts: tuple[object, ...]) -> bytes:
    """A digest that is equal for equal parts, regardless of the order of their sets and mappings."""
    return hashlib.sha256(
        msgspec.json.encode(msgspec.to_builtins(parts, str_keys=True, order="deterministic"))
    ).digest()


def are_listed(topology: Topology, demand: PodDemand) -> bool:
    """Whether the machine has few enough NUMA nodes for hints to be listed, or hints do not matter."""
    nodes = set(topology.node_ids)
    if not POLICIES[demand.rules.policy].asks and not demand.memory:
        return True
    return 0 < len(nodes) <= MOST_LISTED and nodes >= topology.cpu_topology.in_node.keys()


def _find_certain_refusal(topology: Topology, demand: PodDemand) -> str:
    """The code with which the machine refuses every such pod, regardless of what is free. Empty: there is none."""
    try:
        check_decidable(initial_state(NodeName(""), topology, {}, ""), demand)
    except NoFit as misfit:
        return misfit.code
    return ""


def judge_amounts(need: PodNeed, free: Free) -> str | None:
    """The code of the kubelet's refusal. Empty: it would admit the pod. None: amounts alone do not decide."""
    if need.refused:
        return need.refused
    if free.cpus < 0 and any(step.cpus for step in need.steps):
        return None
    chosen = need.first_with_room(free)
    if not chosen and need.strict and not need.memory:
        return _lacking_in_total(need, free) or NotAligned.code
    code = _lacking_without_memory(need, free) if need.memory and not chosen else _find_total_shortage(need, free)
    if code != "" or (need.rest is None and need.complete):
        return code
    if need.rest is None or not chosen or (several(chosen) and (need.near or need.memory)):
        return None
    return judge_amounts(need.rest, left_where_taken(need, free, chosen))


def _lacking_without_memory(need: PodNeed, free: Free) -> str | None:
    """The result if no preferred set has all amounts, including memory."""
    nowhere = not _has_memory_anywhere(need, free)
    chosen = 0
    if nowhere:
        chosen = first_with_room(need.without_memory, need.near, (), free)
    if need.strict and not chosen:
        return _lacking_in_total(need, free) or NotAligned.code
    if len(need.steps) != 1:
        return None
    if (code := _find_total_shortage(need, free)) != "":
        return code
    if not need.asks or (nowhere and need.open and chosen == len(free.usable) - 1):
        return NotEnoughMemory.code if nowhere else ""
    if not chosen:
        return None
    # the pod is aligned to the chosen set, but its memory fits nowhere
    if any(free.within[name][chosen] < amount for name, amount in need.memory):
        return MemoryNotExtendable.code
    return MemoryGroupsWouldMix.code if several(chosen) and not free.usable[chosen] else ""


def _has_memory_anywhere(need: PodNeed, free: Free) -> bool:
    # the largest sets are the reusable ones, and all unused NUMA nodes together
    largest = (*free.reusable, len(free.usable) - 1 & ~free.used)
    return any(
        free.usable[number] and all(free.within[name][number] >= amount for name, amount in need.memory)
        for number in largest
    )


def _lacking_in_total(need: PodNeed, free: Free) -> str:
    """The code of a shortage in the node's totals for what is aligned as a whole. Empty: there is none."""
    devices = dict((*need.near, *need.unplaced))
    cpus = devices.pop(CPU, 0)
    for name in sorted(devices):
        if max(free.devices[name], 0) < devices[name]:
            return NoHealthyDevice.code if free.devices[name] < 0 else NotEnoughDevices.code
    if free.cpus < cpus:
        return NotEnoughCpus.code
    return NotEnoughMemory.code if any(free.within[name][-1] < amount for name, amount in need.memory) else ""


def _find_total_shortage(need: PodNeed, free: Free) -> str | None:
    """The code of a shortage in the totals of devices or CPUs. Empty: none. None: amounts alone do not decide."""
    if len(need.steps) == 1:
        return _lacking_in(need.steps[0], free.devices, free.cpus, free.whole_cores)
    devices = dict(free.devices)
    cpus = free.cpus
    for step in need.steps:
        if (code := _lacking_in(step, devices, cpus, free.whole_cores)) != "":
            return code
        if step.stays:
            devices.update((name, devices[name] - amount) for name, amount, _ in step.devices)
            cpus -= step.cpus
    return ""


def left_where_taken(need: PodNeed, free: Free, number: int) -> Free:
    """What at least remains free after a container is aligned to this set. The same object if nothing is taken."""
    devices = dict(free.devices)
    within = dict(free.within)
    cpus = free.cpus
    whole_cores = free.whole_cores
    for name, amount in (*need.near, *need.memory):
        within[name], lost = _taken_from(free.within[name], number, amount)
        if name == CPU:
            cpus = cpus - lost
            whole_cores = max(0, whole_cores - lost)
        elif name in devices:
            devices[name] = max(min(0, devices[name]), devices[name] - lost)
    for name, amount in need.unplaced:
        devices[name] = max(min(0, devices[name]), devices[name] - amount)
    if not need.memory:
        if devices == free.devices and within == free.within:
            return free
        return msgspec.structs.replace(free, devices=devices, within=within, cpus=cpus, whole_cores=whole_cores)
    kept = number if not several(number) else 0
    reusable = frozenset(each for each in free.reusable if not each & number or each == kept)
    used = free.used | number
    return Free(
        devices=devices,
        cpus=cpus,
        whole_cores=whole_cores,
        within=within,
        usable=usable_sets(len(free.usable).bit_length() - 1, reusable, used),
        reusable=reusable,
        used=used,
    )


def _taken_from(table: tuple[int, ...], number: int, amount: int) -> tuple[tuple[int, ...], int]:
    """
    The minimum of a resource that remains on each set of NUMA nodes after a container takes `amount` from the set
    `number`, and the maximum that it takes. If that set has several NUMA nodes, each loses everything. If devices are
    near several NUMA nodes, every set loses the sum of the losses.
    """
    nodes = range(len(table).bit_length() - 1)
    taken = [1 << node for node in nodes if number >> node & 1]
    lost = {bit: table[bit] if len(taken) > 1 else min(amount, table[bit]) for bit in taken}
    total = sum(lost.values())
    if not total:
        return table, 0
    if table[-1] < sum(table[1 << node] for node in nodes):
        return tuple(max(0, had - total) for had in table), min(amount, total)
    losses = sums_by_subset(lost.get(1 << node, 0) for node in nodes)
    return tuple(map(sub, table, losses)), min(amount, total)
