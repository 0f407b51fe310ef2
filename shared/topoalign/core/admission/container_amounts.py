"""
What one container is given once it is aligned, and what of it a node has too little of in all.

Where a container is aligned says nothing about this: devices and CPUs of other NUMA nodes make up for what is not there
(kubelet v1.36.3, device manager and CPU manager).
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.cpu_assignment.packed import NotEnoughCpus
from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.cpus import NotEnoughCores, SplitCore
from topoalign.core.placement.devices import NoHealthyDevice, NotEnoughDevices, TooLarge, check_amount


class Step(msgspec.Struct, frozen=True):
    """What one container is given, after it was aligned."""

    devices: tuple[tuple[ResourceName, int, bool], ...]
    """In the order in which they are given; True: more than a container may ask for."""
    cpus: int
    counted: bool
    """Whether there are too few CPUs if fewer are free: on uneven machines the kubelet may give some that are in use."""
    whole_cores: bool
    """Whether the CPUs are given in whole cores."""
    splits_core: bool
    """Whether they are, and these are none."""
    stays: bool
    """Whether later containers do without what it has: False for plain init containers."""


def step_of(topology: Topology, rules: AdmissionRules, container: ContainerDemand) -> Step:
    """What a container is given on this machine. The kubelet passes over resources that nobody lists."""
    known = ((name, amount) for name, amount in container.devices.items() if name in topology.devices)
    whole, per_core = CpuOption.FULL_PCPUS_ONLY in rules.cpu_options, topology.cpu_topology.cpus_per_core
    return Step(
        devices=tuple((name, amount, is_too_large(topology, name, amount)) for name, amount in known),
        cpus=container.cpus,
        counted=topology.cpu_topology.is_even,
        whole_cores=whole,
        splits_core=whole and per_core > 0 and container.cpus % per_core > 0,
        stays=container.role != "init",
    )


def is_too_large(topology: Topology, resource: ResourceName, amount: int) -> bool:
    """Whether a container asks for more of a resource than it may."""
    try:
        check_amount(topology, resource, amount)
    except TooLarge:
        return True
    return False


def lacking_in(step: Step, devices: Mapping[ResourceName, int], cpus: int, whole_cores: int) -> str | None:
    """The code of what a container lacks where so much is free; empty: nothing. None: amounts do not tell."""
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
