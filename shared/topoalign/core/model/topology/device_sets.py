"""
Represents sets of devices of one resource, of which there may be thousands.

Each device has a place: its index in the hardware's order. A set is an integer in which bit i stands for the device at
place i. So unions, intersections and counts do not visit each device. Example:

    listed: GPU-0::0, GPU-0::1, GPU-1::0, GPU-1::1; the set 0b0110 is GPU-0::1 and GPU-1::0
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import compress

from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID

DIGITS = bytes.maketrans(b"\0\1", b"01")
MARKS = bytes.maketrans(b"01", b"\0\1")


def bits_of(marks: bytearray) -> int:
    """The bits of a set. `marks`: for each place, 1 if its device is in the set, otherwise 0."""
    return int(marks[::-1].translate(DIGITS) or b"0", 2)


class OfferedDevices(dict[DeviceID, tuple[int, ...] | None]):
    """
    Device that is handed out under one resource, in the hardware's order -> the NUMA nodes with which it is listed to
    the kubelet. None: without topology; (): with an empty topology. It is not changed after its first use.
    """

    @cached_property
    def unlisted_nodes(self) -> dict[DeviceID, tuple[int, ...]]:
        """Device that is listed without topology -> the NUMA nodes of its GPU. The keys have no share numbers."""
        return {}

    @cached_property
    def ids(self) -> tuple[DeviceID, ...]:
        """All devices: an id's index is its place."""
        return tuple(self)

    @cached_property
    def places(self) -> Mapping[DeviceID, int]:
        """Device -> its place."""
        return {device: place for place, device in enumerate(self)}

    @cached_property
    def everything(self) -> "DeviceSet":
        """All devices."""
        return DeviceSet(self, (1 << len(self)) - 1)

    @cached_property
    def nothing(self) -> "DeviceSet":
        """No device."""
        return DeviceSet(self, 0)

    @cached_property
    def by_nodes(self) -> Mapping[tuple[int, ...] | None, "DeviceSet"]:
        """NUMA nodes -> the devices that are listed with them. The keys are in the order of their first devices."""
        return self._grouped(self)

    @cached_property
    def by_known_nodes(self) -> Mapping[tuple[int, ...] | None, "DeviceSet"]:
        """NUMA nodes -> the devices that are known to be near them, even if they are listed without topology."""
        known = self.unlisted_nodes
        if not known:
            return self.by_nodes
        return self._grouped({device: known.get(base_of(device), nodes) for device, nodes in self.items()})

    def _grouped(
        self, nodes_of: Mapping[DeviceID, tuple[int, ...] | None]
    ) -> Mapping[tuple[int, ...] | None, "DeviceSet"]:
        found: dict[tuple[int, ...] | None, list[DeviceID]] = {}
        for device, nodes in nodes_of.items():
            found.setdefault(nodes, []).append(device)
        return {nodes: self.some(ids) for nodes, ids in found.items()}

    @cached_property
    def by_base(self) -> Mapping[DeviceID, "DeviceSet"]:
        """Device without a share number -> it and its shares. The keys are in the order of their first devices."""
        found: dict[DeviceID, list[DeviceID]] = {}
        for device in self:
            found.setdefault(base_of(device), []).append(device)
        return {base: self.some(ids) for base, ids in found.items()}

    @cached_property
    def alike(self) -> tuple["DeviceSet", ...]:
        """Sets of devices that overlap the same other devices: each whole device alone, and each device's shares."""
        found: list[DeviceSet] = []
        for base, shares in self.by_base.items():
            whole = self.some((base,))
            found += (some for some in (whole, shares - whole) if some.bits)
        return tuple(found)

    def listed(self, ids: Collection[DeviceID]) -> Collection[DeviceID]:
        """The set of these ids, or the ids themselves if some are not listed or occur twice."""
        some = self.some(ids)
        return some if len(some) == len(ids) else ids

    def some(self, ids: Iterable[DeviceID]) -> "DeviceSet":
        """The set of the listed devices among these."""
        if isinstance(ids, DeviceSet) and ids.devices is self:
            return ids
        wanted = frozenset(ids)
        if len(wanted) > len(self) // 4:
            return DeviceSet(self, bits_of(bytearray(map(wanted.__contains__, self))))
        places = [place for place in map(self.places.get, wanted) if place is not None]
        lowest = min(places, default=0)
        marks = bytearray(max(places, default=0) - lowest + 1)
        for place in places:
            marks[place - lowest] = 1
        return DeviceSet(self, bits_of(marks) << lowest)


NO_DEVICES = OfferedDevices()


class DeviceSet(Collection[DeviceID]):
    """An immutable set of devices of one resource, iterated in the hardware's order."""

    __slots__ = ("bits", "devices")

    def __init__(self, devices: OfferedDevices, bits: int) -> None:
        """`bits`: bit i stands for the device at place i."""
        self.devices = devices
        self.bits = bits

    def __contains__(self, device: object) -> bool:
        place = self.devices.places.get(device)  # type: ignore[call-overload]  # only ids have places
        return place is not None and self.bits >> place & 1 == 1

    def __iter__(self) -> Iterator[DeviceID]:
        start = self._start
        marks = format(self.bits >> start, "b")[::-1].encode().translate(MARKS)
        return compress(self.devices.ids[start : start + len(marks)], marks)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceSet) and (self.devices, self.bits) == (other.devices, other.bits)

    __hash__ = None  # type: ignore[assignment]  # `OfferedDevices` has no hash either

    def __and__(self, other: "DeviceSet") -> "DeviceSet":
        return DeviceSet(self.devices, self.bits & other.bits)

    def __or__(self, other: "DeviceSet") -> "DeviceSet":
        return DeviceSet(self.devices, self.bits | other.bits)

    def __sub__(self, other: "DeviceSet") -> "DeviceSet":
        return DeviceSet(self.devices, self.bits & ~other.bits)

    def __repr__(self) -> str:
        return f"DeviceSet({[*self]!r})"

    @property
    def bases(self) -> list[DeviceID]:
        """The devices without the numbers of shares, each once, in the order of `OfferedDevices.by_base`."""
        return [base for base, shares in self.devices.by_base.items() if shares.bits & self.bits]

    @property
    def _start(self) -> int:
        """The place of the first device; 0 if the set is empty."""
        return max(0, (self.bits & -self.bits).bit_length() - 1)

    @property
    def lowest(self) -> DeviceID:
        """The first device in the hardware's order. The set must not be empty."""
        return self.devices.ids[self._start]

    def first(self, amount: int) -> "DeviceSet":
        """The first `amount` devices in the hardware's order; all devices if there are fewer."""
        low = 0
        high = self.bits.bit_length()
        while low < high:  # the smallest number of places that contain `amount` devices
            middle = (low + high) // 2
            if (self.bits & (1 << middle) - 1).bit_count() < amount:
                low = middle + 1
            else:
                high = middle
        return DeviceSet(self.devices, self.bits & (1 << low) - 1)
