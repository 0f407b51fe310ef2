"""Names that HAMi uses, which are fixed: its vendor, and annotations. Those of resources can be changed (`Slots`)."""

VENDOR = "NVIDIA"
"""The type of a request for NVIDIA's cards, and a part of the type of each such card."""

USE_TYPE = "nvidia.com/use-gputype"
NO_USE_TYPE = "nvidia.com/nouse-gputype"
USE_UUID = "nvidia.com/use-gpuuuid"
NO_USE_UUID = "nvidia.com/nouse-gpuuuid"
VGPU_MODE = "nvidia.com/vgpu-mode"
MODES = HAMI_CORE, MIG, MPS = "hami-core", "mig", "mps"
"""What keeps containers on a card apart: HAMi-core, MIG instances that are made for them, NVIDIA's MPS."""
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
HANDSHAKE = "hami.io/node-handshake"
"""Of a node: cards that are cordoned, the cards, and whether the device plugin is alive."""

DEVICES_ALLOCATED = "hami.io/vgpu-devices-allocated"
"""Of a pod: its cards."""
