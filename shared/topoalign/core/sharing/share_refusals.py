"""Errors for shares that do not fit."""

from collections.abc import Callable, Mapping, Sequence

from topoalign.core.demand.share_annotations import OTHER_MODE
from topoalign.core.demand.shares import ShareFields
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import NoFit, quoted

WAIT = "ask for less, or wait until other containers have ended; `topoalign gpu list` shows who holds what"

UNALIGNED = "without sharing.slots.numaTopology, or with its policy none, the kubelet aligns no slots"
"""The remedy if the alignment of slots excludes GPUs that would otherwise fit."""


def format_mib(size: int) -> str:
    """Formats a number of bytes in MiB, the unit of `nvidia.com/gpumem`: `16384 MiB`."""
    return f"{size / MIB:.10g} MiB"


MODE_SETTINGS = (
    "choose a node whose plugin configuration has `sharing.slots` with `sharing.limiter: hami-core` or `mps`, or with "
    "`flags.migStrategy: dynamic` for mode mig; or leave the annotation out"
)


class ShareDoesNotFit(NoFit):
    """
    Raised when no GPU of the node has the requested share free.

    Base class for valid requests that do not fit on the GPUs of a node. `field` is the path of the requested amount.

    Remedy: Wait until pods end, or request less.
    """

    def __init__(self, field: str, finding: str, remedy: str = WAIT) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class MemoryAboveGpu(ShareDoesNotFit):
    """Raised if more memory is requested than the largest GPU has in total. `text`: formats an amount for messages."""

    def __init__(self, fields: ShareFields, asked: int, largest: int, text: Callable[[int], str] = format_mib) -> None:
        self.asked = asked
        self.largest = largest
        super().__init__(
            fields.memory,
            f"{text(asked)} are asked for of one GPU, and a GPU has {text(largest)}",
            "ask for less memory, for memory of several GPUs, or choose a node with larger GPUs",
        )


class NoGpuAccepted(ShareDoesNotFit):
    """
    Raised when the pod excludes each GPU of the node, regardless of its free capacity.

    Remedy: Change the lists in its annotations; `topoalign gpu list` shows the GPUs.
    """

    def __init__(self, fields: ShareFields, reasons: Mapping[str, int]) -> None:
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "it has none"
        super().__init__(
            fields.gpus,
            f"no GPU of the node may be chosen: {found}",
            MODE_SETTINGS
            if OTHER_MODE in reasons
            else "change the lists of types and uuids, or choose another node; `topoalign gpu list` shows how its GPUs are",
        )


class NotEnoughShareGpus(ShareDoesNotFit):
    """Raised when the pod accepts fewer GPUs of the node than it requests."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int) -> None:
        super().__init__(
            fields.gpus,
            f"{asked} GPUs are asked for, and {gpus} of the node may be chosen",
            "ask for fewer GPUs, or choose a node that has more",
        )


class NotEnoughUnusedGpus(ShareDoesNotFit):
    """Raised when a request is for whole GPUs or for GPUs without other containers, and too few GPUs are unused."""

    def __init__(self, fields: ShareFields, asked: int, unused: int) -> None:
        super().__init__(
            fields.gpus,
            f"{asked} unused GPUs are asked for, and the node has {unused}: containers hold parts of the others",
        )


class NotEnoughShareCores(ShareDoesNotFit):
    """Raised when too few GPUs have enough free cores. `left`: the free cores of each GPU."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.cores, describe_lacking_amount(asked, gpus, left, "{} cores".format))


class NotEnoughShareMemory(ShareDoesNotFit):
    """Raised when too few GPUs have enough free memory. `left`: the free bytes of each GPU."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.memory, describe_lacking_amount(asked, gpus, left, format_mib))


class NotEnoughShareSlots(ShareDoesNotFit):
    """Raised when too few GPUs have a free slot. `left`: the free slots of each GPU."""

    def __init__(self, fields: ShareFields, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.gpus, describe_lacking_amount(1, gpus, left, "{} slots".format))


class ShareSplit(ShareDoesNotFit):
    """
    Raised when enough is free on the node, but not on one GPU or one NUMA node.

    Remedy: Wait until pods end, or request less.
    """


class NoneByHami(ShareDoesNotFit):
    """Raised if enough is free, but HAMi's rules choose no GPUs. `reason` has HAMi's reasons with their counts."""

    code = "ShareDoesNotFit"

    def __init__(self, fields: ShareFields, asked: int, reason: str) -> None:
        self.reason = reason
        super().__init__(
            fields.gpus,
            f"enough is left of {asked}, and HAMi's rules choose none: {reason}",
            "ask for less or by other annotations, or choose a node without compat hami",
        )


class WholeGpuInUse(ShareDoesNotFit):
    """
    Raised when a pod requests a whole GPU of which another pod holds a part, or the reverse.

    Remedy: Wait until the other pod ends.
    """

    def __init__(self, gpus: Sequence[str], holder: str, field: str = "devices_ids") -> None:
        self.gpus = tuple(gpus)
        self.holder = holder
        super().__init__(
            field,
            f"a whole GPU is nobody else's, and of {quoted(gpus)} {holder} has units",
            "wait until that has ended, or delete the pod and let the scheduler choose again; `topoalign gpu list` shows "
            "who holds what",
        )


def describe_lacking_amount(asked: int, gpus: int, left: Sequence[int], text: Callable[[int], str]) -> str:
    """The message for an amount that too few GPUs have free. `text`: formats an amount."""
    enough = sum(amount >= asked for amount in left)
    has = "" if gpus == 1 else f"{enough} of {len(left)} GPUs have that left, and "
    return f"{text(asked)} of {_each_of(gpus)} asked for; {has}the most that a GPU has left is {text(max(left))}"


def _each_of(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"each of {gpus} GPUs"
