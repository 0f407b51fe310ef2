"""
What a namespace may still hold: the `limits.<resource>` of its ResourceQuotas, for memory and cores of cards.

Kubernetes would count a container's value once, whatever the number of its cards; here each card counts. Init
containers run one after another, so of each card a pod uses the most that one of them has, or what its other
containers have together, whichever is more: two init containers of 1024 MiB on the same card count 1024, on two cards
2048.

Source: HAMi 4707fb02, QuotaManager and CollapseInitContainerUsage.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from topoalign.core.demand.hami_names import DEFAULT_NAMES, ResourceNames
from topoalign.core.sharing.hami.requests import plain_integer
from topoalign.core.sharing.hami.usage import CardShare


class NamespaceQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a namespace, and what its pods hold. None: no limit; 0: nothing at all."""

    memory: int | None = None
    """MiB."""
    cores: int | None = None
    used_memory: int = 0
    """MiB."""
    used_cores: int = 0

    def admits(self, memory: int, cores: int) -> bool:
        """Whether a pod may hold so many MiB and cores on top of what is used."""
        return (self.memory is None or self.used_memory + memory <= self.memory) and (
            self.cores is None or self.used_cores + cores <= self.cores
        )


class CardUse(msgspec.Struct, frozen=True):
    """What a pod uses of one card."""

    slots: int
    memory: int
    """MiB."""
    cores: int


def namespace_quota(
    hard: Iterable[Mapping[str, int | str]],
    used_memory: int = 0,
    used_cores: int = 0,
    memory_factor: int = 1,
    names: ResourceNames = DEFAULT_NAMES,
) -> NamespaceQuota:
    """
    The limits by the `hard` of all ResourceQuotas of a namespace: of several, the lowest.

    Memory is limited in the unit in which it is asked for, which is `memory_factor` MiB. What is not a plain integer
    is no limit.
    """
    quotas = tuple(hard)

    def lowest(resource: str) -> int | None:
        return min(
            (each for hard in quotas if (each := plain_integer(hard.get(f"limits.{resource}"))) is not None),
            default=None,
        )

    memory = lowest(names.memory)
    return NamespaceQuota(
        memory=None if memory is None else memory * max(memory_factor, 1),
        cores=lowest(names.cores),
        used_memory=used_memory,
        used_cores=used_cores,
    )


def effective_use(containers: Sequence[Sequence[CardShare]], init_containers: int) -> dict[str, CardUse]:
    """
    What a pod uses of each card, by uuid; its init containers are the first ones.

    An init container counts one slot, and of several instances on one card the largest, as upstream has it. Once all
    init containers have ended, what is left is the use of the others: `effective_use(containers[init_containers:],
    0)`.
    """
    peak: dict[str, CardUse] = {}
    together: dict[str, CardUse] = {}
    for number, shares in enumerate(containers):
        for share in shares:
            if number < init_containers:
                before = peak.get(share.uuid, _NOTHING)
                peak[share.uuid] = CardUse(1, max(before.memory, share.memory), max(before.cores, share.cores))
            else:
                before = together.get(share.uuid, _NOTHING)
                together[share.uuid] = CardUse(
                    before.slots + 1, before.memory + share.memory, before.cores + share.cores
                )
    return {
        uuid: _larger(peak.get(uuid, _NOTHING), together.get(uuid, _NOTHING)) for uuid in sorted({*peak, *together})
    }


def within_quota(quota: NamespaceQuota | None, containers: Sequence[Sequence[CardShare]], init_containers: int) -> bool:
    """Whether the namespace may hold what a pod with these shares uses."""
    if quota is None:
        return True
    used = effective_use(containers, init_containers).values()
    return quota.admits(sum(each.memory for each in used), sum(each.cores for each in used))


_NOTHING = CardUse(0, 0, 0)


def _larger(a: CardUse, b: CardUse) -> CardUse:
    return CardUse(max(a.slots, b.slots), max(a.memory, b.memory), max(a.cores, b.cores))
