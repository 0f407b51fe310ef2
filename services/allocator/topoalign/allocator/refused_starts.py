"""
What is said of a container that does not start, whatever is wrong with its devices: an event of its pod, once.

The kubelet tries to start the container again and again, so who refuses remembers of which one it has recorded that.
"""

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.hints.devices import DeviceProvider
from topoalign.core.model.allocations import Owner
from topoalign.core.model.decisions import Explanation, Refusal
from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import ContainerName
from topoalign.core.model.requests import PodRequest
from topoalign.core.state.reservations import NodeReservations

STARTED_AGAIN = "the kubelet starts the container again; see whether its device plugin directory can be read"
"""The remedy where the kubelet does not tell yet what is to be known of the container."""


def reserved_owner(reserved: NodeReservations, pod_uid: str, container: str) -> Owner | None:
    """
    A container by the names of the pod for which something is reserved: PodResources tells none of a pod that has devices by
    init containers alone. None: nothing is reserved for it, or the container is not known.
    """
    kept = next((each for each in reserved.reservations if each.pod_uid == pod_uid), None)
    if kept is None or not container:
        return None
    return Owner(namespace=kept.namespace, pod=kept.pod, container=ContainerName(container))


def record_refused_start(ledger: Ledger, owner: Owner, misfit: NoFit) -> None:
    """Records that this container was not started, and why. Raises StateFault."""
    refusal = Refusal(
        reason="PreStartContainer",
        code=misfit.code,
        finding=misfit.finding,
        remedy=misfit.remedy,
        container=owner.container,
        provider=DeviceProvider.name,
        explanation=Explanation(),
    )
    ledger.refuse(PodRequest(namespace=owner.namespace, name=owner.pod, containers=()), refusal)
