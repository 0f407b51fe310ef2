"""
Which GPUs a kubelet is told to take units of where nothing is reserved for its question.

It asks for a number of units of one kind, and does not say what the container asks for besides. What it takes is of one GPU,
or of whole ones: units that are spread over several GPUs are given by a reservation alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.demand.units import Share
from topoalign.core.model.holdings import UnitKind
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.offers import CORES
from topoalign.core.sharing.reserved_units import OpenHalf
from topoalign.core.sharing.units import choose_gpus, with_missing
from topoalign.core.state.fold import NodeState
from topoalign.core.state.unit_amounts import UnitsLeft


def share_asked(kind: UnitKind, size: int) -> Share:
    """What is asked for where the kubelet asks for so many units: a share of computing time comes with some memory."""
    return Share(size, 0 if size >= CORES else 1) if kind == "cores" else Share(0, size)


def followed(
    half: OpenHalf | None,
    share: Share,
    must_include: Sequence[DeviceID],
    fitting: Mapping[DeviceID, int],
    *,
    is_reserved: bool,
) -> tuple[DeviceID, ...]:
    """
    The GPU of the newest grant, where units of it should be the other half; () else. Of whole GPUs they should be only
    where a reservation says that memory comes with them (`is_reserved`). `fitting`: GPU -> units that can be had.
    """
    if half is None or share.whole or must_include:
        return ()
    amounts = half.allocation.amounts
    size = share.cores or share.blocks
    fits = len(amounts) == 1 and all(fitting.get(gpu, 0) >= size for gpu in amounts)
    return tuple(amounts) if fits and (is_reserved or all(each.cores < CORES for each in amounts.values())) else ()


def gpus_for(
    state: NodeState, share: Share, must_include: Sequence[DeviceID], fitting: Mapping[DeviceID, int], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs of the units that a container should get: those of what it takes over from an init container, if they have
    enough, and of whole GPUs others beside them; () where none have enough. `compat`: as in the rules of the node.
    """
    left = {gpu: counted(units, share, fitting.get(gpu, 0)) for gpu, units in state.ownership.units_left.items()}
    taken = Counter(map(state.hardware.card_of, must_include))
    if not taken:
        return choose_gpus(state.hardware, left, share, fitting, compat)
    gpus = with_missing(state.hardware, left, share, tuple(taken), fitting, compat)
    size = share.cores or share.blocks
    return gpus if sum(taken[gpu] + fitting.get(gpu, 0) for gpu in gpus) >= size else ()


def counted(left: UnitsLeft, share: Share, spare: int) -> UnitsLeft:
    """What is left of a GPU, as far as the kubelet may take it."""
    if share.cores:
        unused = left.unused and spare >= CORES
        return msgspec.structs.replace(left, cores=min(left.cores, spare), unused=unused)
    return msgspec.structs.replace(left, blocks=min(left.blocks, spare))
