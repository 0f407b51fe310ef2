"""
Names of Koordinator's device APIs (koordinator a7a1b76b): device types, annotations, resources and enumerations.

A resource name without a domain stands for Koordinator's resource `koordinator.sh/<name>`.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class DeviceType(StrEnum):
    """Koordinator's device types, in the default order of allocation."""

    GPU = "gpu"
    RDMA = "rdma"
    FPGA = "fpga"


JOINT_ANNOTATION = "scheduling.koordinator.sh/device-joint-allocate"
HINT_ANNOTATION = "scheduling.koordinator.sh/device-allocate-hint"
PARTITION_ANNOTATION = "scheduling.koordinator.sh/gpu-partition-spec"
ANNOTATIONS = (JOINT_ANNOTATION, HINT_ANNOTATION, PARTITION_ANNOTATION)
"""The devices of a pod with one of these annotations are allocated jointly."""

DEVICE_PREFIX = "scheduling.koordinator.sh/device-"
"""The prefix of annotation keys about devices."""
ALLOCATED_ANNOTATION = f"{DEVICE_PREFIX}allocated"
"""The devices that Koordinator's scheduler allocated. The annotation is for the node, and not part of the request."""

PARTITION_TABLE = "scheduling.koordinator.sh/gpu-partitions"

CORE = "koordinator.sh/gpu-core"
"""Hundredths of a GPU's compute."""
RATIO = "koordinator.sh/gpu-memory-ratio"
"""Hundredths of a GPU's memory."""
GPU_BYTES = "koordinator.sh/gpu-memory"
SHARED = "koordinator.sh/gpu.shared"
"""The number of GPUs over which the other quantities are divided."""
HUNDREDTHS = "koordinator.sh/gpu"
"""Hundredths of a GPU, for both compute and memory."""
RDMA = "koordinator.sh/rdma"
FPGA = "koordinator.sh/fpga"
NPU_CORE = "huawei.com/npu-core"
NPU_CPU = "huawei.com/npu-cpu"
NPU_DVPP = "huawei.com/npu-dvpp"
GPU_RESOURCES = (HUNDREDTHS, CORE, RATIO, GPU_BYTES, SHARED)
"""Koordinator's GPU resources."""
WHOLE_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "dcu.com/gpu")
"""Resources that count whole GPUs."""

WHOLE = 100
"""Units of a whole device."""
FUNCTION = 1
"""Units of a NIC that mean one virtual function. More units mean the whole NIC."""

RESOURCES: dict[DeviceType, tuple[str, ...]] = {
    DeviceType.GPU: (*WHOLE_GPUS, *GPU_RESOURCES, NPU_CORE, NPU_CPU, NPU_DVPP),
    DeviceType.RDMA: (RDMA,),
    DeviceType.FPGA: (FPGA,),
}


class Strategy(StrEnum):
    """How many devices a quantity stands for."""

    NONE = ""
    APPLY_FOR_ALL = "ApplyForAll"
    """All devices, each with the full quantity."""
    REQUESTS_AS_COUNT = "RequestsAsCount"
    """As many devices as the quantity, with one unit each."""


class Exclusive(StrEnum):
    """The scope that a device must not share with devices in use: the device itself, or its PCIe scope."""

    NONE = ""
    DEVICE = "DeviceLevel"
    PCIE = "PCIeLevel"


class Level(IntEnum):
    """Koordinator's levels of topology scopes. A higher level is a narrower scope. An unknown scope has level 0."""

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
"""Topology scope that all GPUs of a pod must share -> its level."""


class JointScope(StrEnum):
    """The scope that the devices of a joint allocation must share."""

    NONE = ""
    SAME_PCIE = "SamePCIe"


class PartitionPolicy(StrEnum):
    """Whether only the partitions with the best score in the table are allowed."""

    NONE = ""
    BEST_EFFORT = "BestEffort"
    RESTRICTED = "Restricted"
