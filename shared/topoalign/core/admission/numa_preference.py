"""
Which of equally narrow sets of NUMA nodes mode `best` prefers: the one whose GPUs come first by device policy `topology`.

A kubelet prefers the lowest NUMA nodes, whatever GPUs are there. Example: 8 GPUs at an NVSwitch, four on each of two NUMA
nodes, and GPU-0 of node 0 has lost its NVLinks: 4 GPUs are aligned to node 1, 1 GPU is aligned to node 0.
"""

from typing import Any

from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.ids import NIC
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.placement.devices import sides
from topoalign.core.placement.gpus.topology import SetOrder
from topoalign.core.placement.preference import PLACEMENTS, choose, gpu_choice, positions
from topoalign.core.policy.merge.closeness import MaskOrder
from topoalign.core.profile import profile_of

NO_SET = (1,)
"""After every set of GPUs."""


def order_by_gpus(asked: HintRequest) -> MaskOrder | None:
    """
    The sort key of sets of NUMA nodes, by the GPUs that the demand would get there. None: the lowest nodes are to be taken,
    or the demand asks for no whole GPUs, or for some that are chosen jointly with other devices.
    """
    state = asked.state
    devices = asked.demand.devices
    hardware = state.hardware
    gpus = [(name, amount) for name, amount in devices.items() if amount and hardware.kind_of(name) == "gpu"]
    if not gpus or asked.demand.together or not profile_of(asked.rules.mode).compares_gpus_of_nodes:
        return None
    nics = devices.get(NIC, 0)
    free_nics = state.ownership.free(NIC) if nics else ()
    questions = []
    for name, amount in gpus:
        free = state.ownership.free(name)
        context = PlacementContext(free=free, nics=free_nics, nics_wanted=nics)
        choice = gpu_choice(hardware, free, (), amount, context)
        questions.append((name, free, choice, SetOrder(choice.scorer, choice.free, choice.nics)))
    position = positions(hardware)
    policy = PLACEMENTS[asked.rules.placement]

    def key(mask: Mask) -> tuple[Any, ...]:
        found = []
        for name, free, choice, order in questions:
            aligned = sides(hardware.devices[name], free, mask).aligned
            members = choose(policy, choice._replace(available=[position[gpu] for gpu in aligned]))
            found.append((0, *order.rank(members)[:-1]) if members else NO_SET)
        return tuple(found)

    return key
