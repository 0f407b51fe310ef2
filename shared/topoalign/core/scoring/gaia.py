"""
The order in which gpu-admission prefers nodes: of those on which the pod fits, the one first that has the least left.

    cores left of all GPUs in units, then their memory, then the name
    a: 150 cores and 200 blocks, b: 150 and 180, c: 800 and 1280 are tried in the order b, a, c

gpu-admission leaves no other node than the first on which the pod fits; here the others come after it, and last those on
which it finds no room, in the same order: whether topoalign does, the filter has said. A pod without such a GPU, or of
memory alone, it lets go anywhere: to such a one all nodes are equal. The cards that it promises are not taken over, because
gpu-manager chooses again (`sharing.gaia`). Source: gpu-admission 47d56ae, predicate.
"""

import msgspec

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.shares import share_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES, MEMORY_BLOCK
from topoalign.core.sharing.cards import ShareRequest
from topoalign.core.sharing.choosers import unit_candidates
from topoalign.core.sharing.gaia.admission import AdmissionNode, Load, asks_for_gpu, rank
from topoalign.core.state.fold import NodeState

Containers = tuple[ShareRequest, ...]
"""What each container of a pod asks for; (): gpu-admission lets the pod go anywhere."""


def containers_of(topology: Topology, demand: PodDemand) -> Containers:
    """
    The containers that gpu-admission looks at, which are the app containers with units: all others are unknown to it, and so
    is that a share is spread over several GPUs.
    """
    shares = (share_of(topology, each.devices, each.cards) for each in demand.containers if each.role == "app")
    containers = tuple(
        ShareRequest(cores=each.cores, memory=each.blocks * MEMORY_BLOCK) for each in shares if each is not None
    )
    return containers if asks_for_gpu(containers) else ()


def node_of(state: NodeState) -> AdmissionNode | None:
    """
    A node with its GPUs in units; None: it has none. Nothing is left of one that somebody has whole, that is not healthy, or
    that is held in another way.
    """
    units = state.ownership.units_left
    if not units:
        return None
    whole = {gpu for each in state.allocations.values() for gpu, held in each.amounts.items() if held.cores >= CORES}
    cards = [
        msgspec.structs.replace(card, exclusive=card.device in whole)
        for card in unit_candidates(state.hardware, units)
        if card.device in units
    ]
    return AdmissionNode(name=state.node, cards=tuple(cards))


def order(containers: Containers, node: AdmissionNode | None) -> tuple[bool, Load] | tuple[()] | None:
    """The key that sorts nodes for a pod; None for a node that gpu-admission does not try."""
    if not containers:
        return ()
    return None if node is None else rank(node, containers)
