"""
Describes which resources of a node are insufficient for a container, or for a pod that is aligned as a whole.

The kubelet reports TopologyAffinityError both when the node is full and when the free resources are on the wrong NUMA
nodes (v1.36.3). The code of topoalign's refusal distinguishes these cases. `NotAligned` means that the node has enough
free resources in total. Any other code names the resource of which too little is free in total. Devices are checked
first, in the order of their resource names, then CPUs, then memory.

    3 GPUs requested, policy restricted
    2 free: NotEnoughDevices
    4 free, two on each NUMA node: NotAligned, 3 nvidia.com/gpu (2, 2)
"""

from collections.abc import Mapping

from topoalign.core.cpu_assignment.packed import NotEnoughCpus
from topoalign.core.hints.cpu import available_cpus
from topoalign.core.hints.device_hints import by_counted_nodes, count_near, devices_free_for
from topoalign.core.hints.hint_rules import MOST_LISTED
from topoalign.core.hints.memory_hints import memory_nodes
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import held_by_pod, reusable_cpus, reusable_devices, reusable_memory
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.placement.device_choice import NoHealthyDevice, NotEnoughDevices
from topoalign.core.placement.memory_blocks import NotEnoughMemory, format_gib


def check_totals(asked: HintRequest) -> None:
    """Checks the node's free totals. Raises NoHealthyDevice, NotEnoughDevices, NotEnoughCpus or NotEnoughMemory."""
    state, demand, _ = asked
    held = held_by_pod(state, demand)
    for resource in sorted(demand.devices.keys() & state.hardware.devices.keys()):
        amount = demand.devices[resource]
        # devices that can be reused from init containers of the pod count as free
        free = len(reusable_devices(held, resource).union(state.ownership.free(resource)))
        if free < amount and not state.healthy(resource):
            raise NoHealthyDevice(resource)
        if free < amount:
            raise NotEnoughDevices(resource, amount, free)
    cpus = sum(_free_by_node(asked, CPU).values()) if demand.cpus else 0
    if cpus < demand.cpus:
        raise NotEnoughCpus(demand.cpus, cpus)
    if any(sum(_free_by_node(asked, name).values()) < amount for name, amount in demand.memory.items()):
        raise NotEnoughMemory(demand.memory)


def describe_free_amounts(asked: HintRequest) -> str:
    """
    The needed amounts, each with the free amounts per NUMA node in parentheses. A device near several NUMA nodes counts
    for each of them. Example: `3 nvidia.com/gpu (2, 2), 9 CPUs (8, 8)`. Empty on machines with more than `MOST_LISTED`
    NUMA nodes, or without any.
    """
    demand = asked.demand
    machine = asked.state.hardware.node_ids
    if not 0 < len(machine) <= MOST_LISTED:
        return ""
    needed = {
        name: demand.devices[name] for name in sorted(demand.devices.keys() & asked.state.hardware.devices.keys())
    }
    needed |= {CPU: demand.cpus} if demand.cpus else {}
    texts = []
    for name, amount in {**needed, **demand.memory}.items():
        free = _free_by_node(asked, name)
        by_node = [sum(count for mask, count in free.items() if mask >> node & 1) for node in machine]
        number, unit = _format_need(name, amount)
        texts.append(f"{number} {unit} ({', '.join(_format_need(name, each)[0] for each in by_node)})")
    return f"needed, and free on NUMA nodes {format_cpuset(machine)}: {', '.join(texts)}"


def _free_by_node(asked: HintRequest, resource: ResourceName) -> Mapping[Mask, int]:
    """
    NUMA nodes, as a mask -> amount of a resource that is free there for the demand, including what it can reuse from
    init containers of its pod.
    """
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
    devices = state.hardware.devices[resource]
    free = devices_free_for(asked, resource) | devices.some(reusable_devices(held, resource))
    return count_near(free, by_counted_nodes(devices, rules.mode), node_mask(state.hardware.node_ids))


def _format_need(resource: ResourceName, amount: int) -> tuple[str, str]:
    return format_amount(resource, amount * 1000 if resource == CPU else amount)  # here, CPUs are counted in whole CPUs


def format_amount(resource: ResourceName, amount: int) -> tuple[str, str]:
    """A human-readable amount and its unit. `amount` of CPUs: in millicores."""
    if resource == MEMORY or is_hugepages(resource):
        return format_gib(amount), f"GiB of {resource}"
    return (f"{amount / 1000:g}", "CPUs") if resource == CPU else (str(amount), clean(resource))
