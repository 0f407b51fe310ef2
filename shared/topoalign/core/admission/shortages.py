"""
Names the resource that keeps a container or a pod off the NUMA nodes that its policy accepts, with the amounts that
decide.

Policy single-numa-node accepts one NUMA node, policy restricted the sets of as few as each resource needs. Of each such set
the first resource is named that does not fit there: devices by name, then CPUs, then memory.

    single-numa-node, 26 CPUs; 14 are free on NUMA node 0, of which the init container had CPU 2, and 60 on node 1
    -> NUMA node 0 has 14 CPUs free, 26 are needed; CPU 2 of the init container keeps the container off NUMA node 1
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

import msgspec

from topoalign.core.hints.cpu import available_cpus
from topoalign.core.hints.device_hints import by_counted_nodes, count_near, devices_free_for, real_nodes
from topoalign.core.hints.hint_rules import Supply
from topoalign.core.hints.memory_hints import memory_nodes
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import held_by_pod, reusable_cpus, reusable_devices, reusable_memory
from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.errors import TooMuchWork, clean, quoted
from topoalign.core.model.hints import HintRule, Hints, ResourceNeed
from topoalign.core.model.ids import CPU, MEMORY, ContainerName, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy, Scope
from topoalign.core.model.topology.bitmask import Mask, node_mask, nodes_of, union
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.numa_sets.search import mask_meets_needs
from topoalign.core.placement.memory_blocks import format_gib
from topoalign.core.policy import POLICIES
from topoalign.core.profile import profile_of

MOST_SETS = 256
"""Sets of NUMA nodes that are looked at."""
MOST_NAMED = 3
"""Reasons that a text names."""


class Shortage(NamedTuple):
    """Why a set of NUMA nodes does not suit the demand."""

    text: str
    """With `{}` in the place of the NUMA nodes."""
    part: float
    """How much of what is needed is there: the text that comes closest is named first."""


def describe_shortage(asked: HintRequest, hints: Mapping[str, Mapping[ResourceName, Hints]]) -> str:
    """Why no set of NUMA nodes that the policy accepts suits the demand. Empty: not known."""
    offers = {name: each for some in hints.values() for name, each in some.items() if each is not None}
    machine = asked.state.hardware.node_ids
    try:
        sizes = {name: _least_size(asked, name, each) for name, each in offers.items()}
    except TooMuchWork:
        return ""
    if POLICIES[asked.rules.policy].single_node:
        size = 1
    elif len({*sizes.values()}) > 1:
        return _describe_sizes(asked, sizes)
    else:
        size = next(iter(sizes.values()), None) or 0
    if not size or comb(len(machine), size) > MOST_SETS:
        return ""
    found: dict[Shortage, list[Mask]] = {}
    for nodes in combinations(machine, size):
        mask = node_mask(nodes)
        unmet = next((name for name, each in offers.items() if not _prefers_node_set(each, mask)), None)
        if unmet is None:  # each resource fits here, and the merge has found no combination
            return ""
        found.setdefault(_shortage_of(asked, unmet, mask), []).append(mask)
    first = sorted(found, key=lambda each: (-each.part, min(found[each])))[:MOST_NAMED]
    texts = [each.text.format(_format_sets(found[each], machine)) for each in first]
    return "; ".join((*texts, *(("others have less",) if len(found) > len(first) else ())))


def _least_size(asked: HintRequest, resource: ResourceName, hints: Hints) -> int | None:
    """How few NUMA nodes a resource prefers. None: not even the empty machine has enough. Raises TooMuchWork."""
    if isinstance(hints, HintRule):
        return hints.least or None
    preferred = [hint.affinity.bit_count() for hint in hints or () if hint.preferred and hint.affinity is not None]
    if preferred:
        return min(preferred)
    memory = asked.demand.memory
    needs = [
        ResourceNeed(_requested_amount(asked, name), {**_capacity_of(asked, name)})
        for name in (memory if resource in memory else [resource])
    ]
    return Supply(node_mask(asked.state.hardware.node_ids), tuple(needs)).least_size()


def _describe_sizes(asked: HintRequest, sizes: Mapping[ResourceName, int | None]) -> str:
    """That resources need different numbers of NUMA nodes, which no set of them suits."""
    by_size: dict[int, list[str]] = {}
    for name, size in sizes.items():
        if size is None:
            total = " ".join(_format_need(name, sum(_capacity_of(asked, name).values())))
            needed = _format_need(name, _requested_amount(asked, name))[0]
            return f"all NUMA nodes together have {total}, {needed} are needed"
        by_size.setdefault(size, []).append(" ".join(_format_need(name, _requested_amount(asked, name))))
    texts = [f"{size} for {' and '.join(amounts)}" for size, amounts in sorted(by_size.items(), reverse=True)]
    return f"the numbers of NUMA nodes that are needed at least differ: {', '.join(texts)}"


def _prefers_node_set(hints: Hints, mask: Mask) -> bool:
    if isinstance(hints, HintRule):
        among = mask in hints.besides or (not mask & ~hints.nodes and mask_meets_needs(hints.needs, mask))
        return among and mask.bit_count() == hints.least
    return any(hint.preferred and hint.affinity in (None, mask) for hint in hints or ())


def _shortage_of(asked: HintRequest, resource: ResourceName, mask: Mask) -> Shortage:
    has = sum(amount for nodes, amount in _supply_of(asked, resource).items() if nodes & mask)
    amount = _requested_amount(asked, resource)
    several = "together have" if mask.bit_count() > 1 else ""
    if has < amount:
        number, unit = _format_need(resource, has)
        wanted = _format_need(resource, amount)[0]
        be = "is" if wanted == "1" else "are"
        return Shortage(f"{{}} {several or 'has'} {number} {unit} free, {wanted} {be} needed", has / amount)
    if not amount:
        return Shortage(f"{{}} has none of {clean(resource)}, and a limit of 0 is aligned to its NUMA nodes, too", 0.0)
    if kept := _taken_over_elsewhere(asked, resource, mask):
        return Shortage(f"{kept} the container off {{}}", 0.0)
    if resource in asked.demand.memory:
        return Shortage("the memory of {} is in use by containers on other sets of NUMA nodes", 0.0)
    return Shortage(f"{{}} does not suit {clean(resource)}", 0.0)


def _supply_of(asked: HintRequest, resource: ResourceName) -> Mapping[Mask, int]:
    """What the demand can have of a resource by NUMA nodes, with what init containers of its pod leave to it."""
    state, demand, rules = asked
    held = held_by_pod(state, demand)
    if resource == CPU:
        cpus = available_cpus(state, rules) | reusable_cpus(held)
        return {1 << node: len(inside & cpus) for node, inside in state.hardware.cpu_topology.in_node.items()}
    if resource in demand.memory:
        found = {1 << node: each.free.get(resource, 0) for node, each in memory_nodes(state, rules).items()}
        for (nodes, name), size in reusable_memory(held).items():
            if name == resource:
                found[nodes] = found.get(nodes, 0) + size
        return found
    if resource not in state.hardware.devices:
        return {}
    devices = state.hardware.devices[resource]
    return _devices_by_node(asked, devices_free_for(asked, resource) | devices.some(reusable_devices(held, resource)))


def _capacity_of(asked: HintRequest, resource: ResourceName) -> Mapping[Mask, int]:
    """What the empty machine has of a resource by NUMA nodes, all devices healthy."""
    state, demand, rules = asked
    if resource == CPU:
        return {1 << node: len(inside) for node, inside in state.hardware.cpu_topology.in_node.items()}
    if resource in demand.memory:
        nodes = memory_nodes(state, rules).items()
        return {1 << node: each.allocatable.get(resource, 0) for node, each in nodes}
    if resource not in state.hardware.devices:
        return {}
    return _devices_by_node(asked, state.hardware.devices[resource].everything)


def _devices_by_node(asked: HintRequest, some: DeviceSet) -> Mapping[Mask, int]:
    return count_near(some, by_counted_nodes(some.devices, asked.rules.mode), node_mask(asked.state.hardware.node_ids))


def _taken_over_elsewhere(asked: HintRequest, resource: ResourceName, mask: Mask) -> str:
    """What must be taken over and is not on these nodes: `CPU 9 of the init container keeps`. Empty: nothing."""
    hardware = asked.state.hardware
    held = held_by_pod(asked.state, asked.demand)
    if resource == CPU:
        cpus = [cpu for cpu in reusable_cpus(held) if not mask >> hardware.cpu_topology.node_of[cpu] & 1]
        if len(cpus) > 1:
            return f"CPUs {format_cpuset(cpus)} of the init container keep"
        return f"CPU {format_cpuset(cpus)} of the init container keeps" if cpus else ""
    if resource not in hardware.devices:
        return ""
    devices = hardware.devices[resource]
    nodes = node_mask(hardware.node_ids)
    left = devices.some(reusable_devices(held, resource))
    elsewhere = [
        device
        for known, there in by_counted_nodes(devices, asked.rules.mode).items()
        if (close := real_nodes(known or ()) & nodes) and not close & mask
        for device in there & left
    ]
    names = ", ".join(clean(device) for device in elsewhere[:MOST_NAMED])
    return f"{names} of the init container {'keeps' if len(elsewhere) == 1 else 'keep'}" if elsewhere else ""


def _requested_amount(asked: HintRequest, resource: ResourceName) -> int:
    demand = asked.demand
    return demand.cpus if resource == CPU else demand.memory.get(resource) or demand.devices.get(resource, 0)


def _format_need(resource: ResourceName, amount: int) -> tuple[str, str]:
    return format_amount(resource, amount * 1000 if resource == CPU else amount)  # CPUs in whole ones


def _format_sets(masks: Sequence[Mask], machine: Sequence[int]) -> str:
    """`NUMA node 0`, `each of NUMA nodes 0-3`, `NUMA nodes 0-1`, `any 2 of NUMA nodes 0-7`."""
    nodes = nodes_of(union(masks))
    size = masks[0].bit_count()
    if len(nodes) == 1:
        return f"NUMA node {nodes[0]}"
    text = f"NUMA nodes {format_cpuset(nodes)}"
    if len(masks) == 1:
        return text
    return f"each of {text}" if size == 1 else f"any {size} of {text}"


# Finds the single changes of a pod, or of its kubelet's rules, that make it fit, by deciding again with each change.
#
# - **less of one resource**: the most that one container can ask for of it: devices, whole CPUs, GiB of memory;
# - **other rules**: alignment of the pod instead of its containers, or the reverse; the strictest of the other
#   policies.
#
#     8 GPUs, policy single-numa-node, two NUMA nodes with four GPUs each
#     ask for 4 instead of 8 nvidia.com/gpu; set topologyManagerPolicy: restricted


UNITS = {CPU: 1000, MEMORY: GIB}
"""In what steps less is asked for; devices one by one, hugepages not at all."""
OTHER_SCOPES: tuple[dict[str, str], ...] = tuple({"scope": scope.value} for scope in Scope)
OTHER_POLICIES: tuple[dict[str, str], ...] = tuple({"policy": policy.value} for policy in reversed(Policy))[1:]
OTHER_RULES = (*OTHER_SCOPES, *OTHER_POLICIES)
"""What may differ: the scope, then the policy, the strictest first; nothing is looser by the strictest policy."""
SETTINGS = {"policy": "topologyManagerPolicy", "scope": "topologyManagerScope"}
"""Rule -> the field of the kubelet's configuration that sets it."""


class SmallerRequest(NamedTuple):
    """A pod that asks for less of one resource."""

    resource: ResourceName
    asked: int
    amount: int
    """What to ask for instead; CPUs in millicores."""
    pod: PodRequest
    container: ContainerName | None = None
    """The one that asks for less, if others ask for the resource, too."""

    @property
    def text(self) -> str:
        """For people: `ask for 2 instead of 4 nvidia.com/gpu in container 'train'`."""
        amount = format_amount(self.resource, self.amount)[0]
        (asked, unit) = format_amount(self.resource, self.asked)
        where = f" in container {quoted([self.container])}" if self.container is not None else ""
        return f"ask for {amount} instead of {asked} {unit}{where}"


def smaller_requests(
    pod: PodRequest, admits: Callable[[PodRequest], bool], container: ContainerName | None = None
) -> Iterator[SmallerRequest]:
    """
    For each resource the most that one container can ask for so that the pod is admitted: that `container`, or None: the
    only one that asks for the resource. Resources of which no smaller amount suffices are left out.
    """
    asking: dict[ResourceName, list[ContainerRequest]] = {}
    for each in (*pod.init_containers, *pod.containers):
        for name, amount in each.requests.items():
            if amount and (name in UNITS or not is_native(name)):
                asking.setdefault(name, []).append(each)
    for name, every in asking.items():
        containers = [each for each in every if container in (None, each.name)]
        if len(containers) == 1:
            found = _smaller_request(pod, containers[0], name, admits)
            if found is not None:
                yield found._replace(container=containers[0].name if len(every) > 1 else None)


def _smaller_request(
    pod: PodRequest, container: ContainerRequest, resource: ResourceName, admits: Callable[[PodRequest], bool]
) -> SmallerRequest | None:
    unit = UNITS.get(resource, 1)
    asked = container.requests[resource]

    def reduced(units: int) -> PodRequest:
        return asking_for(pod, container.name, resource, units * unit)

    found = _most_that(lambda units: admits(reduced(units)), (asked - 1) // unit)
    return SmallerRequest(resource, asked, found * unit, reduced(found)) if found else None


def _most_that(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, where it holds for all smaller ones; 0: for none."""
    # a smaller set of devices may be harder to align, so few are tried one by one
    if most <= 16:
        return next((number for number in range(most, 0, -1) if holds(number)), 0)
    too_many = 1
    while too_many <= most and holds(too_many):  # the answer is small also for a request of billions
        too_many *= 2
    return bisect_left(range(1, min(too_many, most + 1)), True, key=lambda number: not holds(number))


def asking_for(pod: PodRequest, name: ContainerName, resource: ResourceName, amount: int) -> PodRequest:
    """The pod whose container asks for another amount of a resource."""

    def changed(container: ContainerRequest) -> ContainerRequest:
        if container.name != name:
            return container
        equal = container.limits.get(resource) == container.requests[resource]
        limits = {**container.limits, resource: amount} if equal else container.limits
        return msgspec.structs.replace(container, requests={**container.requests, resource: amount}, limits=limits)

    return msgspec.structs.replace(
        pod,
        init_containers=tuple(map(changed, pod.init_containers)),
        containers=tuple(map(changed, pod.containers)),
    )


def sufficient_rules(rules: AdmissionRules, admits: Callable[[dict[str, str]], bool]) -> Iterator[str]:
    """
    The other scope, and the strictest other policy, by each of which alone the pod is admitted, for people:
    `set topologyManagerScope: pod`; outside a kubelet `use scope pod`.
    """
    for alternatives in (OTHER_SCOPES, OTHER_POLICIES):
        others = [each for each in alternatives if any(getattr(rules, key) != value for key, value in each.items())]
        found = next(filter(admits, others), None)
        for key, value in found.items() if found is not None else ():
            is_kubelet = profile_of(rules.mode).starts_kubelet
            yield f"set {SETTINGS[key]}: {value}" if is_kubelet else f"use {key} {value}"


def format_amount(resource: ResourceName, amount: int) -> tuple[str, str]:
    """An amount and its unit, for people."""
    if resource == MEMORY or is_hugepages(resource):
        return format_gib(amount), f"GiB of {resource}"
    return (f"{amount / UNITS[CPU]:g}", "CPUs") if resource == CPU else (str(amount), clean(resource))
