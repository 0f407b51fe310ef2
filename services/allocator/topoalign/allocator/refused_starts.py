"""
What is said of a container that does not start, whatever is wrong with its devices: an event of its pod, once.

The kubelet tries to start the container again and again, so who refuses remembers of which one it has recorded that.
"""

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.hints.devices import DeviceProvider
from topoalign.core.model.allocations import Owner
from topoalign.core.model.decisions import Explanation, Refusal
from topoalign.core.model.errors import NoFit
from topoalign.core.model.requests import PodRequest

STARTED_AGAIN = "the kubelet starts the container again; see whether its device plugin directory can be read"
"""The remedy where the kubelet does not tell yet what is to be known of the container."""


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
