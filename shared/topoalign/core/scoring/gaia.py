"""
The order in which gpu-admission tries nodes: the one first that has the least left.

    cores left of all GPUs in units, then their memory, then the name
    a: 150 cores and 200 blocks, b: 150 and 180, c: 800 and 1280 are tried in the order b, a, c

gpu-admission leaves no other node than the first on which the pod fits; here the others come after it. A pod without such a
GPU, or of memory alone, it lets go anywhere: to such a one all nodes are equal. Which GPUs it promises there is not asked,
because gpu-manager chooses again (`sharing.gaia`). Source: gpu-admission 47d56ae, predicate.
"""

import msgspec

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.units import share_of
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.sharing.gaia.admission import AdmissionNode, asks_for_gpu
from topoalign.core.sharing.units import cards_of
from topoalign.core.state.fold import NodeState

Load = tuple[int, int, NodeName]
"""Cores and bytes that a node has left, and its name."""


def wants_gpu(topology: Topology, demand: PodDemand) -> bool:
    """Whether gpu-admission looks at a pod: by the sums over its app containers, as all others are unknown to it."""
    shares = [share_of(topology, each.devices, each.cards) for each in demand.containers if each.role == "app"]
    cores, blocks = (sum(each[kind] for each in shares if each is not None) for kind in (0, 1))
    return asks_for_gpu(cores, blocks)


def load_of(state: NodeState) -> Load | None:
    """
    What is left of a node's GPUs in units; None: it has none. Nothing is left of one that somebody has whole, that is not
    healthy, or that is held in another way.
    """
    units = state.ownership.units_left
    if not units:
        return None
    whole = {gpu for each in state.allocations.values() for gpu, held in each.amounts.items() if held.cores >= CORES}
    cards = [
        msgspec.structs.replace(card, exclusive=card.device in whole)
        for card in cards_of(state.hardware, units)
        if card.device in units
    ]
    return AdmissionNode(name=state.node, cards=tuple(cards)).load


def order(wants: bool, load: Load | None) -> Load | tuple[()] | None:
    """The key that sorts nodes for a pod that gpu-admission looks at or not; None for one that it does not try."""
    return load if wants else ()
