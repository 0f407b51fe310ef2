"""The NVLink fabric of a GPU, as nvmlDeviceGetGpuFabricInfoV reports it. Constants: NVML as in nvidia-ml-py 13.615.71."""

from typing import Any
from uuid import UUID

from topoalign.core.model.topology.model import Fabric

NOT_STARTED = 1
IN_PROGRESS = 2
COMPLETED = 3
"""nvmlGpuFabricState_t; 0 is not supported. Only `COMPLETED` has a status, a cluster and a health."""
TRUE = 1
"""Of a field of the healthMask that is a yes or no; 0 is not supported, 2 is false."""
CONFIGURED = 1
"""The largest value of the field INCORRECT_CONFIGURATION that is no error; 0 is not supported."""


def joined_fabric(info: Any) -> Fabric | None:
    """The NVLink domain that the GPU has joined; None for no domain, or one within the node, whose cluster is all zeros."""
    if info is None or info.state != COMPLETED or info.status != 0 or not any(info.clusterUuid):
        return None
    return Fabric(cluster=str(UUID(bytes=bytes(info.clusterUuid))), clique=int(info.cliqueId))


def fabric_state(info: Any) -> str:
    """`Gpu.fabric_state`; empty if the fabric is in order or not supported."""
    if info is None or info.state not in (NOT_STARTED, IN_PROGRESS, COMPLETED):
        return ""
    if info.state != COMPLETED:
        return "not-started" if info.state == NOT_STARTED else "in-progress"
    if info.status != 0:
        return "failed"
    health = int(getattr(info, "healthMask", 0))
    degraded_bandwidth = health & 0x3 == TRUE
    route_unhealthy = health >> 4 & 0x3 == TRUE
    incorrect_configuration = health >> 8 & 0xF > CONFIGURED
    return "degraded" if degraded_bandwidth or route_unhealthy or incorrect_configuration else ""
