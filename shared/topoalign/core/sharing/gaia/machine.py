"""
Which GPUs of a node a container gets in units where `compat` is `gaia`: those that gpu-manager's evaluators choose over the
tree of the node's GPUs.

The tree is made of the PCIe paths that are known between them. What may not be chosen counts as held whole: GPUs that the
caller leaves out, as a kubelet's alignment does, and those with less memory than is asked for of each, at which gpu-manager
does not look for whole cards. Memory without cores, which it starts without any GPU, is put where a share of one core would
be. What it counts as processes of a card are here the allocations that hold something of it.

    pairs 0-1, 2-3 and 4-5 behind a switch each, all below one host bridge; 30 cores of card 1 are held
    20 cores: 1; 100 cores: 0; 200 cores: 2 and 3; 400 cores: 0, 2, 3 and 4, although 2 to 5 are two pairs
"""

from collections.abc import Collection, Sequence

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.links import NVML_LEVEL, PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.views import made_once
from topoalign.core.sharing.cards import WHOLE_CARD, SharedCard, ShareRequest
from topoalign.core.sharing.gaia.evaluators import Chosen, evaluate
from topoalign.core.sharing.gaia.tree import Node, build, occupy, tree_of

LEVEL = {kind: level for level, kind in NVML_LEVEL.items()}
UNKNOWN_LEVEL = -1


@made_once
def tree_root(topology: Topology) -> Node:
    """The root of the tree of a machine's GPUs, which are in the order of their indexes."""
    levels = [[level_of(topology, a.id, b.id) for b in topology.gpus] for a in topology.gpus]
    return build(levels, [int(LEVEL[PcieClass.PSB] in row) for row in levels])


def level_of(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    """NVML's level of the common ancestor of two GPUs; `UNKNOWN_LEVEL` where it is not known."""
    link = topology.link_by_pair.get((a, b))
    return UNKNOWN_LEVEL if link is None or link.pcie is None else LEVEL[link.pcie]


def choose_cards(
    topology: Topology, cards: Sequence[SharedCard], request: ShareRequest, among: Collection[DeviceID]
) -> Chosen:
    """
    The cards, of these GPUs, that a container gets. `cards`: all of the machine's, in its order.

    Raises InvalidField for a request that cannot be meant, and ShareDoesNotFit where the cards do not have it.
    """
    tree = tree_of(tree_root(topology), cards)
    for at, card in enumerate(cards):
        if card.device not in among or card.memory < request.memory:
            tree = occupy(tree, at, WHOLE_CARD, card.memory)
    return evaluate(tree, msgspec.structs.replace(request, cores=max(1, request.cores)))
