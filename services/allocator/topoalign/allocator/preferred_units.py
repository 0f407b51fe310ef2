"""
Which GPUs a kubelet is told to take units of where nothing is reserved for its question.

It asks for a number of units of one kind, and does not say what the container asks for besides. That is known where a
container waits for as many, which the kubelet aligns elsewhere than was predicted. What it takes is of one GPU, or of whole
ones: units that are spread over several GPUs are given by a reservation alone.

Where the other half is not known, it is taken to be an equal part of the GPU: 50 units of computing time of a GPU with 60
blocks come with 30. Of the GPUs in use that have both left, the first half goes to one of which most of the other kind is
left, so that there is room for more than the equal part; where no GPU in use has, to any that has most left. Example:

    left of GPU-0: 60 and 30 blocks, of GPU-1: 100 and 60, unused, of GPU-2: 80 and 50
    asked for 50 of computing time: GPU-2, where up to 50 blocks fit then; for 50 blocks: GPU-1, as GPU-2 has less than 84

A pod that was refused because its memory was more than that is created again, and would be refused each time. So a share
of as much computing time as the last one that was refused so goes to any GPU of which most memory is left.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.demand.units import Left, Share, gpus_with_room, has_room
from topoalign.core.model.holdings import UnitKind, unit_kind
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.reserved import parts_of
from topoalign.core.sharing.reserved_units import OpenHalf, ShareQuestion
from topoalign.core.sharing.units import choose_gpus, with_missing
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.unit_amounts import UnitsLeft


def share_asked(kind: UnitKind, size: int) -> Share:
    """What is asked for where the kubelet asks for so many units: a share of computing time comes with some memory."""
    return Share(size, 0 if size >= CORES else 1) if kind == "cores" else Share(0, size)


def shares_asked(kind: UnitKind, question: ShareQuestion, reserved: NodeReservations, now: float) -> tuple[Share, ...]:
    """
    What may be asked for where the kubelet asks so: first the share of a container that waits, at monotonic second `now`,
    for as many units, of which one GPU has to have both halves left.
    """
    for _, container, units in parts_of(reserved, now, question.resource):
        if len(units) == question.size:
            held = [unit for ids in container.devices.values() for unit in ids]
            cores, blocks = (sum(unit_kind(unit) == each for unit in held) for each in ("cores", "memory"))
            if 0 < cores < CORES and blocks:
                return Share(cores, blocks), share_asked(kind, question.size)
    return (share_asked(kind, question.size),)


def size_of(share: Share, kind: UnitKind) -> int:
    """How many units of this kind it is."""
    return share.cores if kind == "cores" else share.blocks


def followed(
    half: OpenHalf | None,
    share: Share,
    kind: UnitKind,
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
    fits = len(amounts) == 1 and all(fitting.get(gpu, 0) >= size_of(share, kind) for gpu in amounts)
    return tuple(amounts) if fits and (is_reserved or all(each.cores < CORES for each in amounts.values())) else ()


def gpus_for(
    state: NodeState,
    share: Share,
    kind: UnitKind,
    must_include: Sequence[DeviceID],
    fitting: Mapping[DeviceID, int],
    compat: str,
    *,
    was_split: bool,
) -> tuple[DeviceID, ...]:
    """
    The GPUs of the units of this kind that a container should get: those of what it takes over from an init container, if
    they have enough, and of whole GPUs others beside them; () where none have enough. `compat`: as in the rules of the node.
    `was_split`: whether an equal part of the other half was too little for such a share before.
    """
    left = {gpu: counted(units, kind, fitting.get(gpu, 0)) for gpu, units in state.ownership.units_left.items()}
    taken = Counter(map(state.hardware.card_of, must_include))
    if not taken:
        is_known = share != share_asked(kind, size_of(share, kind))
        among = fitting if is_known or share.whole else with_other_half(left, share, kind, was_split=was_split)
        return choose_gpus(state.hardware, left, share, among, compat)
    gpus = with_missing(state.hardware, left, share, tuple(taken), fitting, compat)
    return gpus if sum(taken[gpu] + fitting.get(gpu, 0) for gpu in gpus) >= size_of(share, kind) else ()


def with_other_half(left: Left, share: Share, kind: UnitKind, *, was_split: bool) -> list[DeviceID]:
    """
    The GPUs with room for these units that have most left of the other kind: of those in use with an equal part of both
    left, else of all. `was_split` as for `gpus_for`.
    """
    room = gpus_with_room(left, share)
    in_use = [gpu for gpu in room if not left[gpu].unused and has_room(left[gpu], with_equal_part(share, left[gpu]))]
    among = room if was_split else in_use or room
    others = {gpu: left[gpu].blocks if kind == "cores" else left[gpu].cores for gpu in among}
    return [gpu for gpu, other in others.items() if other == max(others.values())]


def with_equal_part(share: Share, left: UnitsLeft) -> Share:
    """The share of a GPU of which one half is asked for, if the other half is as large a part of it; rounded up."""
    return share._replace(
        cores=share.cores or -(-share.blocks * CORES // left.all_blocks),
        blocks=-(-share.cores * left.all_blocks // CORES) if share.cores else share.blocks,
    )


def counted(left: UnitsLeft, kind: UnitKind, spare: int) -> UnitsLeft:
    """What is left of a GPU, as far as the kubelet may take units of this kind."""
    if kind == "cores":
        unused = left.unused and spare >= CORES
        return msgspec.structs.replace(left, cores=min(left.cores, spare), unused=unused)
    return msgspec.structs.replace(left, blocks=min(left.blocks, spare))
