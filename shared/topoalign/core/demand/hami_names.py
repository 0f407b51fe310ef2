"""Names that HAMi uses: resources, which can be changed, and annotations, which are fixed."""

import msgspec

from topoalign.core.model.ids import ResourceName

VENDOR = "NVIDIA"
"""The type of a request for NVIDIA's cards, and a part of the type of each such card."""

USE_TYPE = "nvidia.com/use-gputype"
NO_USE_TYPE = "nvidia.com/nouse-gputype"
USE_UUID = "nvidia.com/use-gpuuuid"
NO_USE_UUID = "nvidia.com/nouse-gpuuuid"
VGPU_MODE = "nvidia.com/vgpu-mode"
NUMA_BIND = "nvidia.com/numa-bind"
GPU_POLICY = "hami.io/gpu-scheduler-policy"
NODE_POLICY = "hami.io/node-scheduler-policy"
SCORING_WEIGHTS = "hami.io/device-scoring-weights"
OF_PODS = (
    USE_TYPE,
    NO_USE_TYPE,
    USE_UUID,
    NO_USE_UUID,
    VGPU_MODE,
    NUMA_BIND,
    GPU_POLICY,
    NODE_POLICY,
    SCORING_WEIGHTS,
)
"""What the annotations of a pod say of its cards."""

CORDON = "hami.io/device-cordon"
REGISTER = "hami.io/node-nvidia-register"
PAIR_SCORES = "hami.io/node-nvidia-score"
HANDSHAKE = "hami.io/node-handshake"
"""Of a node: cards that are cordoned, the cards, the scores of their links, and whether the device plugin is alive."""

DEVICES_ALLOCATED = "hami.io/vgpu-devices-allocated"
MIG_ALLOCATIONS = "hami.io/vgpu-mig-allocations"
"""Of a pod: its cards, and its MIG instances."""


class ResourceNames(msgspec.Struct, frozen=True, kw_only=True):
    """What a container asks for its share under."""

    count: ResourceName = ResourceName("nvidia.com/gpu")
    """Cards."""
    memory: ResourceName = ResourceName("nvidia.com/gpumem")
    """MiB of each card, times the memory factor."""
    percentage: ResourceName = ResourceName("nvidia.com/gpumem-percentage")
    """Memory as hundredths of each card's."""
    cores: ResourceName = ResourceName("nvidia.com/gpucores")
    """Hundredths of each card's multiprocessors."""
    priority: ResourceName = ResourceName("nvidia.com/priority")
    """0 high, 1 low."""


DEFAULT_NAMES = ResourceNames()
