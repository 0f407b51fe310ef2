"""
Koordinator's names for GPUs, which a kubelet passes over.

A kubelet gives what its device plugins list, and nobody lists `koordinator.sh/gpu`: a container that asks for GPUs by
Koordinator's names alone would start without one. So a pod with Koordinator's annotations is refused that asks so where a
kubelet decides. In mode `best` these names ask for GPUs (`core.deviceshare`).
"""

from topoalign.core.demand.field_paths import containers_of
from topoalign.core.deviceshare.demand import is_joint
from topoalign.core.deviceshare.names import GPU_RESOURCES
from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import PodRequest


class PassedOverByKubelet(NoFit):
    """Raised for a pod that asks for GPUs by a name that a kubelet passes over; `field` is its path in the manifest."""

    code = "PassedOverByKubelet"

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(
            f"{field}: a kubelet passes this name over, and gives no GPU for it",
            "ask for a part of a GPU in units (tencent.com/vcuda-core, tencent.com/vcuda-memory) or slots (nvidia.com/gpu "
            "with nvidia.com/gpucores and nvidia.com/gpumem), and for whole ones as nvidia.com/gpu",
        )


def check_not_passed_over(pod: PodRequest) -> None:
    """Raises PassedOverByKubelet for the first of Koordinator's names for GPUs by which a pod with its annotations asks."""
    for where, container in containers_of(pod) if is_joint(pod.annotations) else ():
        for name in map(ResourceName, GPU_RESOURCES):
            if container.limits.get(name) or container.requests.get(name):
                raise PassedOverByKubelet(f"{where}.resources.limits[{name}]")
