"""
Describes what is held of a device: the whole, or which part of it.

`Holding` is the only type for this inside the code. Outside, in journals, events and the kubelet's calls, a part is
known by the id under which it is handed out; `holding_of` reads such an id, and this is the only module that knows how
one is written. `parents` maps each part to its device: MIG-y is an instance of GPU-x, 0000:99:00.1 a function of mlx5_1.

    GPU-x           Holding("GPU-x")
    GPU-x::3        Holding("GPU-x", TimeSlice(replica="3"))
    GPU-x::c7       Holding("GPU-x", Unit(kind="cores", number="7"))
    MIG-y           Holding("GPU-x", Instance(uuid="MIG-y"))
    MIG-y::0        Holding("GPU-x", TimeSlice(replica="0", of=Instance(uuid="MIG-y")))
    0000:99:00.1    Holding("mlx5_1", FunctionHolding(address="0000:99:00.1"))

Two holdings overlap if they are the same, or one is a part of the other: the whole GPU overlaps each of its parts, an
instance its time slices. Two parts of one device do not overlap. Nor do amounts: whether they fit is a question of
their sum.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from topoalign.core.model.ids import DeviceID

SHARE = "::"
"""Between a device and the number of its share, as NVIDIA's device plugin writes them (v0.20.0)."""

INSTANCE = "MIG-"
"""How NVML begins the uuid of a MIG instance. What else is a part of a GPU is a virtual function."""


class Whole(msgspec.Struct, frozen=True, tag=True):
    """The part that is all of a device."""


class Instance(msgspec.Struct, frozen=True, tag=True):
    """One MIG instance of a GPU."""

    uuid: DeviceID
    """Its own uuid, `MIG-…`."""


class FunctionHolding(msgspec.Struct, frozen=True, tag=True):
    """One SR-IOV virtual function of a NIC."""

    address: str
    """Its PCI address in sysfs form."""


WHOLE = Whole()


class TimeSlice(msgspec.Struct, frozen=True, tag=True):
    """One share of a device that is shared in time. All its shares are equal; the number only distinguishes them."""

    replica: str
    """Its number as the id has it: `3`."""
    of: Whole | Instance | FunctionHolding = WHOLE
    """What is shared."""


UnitKind = Literal["cores", "memory"]
"""What a GPU is divided into units of: its computing time, or its memory."""

LETTERS: Mapping[UnitKind, str] = {"cores": "c", "memory": "m"}
"""Before the number of a unit in its id."""

KINDS: Mapping[str, UnitKind] = {letter: kind for kind, letter in LETTERS.items()}

MOST_LABELS = 4_096
"""Whose meaning is kept: more than the units and shares of a GPU, of which each call of a kubelet names many."""


class Unit(msgspec.Struct, frozen=True, tag=True):
    """One unit of a GPU: a hundredth of its computing time, or a block of its memory. Units of a kind are equal."""

    kind: UnitKind
    number: str
    """It only distinguishes equal units."""

    @property
    def label(self) -> str:
        """As the id has it: `c17`."""
        return f"{LETTERS[self.kind]}{self.number}"


class Amount(msgspec.Struct, frozen=True, gc=False):
    """An amount of a GPU, no matter which units of it, or by which slot."""

    cores: Annotated[int, msgspec.Meta(ge=0)]
    """Hundredths of the GPU's computing time."""
    memory: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes."""


Part = Whole | Instance | FunctionHolding | TimeSlice | Unit | Amount


class Holding(msgspec.Struct, frozen=True):
    """What is held of one GPU or NIC: the whole, or one part."""

    device: DeviceID
    """The GPU or NIC; what a part belongs to, if that is known, and else the part itself."""
    part: Part = WHOLE

    @property
    def base(self) -> DeviceID:
        """The id of the GPU, MIG instance or virtual function that is held or shared."""
        if self.part is WHOLE:
            return self.device
        part = self.part.of if isinstance(self.part, TimeSlice) else self.part
        if isinstance(part, Instance):
            return part.uuid
        return DeviceID(part.address) if isinstance(part, FunctionHolding) else self.device

    @property
    def id(self) -> DeviceID:
        """The id under which the holding is handed out. `holding_of` reads it; an amount has the id of its GPU."""
        if isinstance(self.part, Unit):
            return DeviceID(f"{self.base}{SHARE}{self.part.label}")
        return DeviceID(f"{self.base}{SHARE}{self.part.replica}") if isinstance(self.part, TimeSlice) else self.base


def holding_of(device: DeviceID, gpus: Mapping[DeviceID, DeviceID]) -> Holding:
    """Reads the id of a device as handed out. `gpus`: instance or virtual function -> its GPU or NIC."""
    base, share, replica = device.partition(SHARE)
    gpu = gpus.get(DeviceID(base)) if gpus else None
    if gpu is None:
        kind = kind_of_share(replica)
        shared = TimeSlice(replica) if kind is None else Unit(kind, replica[1:])
        return Holding(DeviceID(base), shared if share else WHOLE)
    part = Instance(DeviceID(base)) if base.startswith(INSTANCE) else FunctionHolding(base)
    return Holding(gpu, TimeSlice(replica, part) if share else part)


@lru_cache(MOST_LABELS)
def kind_of_share(label: str) -> UnitKind | None:
    """What a share is a unit of, by what follows `::` in its id; None: it is a time slice."""
    kind = KINDS.get(label[:1])
    return kind if kind is not None and label.isascii() and label[1:].isdecimal() else None


def unit_kind(device: DeviceID) -> UnitKind | None:
    """What an id names a unit of, whatever is offered now; None: it names no unit."""
    return kind_of_share(device.partition(SHARE)[2]) if SHARE in device else None


def wholes_of(holding: Holding) -> tuple[Holding, ...]:
    """What a holding is a part of, the nearest first: for a slice of an instance, the instance and the GPU."""
    part = holding.part
    if part is WHOLE or isinstance(part, Whole):
        return ()
    if isinstance(part, TimeSlice) and not isinstance(part.of, Whole):
        return Holding(holding.device, part.of), Holding(holding.device)
    return (Holding(holding.device),)


def shared_by(holding: Holding) -> tuple[Holding, str] | None:
    """Of a share, what is shared and the number of the share as its id has it; None for anything else."""
    part = holding.part
    if isinstance(part, Unit):
        return Holding(holding.device), part.label
    return (Holding(holding.device, part.of), part.replica) if isinstance(part, TimeSlice) else None


def may_have_parts(holding: Holding) -> bool:
    """Whether another holding can be a part of this one. A time slice, a unit and an amount have no parts."""
    return not isinstance(holding.part, TimeSlice | Unit | Amount)


def excluding_holdings(holding: Holding) -> tuple[Holding, ...]:
    """The holdings that exclude this one: itself and its wholes. The same amount may be held twice."""
    wholes = wholes_of(holding)
    return wholes if isinstance(holding.part, Amount) else (holding, *wholes)


class HoldingSet:
    """A set of holdings that can be asked whether another holding overlaps any of them."""

    def __init__(self, holdings: Iterable[Holding] = ()) -> None:
        self._held: set[Holding] = set()
        self._wholes: set[Holding] = set()
        self.update(holdings)

    def update(self, holdings: Iterable[Holding]) -> None:
        """Adds holdings to the set."""
        for holding in holdings:
            self._held.add(holding)
            self._wholes.update(wholes_of(holding))

    def overlaps(self, holding: Holding) -> bool:
        """Whether a holding of the set is the same as this one, a part of it, or a whole of it."""
        return holding in self._wholes or not self._held.isdisjoint(excluding_holdings(holding))


def base_of(device: DeviceID) -> DeviceID:
    """The id of a device as handed out, without the number of its share: `GPU-x` for `GPU-x::3`."""
    return DeviceID(device.partition(SHARE)[0]) if SHARE in device else device


def is_share_id(device: DeviceID) -> bool:
    """Whether an id is that of a time slice or a unit."""
    return SHARE in device


def handed_out(base: DeviceID, replicas: int, unit: UnitKind | None = None) -> Iterator[DeviceID]:
    """The ids under which a device is handed out: its own, or `<base>::0` and so on, or units `<base>::c0`."""
    if replicas == 1 and unit is None:
        return iter((base,))
    before = f"{base}{SHARE}" if unit is None else f"{base}{SHARE}{LETTERS[unit]}"
    return (DeviceID(f"{before}{n}") for n in range(replicas))
