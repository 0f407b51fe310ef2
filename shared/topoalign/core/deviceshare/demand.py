"""Reads all device requests of a pod: quantities, hints, joint allocation, and partitions."""

from collections.abc import Iterable, Mapping

import msgspec

from topoalign.core.deviceshare.annotations import (
    NO_HINT,
    Hint,
    PartitionSpec,
    device_annotation_path,
    read_annotations,
)
from topoalign.core.deviceshare.koordinator_names import (
    ALLOCATED_ANNOTATION,
    ANNOTATIONS,
    DEVICE_PREFIX,
    FPGA,
    FUNCTION,
    GPU_RESOURCES,
    HINT_ANNOTATION,
    LEVELS,
    RDMA,
    WHOLE,
    DeviceType,
    JointScope,
    Level,
    PartitionPolicy,
    Strategy,
)
from topoalign.core.deviceshare.request_combinations import FIELD, GpuDemand, Quantities, by_type, gpu_demand
from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.ids import GPU, NIC, ResourceName
from topoalign.core.model.requests import GANG, GANG_SIZE, GPU_COUNT

RESOURCES = frozenset(map(ResourceName, (*GPU_RESOURCES, RDMA, FPGA))) | {GPU, NIC}
"""The resource names under which a pod with device annotations requests devices."""

OWN_DOMAIN = "topoalign.io/"
OF_USERS = (GANG, GANG_SIZE, GPU_COUNT)
"""The annotations in topoalign's domain that users set."""
KNOWN = frozenset((*ANNOTATIONS, ALLOCATED_ANNOTATION, *OF_USERS))
"""The known annotations in the checked domains. Gangs are for the scheduler, and the GPU count is for units of GPUs."""


class JointDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The device requests of a pod or a container."""

    requests: Mapping[DeviceType, Quantities] = {}
    """Normalized. Empty: no devices are requested."""
    hints: Mapping[DeviceType, Hint] = {}
    joint: tuple[DeviceType, ...] = ()
    """The types that are allocated together, the primary type first."""
    required_scope: str = ""
    partition: PartitionSpec | None = None
    by_whole_name: bool = False
    """Whether GPUs are requested as `nvidia.com/gpu`, so that only GPUs that are offered whole are allocated."""
    compat: bool = False
    """Whether to decide as Koordinator does, including its known bugs."""

    @property
    def gpu(self) -> GpuDemand | None:
        """The GPU request. None: no GPUs are requested."""
        asked = self.requests.get(DeviceType.GPU)
        return None if asked is None else gpu_demand(asked)

    @property
    def is_shared(self) -> bool:
        """Whether shares of GPUs are requested, so that other pods can get the rest."""
        return self.gpu is not None and self.gpu.shared

    @property
    def same_pcie(self) -> bool:
        """Whether each device must have devices of all other joint types below the same PCIe scope (`SamePCIe`)."""
        return self.required_scope == JointScope.SAME_PCIE

    @property
    def required_level(self) -> Level:
        """The scope that all GPUs must share. A value that Koordinator does not know has no effect."""
        return LEVELS.get(self.hint(DeviceType.GPU).required_topology_scope, Level.NONE)

    @property
    def restricted(self) -> bool:
        """Whether only the partitions with the best score are allowed."""
        return self.partition is not None and self.partition.allocate_policy == PartitionPolicy.RESTRICTED

    def hint(self, kind: DeviceType) -> Hint:
        """How to choose devices of this type."""
        return self.hints.get(kind, NO_HINT)


def read_demand(annotations: Mapping[str, str], requests: Quantities, *, compat: bool = False) -> JointDemand:
    """The demand of a pod, from its annotations and the sum of its containers' requests. Raises InvalidField."""
    asked = by_type(requests)
    if not asked:
        return JointDemand(compat=compat)
    annotated = read_annotations(annotations, compat=compat)
    listed = annotated.joint.device_types if annotated.joint is not None else ()
    joint = [
        DeviceType(kind)
        for kind in listed
        if kind in asked and annotated.hints.get(DeviceType(kind), NO_HINT).allocate_strategy != Strategy.APPLY_FOR_ALL
    ]
    return JointDemand(
        requests=asked,
        hints=annotated.hints,
        joint=tuple(joint),
        required_scope=annotated.joint.required_scope if annotated.joint is not None else "",
        partition=annotated.partition,
        compat=compat,
    )


def is_joint(annotations: Mapping[str, str]) -> bool:
    """Whether a pod has annotations for joint allocation."""
    return any(key in annotations for key in ANNOTATIONS)


def needs_co_allocated(annotations: Mapping[str, str]) -> bool:
    """Whether containers of a pod must not start without the devices allocated with their GPUs. Raises InvalidField."""
    annotated = read_annotations(annotations, compat=False)
    return annotated.joint is not None and annotated.joint.required_scope == JointScope.SAME_PCIE


def check_keys(annotations: Iterable[str]) -> None:
    """Raises InvalidField for an unknown device annotation, because it would have no effect."""
    for key in annotations:
        if key.startswith((DEVICE_PREFIX, OWN_DOMAIN)) and key not in KNOWN:
            usable = OF_USERS if key.startswith(OWN_DOMAIN) else ANNOTATIONS
            raise InvalidField(
                f"pod.annotations[{clean(key, 80)}]", "is not known", f"use one of {quoted(usable)}, or leave it out"
            )


def container_demand(
    annotations: Mapping[str, str], requests: Mapping[ResourceName, int], *, compat: bool = False
) -> JointDemand:
    """
    The device requests of a container. Raises InvalidField for invalid annotations and requests, and for NICs that are
    requested under two names.

    With `vfSelector`, `topoalign.io/nic` counts virtual functions: `topoalign.io/nic: 2` is two functions of two NICs.
    """
    units = {str(name): amount for name, amount in requests.items() if name != NIC}
    nics = requests.get(NIC, 0)
    if nics and units.get(RDMA):
        raise InvalidField(
            f"{FIELD}[{RDMA}]", f"asked for together with {NIC}", "ask for NICs under one of the two names"
        )
    if nics:
        units[RDMA] = nics * WHOLE
    demand = read_demand(annotations, units, compat=compat)
    if requests.get(GPU):
        demand = msgspec.structs.replace(demand, by_whole_name=True)
    hint = demand.hint(DeviceType.RDMA)
    if not 0 < nics < WHOLE or hint.vf_selector is None:
        return demand
    if nics > 1 or hint.allocate_strategy != Strategy.APPLY_FOR_ALL:
        hint = msgspec.structs.replace(hint, allocate_strategy=Strategy.REQUESTS_AS_COUNT)
    return msgspec.structs.replace(
        demand,
        hints={**demand.hints, DeviceType.RDMA: hint},
        requests={**demand.requests, DeviceType.RDMA: {RDMA: nics * FUNCTION}},
    )


def kubelet_demand(annotations: Mapping[str, str], devices: Mapping[ResourceName, int]) -> JointDemand | None:
    """
    The device requests of a container in Kubernetes: whole GPUs and NICs that the kubelet allocates, by the container's
    limits, and NICs or virtual functions that are allocated with its GPUs. The latter are requested as
    `koordinator.sh/rdma`, which the kubelet ignores. If no NICs are requested and `deviceTypes` names them, one NIC is
    requested. None: neither GPUs nor NICs are requested.

    Raises InvalidField for invalid annotations and requests.
    """
    asked = {name: devices[name] for name in (GPU, NIC) if devices.get(name)}
    if not asked:
        return None
    annotated = read_annotations(annotations, compat=False)
    if asked.get(NIC) and annotated.hints.get(DeviceType.RDMA, NO_HINT).vf_selector is not None:
        raise InvalidField(
            f"{device_annotation_path(HINT_ANNOTATION)}.{DeviceType.RDMA}.vfSelector",
            f"has no effect on {NIC}, of which a kubelet gives whole devices",
            f"ask for {RDMA} instead, or leave NICs out of the limits and name them in deviceTypes",
        )
    types = annotated.joint.device_types if annotated.joint is not None else ()
    units = ResourceName(RDMA)
    if asked.get(GPU) and devices.get(units):
        asked[units] = devices[units]
    elif asked.get(GPU) and DeviceType.RDMA in types and not asked.get(NIC):
        asked[NIC] = 1
    return container_demand(annotations, asked)
