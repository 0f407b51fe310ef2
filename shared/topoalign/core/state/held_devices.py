"""
Which of the devices that a node lists are held, under the ids under which they are handed out.

Like `holders` it is made once of all allocations, and follows each grant and release at the cost of what is granted or
released. A device may be held by several allocations, where the kubelet has given it to a second container.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import Devices, DeviceSet

Sets = Mapping[ResourceName, DeviceSet]


class HeldDevices:
    """The listed devices of one node that live allocations hold. A device that two resources list is held of both."""

    def __init__(self, listed: Mapping[ResourceName, Devices], allocations: Iterable[Allocation]) -> None:
        """`allocations`: the live ones."""
        times = Counter(chain.from_iterable(each.device_ids for each in allocations))
        self.sets: Sets = {name: devices.some(times) for name, devices in listed.items()}
        """Resource -> those of its devices that are held."""
        self._times: Mapping[DeviceID, int] = {device: n for device, n in times.items() if n > 1}
        """Device that several allocations hold -> how many."""

    def granted(self, allocation: Allocation) -> "HeldDevices":
        """With this allocation, of a new id."""
        new = self._listed(allocation.device_ids)
        again = {device for name, some in new.items() for device in some & self.sets[name]}
        times = (
            {**self._times, **{device: self._times.get(device, 1) + 1 for device in again}} if again else self._times
        )
        return self._replaced({**self.sets, **{name: self.sets[name] | some for name, some in new.items()}}, times)

    def released(self, allocation: Allocation) -> "HeldDevices":
        """Without this allocation, which is in it."""
        ids = allocation.device_ids
        times = self._times
        if times and (kept := ids & times.keys()):
            fewer = {device: n - (device in kept) for device, n in times.items()}
            ids = ids - kept
            times = {device: n for device, n in fewer.items() if n > 1}
        gone = self._listed(ids)
        return self._replaced({**self.sets, **{name: self.sets[name] - some for name, some in gone.items()}}, times)

    def _listed(self, ids: Iterable[DeviceID]) -> Sets:
        """Of each resource those of its devices that are named; only resources that have one."""
        found = ((name, held.devices.some(ids)) for name, held in self.sets.items())
        return {name: some for name, some in found if some.bits}

    def _replaced(self, sets: Sets, times: Mapping[DeviceID, int]) -> "HeldDevices":
        found = object.__new__(HeldDevices)
        found.sets = sets
        found._times = times
        return found
