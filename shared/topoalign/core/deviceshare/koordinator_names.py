"""
Names of Koordinator's device APIs (koordinator a7a1b76b): device types, annotations, resources and enumerations.

The names of resources without a domain are Koordinator's own, `koordinator.sh/<name>`.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class DeviceType(StrEnum):
    """Koordinator's types of devices, in the order in which they are decided where nothing else orders them."""

    GPU = "gpu"
    RDMA = "rdma"
    FPGA = "fpga"


JOINT_ANNOTATION = "scheduling.koordinator.sh/device-joint-allocate"
HINT_ANNOTATION = "scheduling.koordinator.sh/device-allocate-hint"
PARTITION_ANNOTATION = "scheduling.koordinator.sh/gpu-partition-spec"
ANNOTATIONS = (JOINT_ANNOTATION, HINT_ANNOTATION, PARTITION_ANNOTATION)
"""A pod that carries one of these is decided here."""

DEVICE_PREFIX = "scheduling.koordinator.sh/device-"
"""How the keys begin that are about devices."""
ALLOCATED_ANNOTATION = f"{DEVICE_PREFIX}allocated"
"""What Koordinator's scheduler gave; it is for the node, and no part of the request."""

PARTITION_TABLE = "scheduling.koordinator.sh/gpu-partitions"

CORE = "koordinator.sh/gpu-core"
"""Hundredths of a GPU's compute."""
RATIO = "koordinator.sh/gpu-memory-ratio"
"""Hundredths of a GPU's memory."""
GPU_BYTES = "koordinator.sh/gpu-memory"
SHARED = "koordinator.sh/gpu.shared"
"""How many GPUs the other quantities are spread over."""
HUNDREDTHS = "koordinator.sh/gpu"
"""Hundredths of GPUs, compute and memory alike."""
RDMA = "koordinator.sh/rdma"
FPGA = "koordinator.sh/fpga"
NPU_CORE = "huawei.com/npu-core"
NPU_CPU = "huawei.com/npu-cpu"
NPU_DVPP = "huawei.com/npu-dvpp"
GPU_RESOURCES = (HUNDREDTHS, CORE, RATIO, GPU_BYTES, SHARED)
"""Koordinator's own for GPUs."""
WHOLE_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "dcu.com/gpu")
"""Resources that count whole GPUs."""

WHOLE = 100
"""Units of a device."""
FUNCTION = 1
"""Units of a NIC that stand for one of its virtual functions; more than that is the NIC as a whole."""

RESOURCES: dict[DeviceType, tuple[str, ...]] = {
    DeviceType.GPU: (*WHOLE_GPUS, *GPU_RESOURCES, NPU_CORE, NPU_CPU, NPU_DVPP),
    DeviceType.RDMA: (RDMA,),
    DeviceType.FPGA: (FPGA,),
}


class Strategy(StrEnum):
    """How many devices a quantity stands for."""

    NONE = ""
    APPLY_FOR_ALL = "ApplyForAll"
    """Every device there is, each with the full quantity."""
    REQUESTS_AS_COUNT = "RequestsAsCount"
    """As many devices, one unit each."""


class Exclusive(StrEnum):
    """With which other pods' devices a device may not be shared or placed."""

    NONE = ""
    DEVICE = "DeviceLevel"
    PCIE = "PCIeLevel"


class Level(IntEnum):
    """Koordinator's numbers of the scopes: the higher, the nearer. A scope that is not known has level 0."""

    NONE = 0
    NODE = 1
    NUMA_NODE = 2
    PCIE = 3
    DEVICE = 4


LEVELS: Mapping[str, Level] = {
    "": Level.NONE,
    "Device": Level.DEVICE,
    "PCIe": Level.PCIE,
    "NUMANode": Level.NUMA_NODE,
    "Node": Level.NODE,
}
"""Topology scope, which all GPUs of a pod must have in common -> its number."""


class JointScope(StrEnum):
    """What all devices of a joint allocation must have in common."""

    NONE = ""
    SAME_PCIE = "SamePCIe"


class PartitionPolicy(StrEnum):
    """Whether only the best score group of a partition table will do."""

    NONE = ""
    BEST_EFFORT = "BestEffort"
    RESTRICTED = "Restricted"
