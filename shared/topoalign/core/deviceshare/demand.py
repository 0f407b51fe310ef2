"""Reads everything that a pod asks of a node's devices: quantities, hints, joint allocation, and partitions."""

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
"""The resources by which a pod with annotations asks for devices."""

OWN_DOMAIN = "topoalign.io/"
OF_USERS = (GANG, GANG_SIZE, GPU_COUNT)
"""The annotations in our domain that users write."""
KNOWN = frozenset((*ANNOTATIONS, ALLOCATED_ANNOTATION, *OF_USERS))
"""The annotations in the domains looked at; a gang is for the scheduler, and GPUs are for units of GPUs."""


class JointDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for."""

    requests: Mapping[DeviceType, Quantities] = {}
    """Normalised. Empty: nothing is asked."""
    hints: Mapping[DeviceType, Hint] = {}
    joint: tuple[DeviceType, ...] = ()
    """Types that are decided together, the primary one first."""
    required_scope: str = ""
    partition: PartitionSpec | None = None
    by_whole_name: bool = False
    """Whether GPUs are asked for as `nvidia.com/gpu`: those that are offered whole under this name."""
    compat: bool = False
    """Whether Koordinator's answers are wanted, with its known faults."""

    @property
    def gpu(self) -> GpuDemand | None:
        """What is asked of GPUs. None: nothing."""
        asked = self.requests.get(DeviceType.GPU)
        return None if asked is None else gpu_demand(asked)

    @property
    def is_shared(self) -> bool:
        """Whether shares of GPUs are asked for, so that others may have the rest."""
        return self.gpu is not None and self.gpu.shared

    @property
    def same_pcie(self) -> bool:
        """Whether all devices have to be below one root complex."""
        return self.required_scope == JointScope.SAME_PCIE

    @property
    def required_level(self) -> Level:
        """What all GPUs must have in common; a word that Koordinator does not know asks for nothing."""
        return LEVELS.get(self.hint(DeviceType.GPU).required_topology_scope, Level.NONE)

    @property
    def restricted(self) -> bool:
        """Whether only the best score group of partitions will do."""
        return self.partition is not None and self.partition.allocate_policy == PartitionPolicy.RESTRICTED

    def hint(self, kind: DeviceType) -> Hint:
        """How devices of this type are to be chosen."""
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
    """Whether a pod's devices are decided here."""
    return any(key in annotations for key in ANNOTATIONS)


def needs_co_allocated(annotations: Mapping[str, str]) -> bool:
    """Whether the containers of a pod must not start without the devices that go with their GPUs. Raises InvalidField."""
    annotated = read_annotations(annotations, compat=False)
    return annotated.joint is not None and annotated.joint.required_scope == JointScope.SAME_PCIE


def check_keys(annotations: Iterable[str]) -> None:
    """Raises InvalidField for an unknown annotation about devices: it would have no effect."""
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
    What a container asks for. Raises InvalidField for invalid annotations and requests, and for NICs asked for in two ways.

    A whole NIC by a virtual function, as `topoalign.io/nic: 2` with a `vfSelector`, is two functions of two NICs.
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
    What a container of Kubernetes asks for: whole GPUs and NICs of the kubelet, by its limits, and NICs or virtual functions
    that come with its GPUs. These are `koordinator.sh/rdma`, which the kubelet passes over; or where it asks for no NICs at
    all and `deviceTypes` names them, one. None: neither GPUs nor NICs, or annotations that are about none of them.

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
