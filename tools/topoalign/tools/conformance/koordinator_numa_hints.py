"""
Computes NUMA hints for all device types of a pod at once, by trying every set of NUMA nodes.

Rules of koordinator a7a1b76b (deviceshare, topology hints). A hint is preferred if no narrower one is possible. Its score
shows whether the GPUs are those that would be chosen on the whole machine.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.inventory import ANYWHERE
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.model.errors import TooMuchWork
from topoalign.core.model.topology.bitmask import masks_by_size, nodes_of

SAME_GPUS = 500
MOST_NODES = 10
"""Sets are tried one by one: 1,023 of them."""


class NumaHint(msgspec.Struct, frozen=True):
    """A set of NUMA nodes; `score`: `SAME_GPUS` if the GPUs chosen there are those chosen on the whole machine, else 0."""

    nodes: tuple[int, ...]
    preferred: bool
    score: int


def numa_hints(asked: JointRequest) -> Mapping[DeviceType, Sequence[NumaHint]]:
    """
    Type -> hints, the narrowest first, equal for all types; empty where no device is on a known NUMA node.

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
    if not _has_enough_devices(everywhere):
        raise DevicesDoNotFit("Insufficient NUMA Scoped Devices", FrameworkStatus.UNRESOLVABLE)
    whole = _gpu_minors(everywhere)
    found: list[tuple[tuple[int, ...], int]] = []
    for mask in masks_by_size(nodes):
        inside = msgspec.structs.replace(asked, nodes=frozenset(nodes_of(mask)))
        try:
            minors = _gpu_minors(inside) if _has_enough_devices(inside) else None
        except DevicesDoNotFit:
            continue
        if minors is not None:
            found.append((nodes_of(mask), SAME_GPUS if minors == whole else 0))
    least = min((len(mask) for mask, _ in found), default=0)
    hints = [NumaHint(mask, len(mask) == least, score) for mask, score in found]
    return dict.fromkeys(asked.kinds, hints)


def _has_enough_devices(asked: JointRequest) -> bool:
    """
    Whether the NUMA nodes have as many devices of each type as are wanted, whoever holds them and whatever a selector
    selects. A type without any device there passes, and is refused for that reason.
    """
    totals = Counter(
        device.kind
        for device in asked.inventory.devices
        if device.place is not None and device.place.node in (asked.nodes or ())
    )
    return not any(0 < totals[kind] < want.count for kind, want in asked.wants.items())


def _gpu_minors(asked: JointRequest) -> tuple[int, ...]:
    """Minors of the GPUs that are chosen, in order."""
    return tuple(each.device.minor for each in allocate_all_types(asked).get(DeviceType.GPU, ()))
