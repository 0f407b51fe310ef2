"""Errors for shares that do not fit."""

from collections.abc import Callable, Mapping, Sequence

from topoalign.core.demand.share_annotations import NO_USE_TYPE, NO_USE_UUID, USE_TYPE, USE_UUID, VGPU_MODE
from topoalign.core.demand.shares import ShareFields
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import NoFit, quoted

WAIT = "ask for less, or wait until other containers have ended; `topoalign gpu list` shows who holds what"

UNALIGNED = "without sharing.slots.numaTopology, or with its policy none, the kubelet aligns no slots"
"""The remedy where the alignment of slots keeps a pod from GPUs that the node has."""


def format_mib(size: int) -> str:
    """So many bytes in MiB, the unit of `nvidia.com/gpumem`: `16384 MiB`."""
    return f"{size / MIB:.10g} MiB"


OTHER_TYPE = f"of another type ({USE_TYPE}, {NO_USE_TYPE})"
OTHER_UUID = f"not among the uuids ({USE_UUID}, {NO_USE_UUID})"
OTHER_MODE = f"in another mode ({VGPU_MODE})"
"""Why the annotations do not accept a GPU."""
MODE_SETTINGS = (
    "choose a node whose plugin configuration has `sharing.slots` with `sharing.limiter: hami-core` or `mps`, or with "
    "`flags.migStrategy: dynamic` for mode mig; or leave the annotation out"
)


class ShareDoesNotFit(NoFit):
    """
    Raised when no GPU of the node has the requested share left.

    Base of refusals of a valid request by the GPUs of a node; `field` is the path of what they lack.

    Remedy: Wait until pods end, or ask for less.
    """

    def __init__(self, field: str, finding: str, remedy: str = WAIT) -> None:
        self.field = field
        super().__init__(f"{field}: {finding}", remedy)


class MemoryAboveGpu(ShareDoesNotFit):
    """Raised for more memory than a GPU has, even if nobody held anything of it. `text`: an amount, for people."""

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
    Raised when the pod excludes each GPU of the node, whatever is left of it.

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
    """Raised when the node has fewer GPUs that may be chosen than are asked for."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int) -> None:
        super().__init__(
            fields.gpus,
            f"{asked} GPUs are asked for, and {gpus} of the node may be chosen",
            "ask for fewer GPUs, or choose a node that has more",
        )


class NotEnoughUnusedGpus(ShareDoesNotFit):
    """Raised when whole GPUs are asked for, or GPUs that nobody else uses, and too few are unused."""

    def __init__(self, fields: ShareFields, asked: int, unused: int) -> None:
        super().__init__(
            fields.gpus,
            f"{asked} unused GPUs are asked for, and the node has {unused}: containers hold parts of the others",
        )


class NotEnoughShareCores(ShareDoesNotFit):
    """Raised when too few GPUs have the cores left, and all together neither. `left`: the cores of each GPU."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.cores, describe_lacking_amount(asked, gpus, left, "{} cores".format))


class NotEnoughShareMemory(ShareDoesNotFit):
    """Raised when too few GPUs have the memory left, and all together neither. `left`: the bytes of each GPU."""

    def __init__(self, fields: ShareFields, asked: int, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.memory, describe_lacking_amount(asked, gpus, left, format_mib))


class NotEnoughShareSlots(ShareDoesNotFit):
    """Raised when too few GPUs have a slot left. `left`: the slots of each GPU."""

    def __init__(self, fields: ShareFields, gpus: int, left: Sequence[int]) -> None:
        super().__init__(fields.gpus, describe_lacking_amount(1, gpus, left, "{} slots".format))


class ShareSplit(ShareDoesNotFit):
    """
    Raised when enough is left on the node, but not on one GPU or one NUMA node.

    Remedy: Wait until pods end, or ask for less.
    """


class NoneByHami(ShareDoesNotFit):
    """Raised where enough is left, and HAMi's rules choose no GPUs: `reason` counts why, in HAMi's words."""

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
    Raised when a whole GPU is asked for of which another pod holds a part, or the reverse.

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
    """The finding for an amount that too few GPUs have left; `text`: an amount, for people."""
    enough = sum(amount >= asked for amount in left)
    has = "" if gpus == 1 else f"{enough} of {len(left)} GPUs have that left, and "
    return f"{text(asked)} of {_each_of(gpus)} asked for; {has}the most that a GPU has left is {text(max(left))}"


def describe_scattered_amounts(asked: str, gpus: int, enough: int) -> str:
    """The finding for amounts that the node has left, but not on so many GPUs; `enough`: how many GPUs have them."""
    found = f"only {enough} GPUs have" if enough > 1 else "only one GPU has" if enough else "no GPU has"
    return f"{asked} of {_each_of(gpus)} asked for; the node has that much left in total, but {found} it"


def _each_of(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"each of {gpus} GPUs"
