"""
Converts a pod request to a `PodDemand`: its requests to the resource managers under the rules of a node.

The demand of a container contains its request to each manager: devices by resource, jointly allocated devices,
exclusive CPUs, and memory by kind. The demand of a pod contains the same for the pod as a whole, and the demands of its
containers in the order of the decisions: init containers, then app containers.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.resource_quantities import (
    Quantities,
    device_limits,
    effective_requests,
    exclusive_cpus,
    may_be_exclusive,
    memory_part,
    pod_cpus,
    pod_memory,
    pod_wide,
)
from topoalign.core.demand.share_annotations import ANY_GPU, GpuRules, read_gpu_rules
from topoalign.core.demand.shares import Share, read_gpu_count, share_in_slots, share_of_units, units_asked
from topoalign.core.deviceshare.demand import (
    RESOURCES,
    JointDemand,
    check_keys,
    container_demand,
    is_joint,
    kubelet_demand,
)
from topoalign.core.deviceshare.request_combinations import FIELD
from topoalign.core.model.allocations import Role
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import (
    GPU,
    MEMORY,
    NIC,
    ContainerName,
    Namespace,
    PodName,
    ResourceName,
    is_hugepages,
    is_native,
)
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, CpuOption, PodRequest
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES
from topoalign.core.profile import Profile, profile_of

KOORDINATORS = RESOURCES - {GPU, NIC}
NO_RESOURCES: frozenset[ResourceName] = frozenset()


class ContainerDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one container."""

    namespace: Namespace
    pod: PodName
    container: ContainerName
    path: str
    """Its path in the pod's manifest: `spec.containers[0]`."""
    role: Role
    asked: Quantities
    """All its requests: what the node must have. Limits replace missing requests. For devices, these are the limits."""
    devices: Quantities
    """Devices by resource, in the order of the names, which is the order in which the kubelet asks for hints."""
    together: frozenset[ResourceName] = NO_RESOURCES
    """Resources of `devices` that are aligned and chosen together. Empty for a kubelet, which aligns none together."""
    joint: JointDemand | None = None
    """The devices that are allocated jointly, including co-allocated ones. None: there are none."""
    cpus: int = 0
    """Number of exclusive CPUs; 0: it runs in the shared pool."""
    memory: Quantities = {}
    """Bytes of memory and of each hugepage size that the memory manager allocates, in the order of the names."""
    gpu_rules: GpuRules = ANY_GPU
    """The pod's annotations that restrict the GPUs on which it gets slots."""
    gpus: int = 1
    """Number of GPUs over which its units are spread."""

    @property
    def containers(self) -> "tuple[ContainerDemand, ...]":
        """The container itself, so that a container and a pod have the same attribute."""
        return (self,)

    def share(self, topology: Topology) -> Share | None:
        """The share of GPUs that it requests in units or slots on this machine; None: it requests none."""
        return share_in_slots(topology, self.devices, self.gpu_rules) or self.share_in_units(topology)

    def share_in_units(self, topology: Topology) -> Share | None:
        """The share of GPUs that it requests in units on this machine; None: it requests none."""
        asked = units_asked(topology, self.devices)
        return None if asked is None else share_of_units(asked, self.gpus)


class PodDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a pod. `devices`, `together`, `cpus` and `memory` are those of the pod as a whole."""

    request: PodRequest
    rules: AdmissionRules
    """The rules by which it was read and is decided."""
    namespace: Namespace
    pod: PodName
    container: None = None
    containers: tuple[ContainerDemand, ...]
    devices: Quantities
    together: frozenset[ResourceName]
    cpus: int
    memory: Quantities
    manages_memory: bool
    jointly: bool
    """
    Whether some devices are chosen together: the pod has annotations about devices, or requests devices by Koordinator's
    names and no kubelet decides.
    """

    @property
    def annotations(self) -> Mapping[str, str]:
        """All annotations of the pod, for checks of annotations that do not affect the demand."""
        return self.request.annotations

    @property
    def device_names(self) -> frozenset[ResourceName]:
        """The device plugin resources that its containers name, including those with a limit of 0, in any mode."""
        return frozenset(name for each in self.containers for name in each.asked if not is_native(name))

    def of(self, container: ContainerName | None) -> "Demand":
        """
        The demand of the container with this name; None: the demand of the pod as a whole. Raises InvalidField if the
        pod has no such container.
        """
        if container is None:
            return self
        found = next((each for each in self.containers if each.container == container), None)
        if found is None:
            raise InvalidField(
                "container", f"the pod has no container {container!r}", "name one of the pod's containers"
            )
        return found


Demand = ContainerDemand | PodDemand
"""The unit of alignment: a container, or in scope `pod` the whole pod."""


def read_pod(pod: PodRequest, rules: AdmissionRules) -> PodDemand:
    """The demand of a pod. Raises InvalidField for an invalid request, rules, or annotations that this mode reads."""
    return pod_demand(validate_pod(pod), rules)


def pod_demand(pod: PodRequest, rules: AdmissionRules) -> PodDemand:
    """A validated pod's demand. Raises InvalidField for invalid rules, or invalid annotations that this mode reads."""
    check_rules(rules)
    profile = profile_of(rules.mode)
    annotated = is_joint(pod.annotations)
    if profile.aligns_jointly:
        check_keys(pod.annotations)
        requests = [each.requests for each in (*pod.init_containers, *pod.containers)]
        annotated = annotated or any(not KOORDINATORS.isdisjoint(each) for each in requests)
    manages_memory = rules.memory_manager == "Static" and may_be_exclusive(pod, profile)
    containers = tuple(
        _read_container(pod, where, each, rules, profile, annotated, manages_memory)
        for where, each in containers_with_paths(pod)
    )
    return PodDemand(
        request=pod,
        rules=rules,
        namespace=pod.namespace,
        pod=pod.name,
        containers=containers,
        devices=_sort_devices(pod_wide(pod, device_limits), profile),
        together=NO_RESOURCES.union(*(each.together for each in containers)),
        cpus=pod_cpus(pod, profile) if rules.cpu_manager == "static" else 0,
        memory=_sort_by_resource(pod_memory(pod, profile)) if manages_memory else {},
        manages_memory=manages_memory,
        jointly=annotated,
    )


def _read_container(
    pod: PodRequest,
    where: str,
    container: ContainerRequest,
    rules: AdmissionRules,
    profile: Profile,
    jointly: bool,
    manages_memory: bool,
) -> ContainerDemand:
    """The demand of the container at path `where`. Raises InvalidField for annotations that are invalid for it."""
    devices = _sort_devices(device_limits(container), profile)
    together = RESOURCES.intersection(devices) if jointly and profile.aligns_jointly else NO_RESOURCES
    joint = None
    try:
        if together:
            part = {name: devices[name] for name in devices if name in together}
            joint = container_demand(pod.annotations, part, compat=rules.compat == "koordinator")
        elif jointly:
            joint = kubelet_demand(pod.annotations, devices)
    except InvalidField as error:
        if not error.field.startswith(FIELD):  # an annotation
            raise
        field = f"pod.{where.removeprefix('spec.')}.limits{error.field.removeprefix(FIELD)}"
        raise type(error)(field, error.finding.removeprefix(f"{error.field}: "), error.remedy) from error
    return ContainerDemand(
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        path=where,
        role="sidecar" if container.sidecar else "init" if where.startswith("spec.initContainers") else "app",
        asked=effective_requests(container),
        devices=devices,
        together=together,
        joint=joint,
        cpus=exclusive_cpus(pod, container, profile) if rules.cpu_manager == "static" else 0,
        memory=_sort_by_resource(memory_part(container, profile)) if manages_memory else {},
        gpu_rules=read_gpu_rules(pod.annotations, as_hami=rules.compat == "hami"),
        gpus=read_gpu_count(pod.annotations) or 1,
    )


def _sort_devices(limits: Quantities, profile: Profile) -> dict[ResourceName, int]:
    return _sort_by_resource({name: n for name, n in limits.items() if n or profile.asks_for_zero_devices})


def _sort_by_resource(amounts: Quantities) -> dict[ResourceName, int]:
    return {name: amounts[name] for name in sorted(amounts)}


CONFLICTS = (
    (CpuOption.FULL_PCPUS_ONLY, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_NUMA),
)
"""Pairs of options that the kubelet does not accept together at its start."""


def check_rules(rules: AdmissionRules) -> None:
    """Raises InvalidField for rules with which the kubelet would not start on any machine (v1.36.3)."""
    _check_cpu_rules(rules)
    _check_memory_rules(rules)
    if rules.max_allowable_numa_nodes < 8:
        raise InvalidField(
            "rules.max_allowable_numa_nodes",
            f"{rules.max_allowable_numa_nodes} is below 8",
            "use 8 or more, as the kubelet does",
        )


def _check_cpu_rules(rules: AdmissionRules) -> None:
    try:
        parse_cpuset(rules.reserved_cpus)
    except ValueError as error:
        raise InvalidField("rules.reserved_cpus", clean(str(error)), "list CPUs as the kernel does: 0-3,8") from error
    if rules.reserved_cpu_count < 0:
        raise InvalidField("rules.reserved_cpu_count", f"{rules.reserved_cpu_count} is below 0", "use 0 or more CPUs")
    if rules.cpu_options and rules.cpu_manager == "none":
        raise InvalidField(
            "rules.cpu_options",
            "the kubelet does not start with options for the CPU manager none",
            "leave the options out, or set cpu_manager to static",
        )
    for one, other in CONFLICTS:
        if {one, other} <= rules.cpu_options:
            raise InvalidField(
                "rules.cpu_options",
                f"the kubelet does not start with both {one.value} and {other.value}",
                "leave one of them out",
            )
    if CpuOption.ALIGN_BY_SOCKET in rules.cpu_options and POLICIES[rules.policy].single_node:
        raise InvalidField(
            "rules.cpu_options",
            f"the kubelet does not start with {CpuOption.ALIGN_BY_SOCKET.value} under policy {rules.policy.value}",
            "leave the option out, or use policy restricted or best-effort",
        )


def _check_memory_rules(rules: AdmissionRules) -> None:
    for node, amounts in rules.reserved_memory.items():
        for resource, size in amounts.items():
            field = f"rules.reserved_memory[{node}][{clean(resource)}]"
            if resource != MEMORY and not is_hugepages(resource):
                raise InvalidField(field, "neither memory nor hugepages", "reserve memory or hugepages-<size> here")
            if size < 0:
                raise InvalidField(field, f"{size} is below 0", "use 0 or more bytes")
