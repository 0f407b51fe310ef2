"""
On which NUMA nodes a pod's devices could be: hints for all its device types at once, by trying every set of nodes.

Rules of koordinator a7a1b76b (deviceshare, topology hints). A hint is preferred if no narrower one is possible. Its score
says whether the GPUs are those that would be chosen on the whole machine.
"""

from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.errors import NoFit, TooMuchWork
from topoalign.core.joint.allocate import Allocation, allocate
from topoalign.core.joint.candidates import Asked, considered, wanted
from topoalign.core.joint.inventory import ANYWHERE
from topoalign.core.joint.names import DeviceType
from topoalign.core.topology.bitmask import masks_by_size, nodes_of

SAME_GPUS = 500
MOST_NODES = 10
"""Sets are tried one by one: 1,023 of them."""


class NumaHint(msgspec.Struct, frozen=True):
    nodes: tuple[int, ...]
    preferred: bool
    score: int


def numa_hints(asked: Asked) -> Mapping[DeviceType, Sequence[NumaHint]]:
    """
    Type -> hints, the narrowest first; equal for all types. Nothing where no device is on a known NUMA node.

    Raises DevicesDoNotFit where the whole machine cannot give the devices, and TooMuchWork.
    """
    nodes = sorted({device.place.node for device in asked.inventory.devices if device.place is not None} - {ANYWHERE})
    if not nodes:
        return {}
    if len(nodes) > MOST_NODES:
        raise TooMuchWork(
            f"hints over {len(nodes)} NUMA nodes", f"ask on machines with devices on at most {MOST_NODES} NUMA nodes"
        )
    whole = gpu_minors(allocate(msgspec.structs.replace(asked, nodes=frozenset(nodes))))
    found: list[tuple[tuple[int, ...], int]] = []
    for mask in masks_by_size(nodes):
        inside = msgspec.structs.replace(asked, nodes=frozenset(nodes_of(mask)))
        minors = possible_gpus(inside)
        if minors is not None:
            found.append((nodes_of(mask), SAME_GPUS if minors == whole else 0))
    least = min((len(mask) for mask, _ in found), default=0)
    hints = [NumaHint(mask, len(mask) == least, score) for mask, score in found]
    return {kind: hints for kind in DeviceType if kind in asked.demand.requests}


def possible_gpus(asked: Asked) -> tuple[int, ...] | None:
    """The GPUs that would be chosen on these NUMA nodes; None if the pod's devices cannot be had there."""
    try:
        if any(len(considered(asked, kind)) < wanted(asked, kind).count for kind in asked.demand.requests):
            return None
        return gpu_minors(allocate(asked))
    except TooMuchWork:
        raise
    except NoFit:
        return None


def gpu_minors(given: Allocation) -> tuple[int, ...]:
    return tuple(each.device.minor for each in given.get(DeviceType.GPU, ()))
