"""
Computes NUMA hints for all device types of a pod at once, by trying every set of NUMA nodes.

Rules of koordinator a7a1b76b (deviceshare, topology hints). A hint is preferred if no narrower one is possible. Its score
shows whether the GPUs are those that would be chosen on the whole machine.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.deviceshare.candidates import JointRequest, count_wanted
from topoalign.core.deviceshare.inventory import ANYWHERE
from topoalign.core.deviceshare.joint_allocation import Allocation, allocate_all_types, types_to_give
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.model.errors import NoFit, TooMuchWork
from topoalign.core.model.topology.bitmask import masks_by_size, nodes_of

SAME_GPUS = 500
MOST_NODES = 10
"""Sets are tried one by one: 1,023 of them."""


class NumaHint(msgspec.Struct, frozen=True):
    """
    A set of NUMA nodes on which a pod's devices could be.

    `score` is `SAME_GPUS` if the GPUs chosen there are those chosen on the whole machine, else 0.
    """

    nodes: tuple[int, ...]
    preferred: bool
    score: int


def numa_hints(asked: JointRequest) -> Mapping[DeviceType, Sequence[NumaHint]]:
    """
    Finds type -> hints, the narrowest first; equal for all types. Empty where no device is on a known NUMA node.

    Raises DevicesDoNotFit where the whole machine cannot give the devices, and TooMuchWork.
    """
    nodes = sorted({device.place.node for device in asked.inventory.devices if device.place is not None} - {ANYWHERE})
    if not nodes:
        return {}
    if len(nodes) > MOST_NODES:
        raise TooMuchWork(
            f"hints over {len(nodes)} NUMA nodes", f"ask on machines with devices on at most {MOST_NODES} NUMA nodes"
        )
    everywhere = msgspec.structs.replace(asked, nodes=frozenset(nodes))
    if not has_enough_devices(everywhere):
        raise DevicesDoNotFit("Insufficient NUMA Scoped Devices", FrameworkStatus.UNRESOLVABLE)
    whole = gpu_minors(allocate_all_types(everywhere))
    found: list[tuple[tuple[int, ...], int]] = []
    for mask in masks_by_size(nodes):
        inside = msgspec.structs.replace(asked, nodes=frozenset(nodes_of(mask)))
        minors = possible_gpus(inside)
        if minors is not None:
            found.append((nodes_of(mask), SAME_GPUS if minors == whole else 0))
    least = min((len(mask) for mask, _ in found), default=0)
    hints = [NumaHint(mask, len(mask) == least, score) for mask, score in found]
    return dict.fromkeys(types_to_give(asked), hints)


def has_enough_devices(asked: JointRequest) -> bool:
    """
    Whether the NUMA nodes have as many devices of each type as are wanted, whoever holds them and whatever a selector
    selects. A type without any device there passes, and is refused for that reason. Raises DevicesDoNotFit as `count_wanted`
    does.
    """
    wants = {kind: count_wanted(asked, kind).count for kind in types_to_give(asked)}
    totals = Counter(
        device.kind
        for device in asked.inventory.devices
        if device.place is not None and device.place.node in (asked.nodes or ())
    )
    return not any(0 < totals[kind] < count for kind, count in wants.items())


def possible_gpus(asked: JointRequest) -> tuple[int, ...] | None:
    """Minors of the GPUs that would be chosen on these NUMA nodes; None if the pod's devices cannot be had there."""
    try:
        return gpu_minors(allocate_all_types(asked)) if has_enough_devices(asked) else None
    except TooMuchWork:
        raise
    except NoFit:
        return None


def gpu_minors(given: Allocation) -> tuple[int, ...]:
    """Minors of the GPUs in an allocation, in its order."""
    return tuple(each.device.minor for each in given.get(DeviceType.GPU, ()))
