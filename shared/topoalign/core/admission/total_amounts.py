"""
What a node has too little of in total for a container, or for a pod that is aligned as a whole.

A policy that aligns refuses a pod in the same way whether the node is full or what is free is on the wrong NUMA nodes
(kubelet v1.36.3, TopologyAffinityError). The code of our refusal tells these apart: a node with too few free devices, CPUs
or bytes in total has too few of them, and `NotAligned` means that it has enough. Devices come first, by name, then CPUs,
then memory.

    3 GPUs asked, policy restricted: 2 free: NotEnoughDevices; 4 free, two on each NUMA node: NotAligned
"""

from topoalign.core.cpu_assignment.packed import NotEnoughCpus
from topoalign.core.cpu_assignment.reserved import reserved_cpus
from topoalign.core.hints.cpu import shared_cpus
from topoalign.core.hints.memory import memory_nodes
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import held_by_pod, reusable_cpus, reusable_devices, reusable_memory
from topoalign.core.placement.devices import NoHealthyDevice, NotEnoughDevices
from topoalign.core.placement.memory import NotEnoughMemory


def check_totals(asked: HintRequest) -> None:
    """
    Raises NoHealthyDevice, NotEnoughDevices, NotEnoughCpus and NotEnoughMemory. What init containers of the pod left counts
    as free.
    """
    state, demand, rules = asked
    held = held_by_pod(state, demand)
    for resource in sorted(demand.devices.keys() & state.hardware.devices.keys()):
        amount = demand.devices[resource]
        free = len(reusable_devices(held, resource).union(state.ownership.free(resource)))
        if free < amount and not state.healthy(resource):
            raise NoHealthyDevice(resource)
        if free < amount:
            raise NotEnoughDevices(resource, amount, free)
    if demand.cpus:
        allocatable = shared_cpus(state, rules) - reserved_cpus(state.hardware, rules)
        cpus = len(allocatable | reusable_cpus(held))
        if cpus < demand.cpus:
            raise NotEnoughCpus(demand.cpus, cpus)
    if demand.memory:
        nodes = memory_nodes(state, rules).values()
        reusable = reusable_memory(held)
        for name, amount in demand.memory.items():
            left = sum(size for (_, resource), size in reusable.items() if resource == name)
            if sum(node.free.get(name, 0) for node in nodes) + left < amount:
                raise NotEnoughMemory(demand.memory)
