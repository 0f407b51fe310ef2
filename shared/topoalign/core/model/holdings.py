"""
Describes what is held of a device: the whole device or a part.

The code uses the type `Holding`. Journals, events and the kubelet's calls use the id under which a part is handed out.
Only this module knows the form of these ids; `holding_of` reads them. A mapping, `parents`, has the device of each MIG
instance and virtual function. In this example, MIG-y is an instance of GPU-x, and 0000:99:00.1 is a function of mlx5_1:

    GPU-x           Holding("GPU-x")
    GPU-x::3        Holding("GPU-x", TimeSlice(replica="3"))
    GPU-x::c7       Holding("GPU-x", Unit(kind="cores", number="7"))
    MIG-y           Holding("GPU-x", Instance(uuid="MIG-y"))
    MIG-y::0        Holding("GPU-x", TimeSlice(replica="0", of=Instance(uuid="MIG-y")))
    0000:99:00.1    Holding("mlx5_1", FunctionHolding(address="0000:99:00.1"))

Two holdings overlap if they are the same, or if one is a part of the other: a whole GPU overlaps each of its parts, and
an instance overlaps its time slices. Two different parts of one device do not overlap.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from topoalign.core.model.ids import DeviceID

SHARE = "::"
"""Between a device and the number of its share, as NVIDIA's device plugin writes them (v0.20.0)."""

INSTANCE = "MIG-"
"""Prefix of the uuid of a MIG instance in NVML. Any other part of a device is a virtual function."""


class Whole(msgspec.Struct, frozen=True, tag=True):
    """The whole device."""


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
    """One time slice of a device. All its slices are equal; the number only distinguishes them."""

    replica: str
    """Its number in the id: `3`."""
    of: Whole | Instance | FunctionHolding = WHOLE
    """What is shared."""


UnitKind = Literal["cores", "memory"]
"""The kinds of units of a GPU: hundredths of computing time, and blocks of memory."""

LETTERS: Mapping[UnitKind, str] = {"cores": "c", "memory": "m"}
"""Kind -> the letter before the number of a unit in its id."""

KINDS: Mapping[str, UnitKind] = {letter: kind for kind, letter in LETTERS.items()}

MOST_LABELS = 4_096
"""Number of cached labels: more than a GPU has units and shares. Each call of a kubelet contains many labels."""


class Unit(msgspec.Struct, frozen=True, tag=True):
    """One unit of a GPU: a hundredth of its computing time, or a block of its memory. All units of a kind are equal."""

    kind: UnitKind
    number: str
    """It only distinguishes the units."""

    @property
    def label(self) -> str:
        """The kind and number in the id: `c17`."""
        return f"{LETTERS[self.kind]}{self.number}"


class Amount(msgspec.Struct, frozen=True, gc=False):
    """An amount of cores and memory of a GPU, independent of units and slots."""

    cores: Annotated[int, msgspec.Meta(ge=0)]
    """Hundredths of the GPU's computing time."""
    memory: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes."""


Part = Whole | Instance | FunctionHolding | TimeSlice | Unit


class Holding(msgspec.Struct, frozen=True):
    """What is held of one GPU or NIC: the whole, or one part."""

    device: DeviceID
    """The GPU or NIC of the part. If this is unknown, the id of the part itself."""
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
        """The id under which the holding is handed out. `holding_of` reads it."""
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
    """The kind of a unit by its label, which is the text after `::` in its id. None: it is a time slice."""
    kind = KINDS.get(label[:1])
    return kind if kind is not None and label.isascii() and label[1:].isdecimal() else None


def unit_kind(device: DeviceID) -> UnitKind | None:
    """The kind of the unit with this id, even if it is not offered now. None: the id is not that of a unit."""
    return kind_of_share(device.partition(SHARE)[2]) if SHARE in device else None


def wholes_of(holding: Holding) -> tuple[Holding, ...]:
    """The holdings that contain this one, the smallest first: for a slice of an instance, the instance and the GPU."""
    part = holding.part
    if part is WHOLE or isinstance(part, Whole):  # the first is faster
        return ()
    if isinstance(part, TimeSlice) and not isinstance(part.of, Whole):
        return Holding(holding.device, part.of), Holding(holding.device)
    return (Holding(holding.device),)


def shared_by(holding: Holding) -> tuple[Holding, str] | None:
    """The device to which a share belongs, and the number of the share in its id. None: the holding is not a share."""
    part = holding.part
    if isinstance(part, Unit):
        return Holding(holding.device), part.label
    return (Holding(holding.device, part.of), part.replica) if isinstance(part, TimeSlice) else None


def may_have_parts(holding: Holding) -> bool:
    """Whether another holding can be a part of this one. A time slice and a unit have no parts."""
    return not isinstance(holding.part, TimeSlice | Unit)


def excluding_holdings(holding: Holding) -> tuple[Holding, ...]:
    """This holding and those of which it is a part: if one of them is held, this one cannot be allocated."""
    return (holding, *wholes_of(holding))


class HoldingSet:
    """A set of holdings that finds whether another holding overlaps any of them."""

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
        """Whether the set contains this holding, a part of it, or a holding of which it is a part."""
        return holding in self._wholes or not self._held.isdisjoint(excluding_holdings(holding))


def base_of(device: DeviceID) -> DeviceID:
    """The id of a device without the number of its share: `GPU-x` for `GPU-x::3`."""
    return DeviceID(device.partition(SHARE)[0]) if SHARE in device else device


def is_share_id(device: DeviceID) -> bool:
    """Whether an id is that of a time slice or a unit."""
    return SHARE in device


def handed_out(base: DeviceID, replicas: int, unit: UnitKind | None = None) -> Iterator[DeviceID]:
    """The ids under which a device is handed out: its own id, shares `<base>::0` etc., or units `<base>::c0` etc."""
    if replicas == 1 and unit is None:
        return iter((base,))
    before = f"{base}{SHARE}" if unit is None else f"{base}{SHARE}{LETTERS[unit]}"
    return (DeviceID(f"{before}{n}") for n in range(replicas))
