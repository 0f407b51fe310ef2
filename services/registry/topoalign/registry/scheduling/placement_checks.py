"""
Whether a pod may be bound to a node at all, by what the API server shows of both: said before anything is reserved.

A bind comes from whoever reaches the scheduler's address. A kube-scheduler asks for what its filters have let pass, and for
pods that name it; anybody else may ask for any pod and any node.
"""

from collections.abc import Callable

from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.model import PodToSchedule

DEFAULT_SCHEDULER = "default-scheduler"

Allows = Callable[[PodToSchedule, NodeName], bool]
"""Whether Kubernetes has the node, and its filters leave it to the pod."""


class NodeNotAllowed(NoFit):
    """Raised for a pod that Kubernetes keeps off the node."""

    code = "NodeNotAllowed"

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"node {clean(node)} is not for the pod: there is none, it is cordoned, or a taint, the pod's nodeSelector or "
            "its node affinity keeps it off",
            "the scheduler tries again, on another node",
        )


class OtherScheduler(NoFit):
    """Raised for a pod that another scheduler is to bind."""

    code = "OtherScheduler"

    def __init__(self, scheduler: str) -> None:
        super().__init__(f"the pod names scheduler {clean(scheduler)}", "leave it to that one")


def check_placement(pod: SeenPod, node: NodeName, allows: Allows, scheduler: str) -> None:
    """
    Raises NodeNotAllowed and OtherScheduler. `scheduler`: the name of ours; empty where none is set, as the extender then
    serves whichever profiles it is configured for. Kubernetes' default scheduler may have it in any case.
    """
    named = pod.scheduler or DEFAULT_SCHEDULER
    if scheduler and named not in (scheduler, DEFAULT_SCHEDULER):
        raise OtherScheduler(named)
    if not allows(pod.to_schedule(), node):
        raise NodeNotAllowed(node)
