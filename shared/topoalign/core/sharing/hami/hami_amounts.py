"""
A card and a share of it in HAMi's amounts: what the checks, scores and orders of this package compare.

What is not a whole MiB counts against whoever asks: of what a card has it is cut off, of what is held it is rounded
up. A card that somebody holds whole is used up. An unknown NUMA node counts as node 0, as upstream registers it.
"""

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.sharing.shared_gpus import SharedGpu

MIB = 1 << 20


class HamiGpuUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A card, and what of it is used. More can be used than it has."""

    uuid: DeviceID
    index: int
    """NVML's."""
    numa: int
    type: str
    """The model; a request is for cards whose type contains its vendor."""
    healthy: bool
    mode: str = ""
    """`hami-core`, `mig` or `mps`."""
    slots: int
    used_slots: int = 0
    memory: int
    """MiB."""
    used_memory: int = 0
    """MiB."""
    cores: int
    used_cores: int = 0
    profiles: tuple[MigProfile, ...] = ()
    """Of a card in mode `mig`: the instances that it can be divided into."""
    instances: tuple[MigPlacement, ...] = ()
    """Of a card in mode `mig`: the slices that instances occupy."""


class HamiShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has of one card."""

    uuid: DeviceID
    memory: int
    """MiB."""
    cores: int
    profile: str = ""
    """Name of the MIG profile. Empty: the card is not in mode `mig`, or the instance is not chosen yet."""
    placement: MigPlacement | None = None


def to_hami_usage(
    card: SharedGpu, mode: str = "", profiles: tuple[MigProfile, ...] = (), instances: tuple[MigPlacement, ...] = ()
) -> HamiGpuUsage:
    """The card in HAMi's amounts."""
    slots = card.slots
    memory = card.memory // MIB
    cores = card.cores
    used = (slots, memory, cores) if card.exclusive else (0, 0, 0)
    return HamiGpuUsage(
        uuid=card.device,
        index=card.index,
        numa=card.numa_node or 0,
        type=card.model,
        healthy=card.healthy,
        mode=mode,
        slots=slots,
        used_slots=max(used[0], card.slots_held),
        memory=memory,
        used_memory=max(used[1], -(-card.memory_held // MIB)),
        cores=cores,
        used_cores=max(used[2], card.cores_held),
        profiles=profiles,
        instances=instances,
    )


def with_share(card: HamiGpuUsage, share: HamiShare) -> HamiGpuUsage:
    """The card with one more share held of it."""
    placed = () if share.placement is None else (share.placement,)
    return msgspec.structs.replace(
        card,
        used_slots=card.used_slots + 1,
        used_memory=card.used_memory + share.memory,
        used_cores=card.used_cores + share.cores,
        instances=card.instances + placed,
    )
