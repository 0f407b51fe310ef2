"""
How much of each GPU is left, where GPUs are offered in units.

Of a GPU of which all computing time or all memory is held nothing is left: a share needs both. Example: one container
holds `GPU-0::c0` to `GPU-0::c99` and 40 blocks, two others each 50 units of computing time of GPU-1 and 10 blocks. Nothing
is left of either, although 280 and 300 blocks were not given out.
"""

from collections.abc import Iterable, Mapping

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import MEMORY_BLOCK
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.device_health import HandedOut


class UnitsLeft(msgspec.Struct, frozen=True):
    """What is left of one GPU, in units."""

    cores: int
    """Hundredths of its computing time."""
    blocks: int
    """Of its memory."""
    all_blocks: int
    """That it has."""
    sharers: int
    """Allocations that hold some of it. Granted to a kubelet, computing time is one and memory another."""
    unused: bool
    """Whether nobody holds anything of it."""


class HeldOfGpu(msgspec.Struct, frozen=True):
    """What is held of one GPU in units."""

    cores: int = 0
    blocks: int = 0
    sharers: int = 0
    """Allocations."""
    owned: bool = True
    """Whether the containers of all of them are known: otherwise a kubelet may be about to ask for the other half."""


NOTHING = HeldOfGpu()


def held_of_gpus(allocations: Iterable[Allocation]) -> Mapping[DeviceID, HeldOfGpu]:
    """GPU -> what these allocations hold of it in units, for the GPUs of which any is held so."""
    found: dict[DeviceID, HeldOfGpu] = {}
    for allocation in allocations:
        for gpu, amount in allocation.amounts.items():
            former = found.get(gpu, NOTHING)
            found[gpu] = HeldOfGpu(
                former.cores + amount.cores,
                former.blocks + amount.memory // MEMORY_BLOCK,
                former.sharers + 1,
                former.owned and allocation.owner is not None,
            )
    return found


@made_once
def units_offered(topology: Topology) -> Mapping[DeviceID, Mapping[str, int]]:
    """GPU in units -> kind -> how many units it has."""
    offered: dict[DeviceID, dict[str, int]] = {}
    for offer in topology.offered:
        for gpu in offer.devices if offer.unit is not None else ():
            offered.setdefault(gpu, {})[str(offer.unit)] = offer.replicas
    return offered


def spent(topology: Topology, allocations: Iterable[Allocation]) -> frozenset[DeviceID]:
    """The GPUs of which all computing time or all memory is held, by containers that are known."""
    offered = units_offered(topology)
    return frozenset(
        gpu
        for gpu, held in (held_of_gpus(allocations) if offered else {}).items()
        if gpu in offered
        and held.owned
        and (held.cores >= offered[gpu].get("cores", 0) or held.blocks >= offered[gpu].get("memory", 0))
    )


def units_left(
    topology: Topology, allocations: Iterable[Allocation], handed_out: HandedOut
) -> Mapping[DeviceID, UnitsLeft]:
    """
    GPU -> what is left of it, in the hardware's order, for those that are offered in units. Nothing is left of one that is
    not healthy, or that somebody holds in another way.
    """
    offered = units_offered(topology)
    if not offered:
        return {}
    held = held_of_gpus(allocations)
    found = {}
    for gpu in topology.gpu_by_id:
        if (units := offered.get(gpu)) is None:
            continue
        taken = held.get(gpu, NOTHING)
        some = handed_out.health_of(gpu).usable
        found[gpu] = UnitsLeft(
            max(0, units.get("cores", 0) - taken.cores) if some else 0,
            max(0, units.get("memory", 0) - taken.blocks) if some else 0,
            units.get("memory", 0),
            taken.sharers,
            some and not taken.sharers,
        )
    return found
