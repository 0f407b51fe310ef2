"""
F33 and I14 where slots become MIG instances: every container has instances of its own, which are there as long as it runs;
no instance of ours is left over or doubled in the end, and none that somebody made by hand is ever destroyed.

What there is tells the driver; whose it is tell the plugin's answers and the journal's facts, which are read as plainly as
can be. After a reboot a kubelet starts containers again with instances that are gone: these use nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from simulation.amounts import VARIABLE
from simulation.divisions import card, way
from simulation.kubelet import Kubelet
from simulation.mig_driver import Driver, Instance
from simulation.pods import Container, Pod
from simulation.record import Held
from simulation.starts import Answer
from simulation.world import Violation, World

from topoalign.allocator.mig.instances import Instances
from topoalign.core.model.events import (
    Allocation,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    LedgerEvent,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import JournalEntry
from topoalign.core.state.fold import NodeState

Key = tuple[str, ContainerName]
"""Pod UID and container."""


class InstanceChecks:
    """Looks at the instances of one node."""

    def __init__(
        self, world: World, driver: Driver, kubelet: Kubelet, running: Callable[[], Mapping[str, Held]]
    ) -> None:
        """`running`: what the pods use of which it can be told that they run."""
        self._world, self._driver, self._kubelet, self._running = world, driver, kubelet, running
        self._live: dict[AllocationID, Allocation] = {}
        """By the journal's facts."""
        self._had: dict[Key, tuple[Instance, ...]] = {}
        """The instances that a container began with."""
        self.stranded: set[str] = set()
        """Pods that were there when the node was rebooted: their instances are gone, and they are told of them again."""
        self._gone: set[tuple[DeviceID, DeviceID]] = set()
        """Slots and instances that were recorded when the node was rebooted."""
        self.contested: set[DeviceID] = set()
        """Slots that were asked for beside the kubelet: what became of those whom it gave them is not looked at."""
        self._left_alone: set[Instance] = set()
        """That somebody else may have made for all that an agent knows which nobody ran before for long."""
        world.facts.append(self.hear)
        kubelet.began.append(self.begins)
        driver.destroyed.append(self.is_destroyed)

    def hear(self, event: LedgerEvent) -> None:
        """A fact that has just reached the disk."""
        match event:
            case AllocationGranted():
                self._expect_own(event.allocation)
                self._live[event.allocation.id] = event.allocation
            case AllocationReleased():
                self._live.pop(event.allocation, None)
            case AllocationsSnapshot():
                self._live = {each.id: each for each in event.allocations}

    def begin_with(self, entries: Sequence[JournalEntry]) -> None:
        """After damage: what is left counts."""
        self._live.clear()
        for event in chain.from_iterable(entry.events for entry in entries):
            match event:
                case AllocationGranted():
                    self._live[event.allocation.id] = event.allocation
                case AllocationReleased():
                    self._live.pop(event.allocation, None)
                case AllocationsSnapshot():
                    self._live = {each.id: each for each in event.allocations}

    def rebooted(self) -> None:
        self.stranded |= {uid for uid, _, _ in (*self._kubelet.entries, *self._kubelet.file)}
        self._gone |= {pair for each in self._live.values() for pair in each.instances.items()}
        self._had.clear()

    def was_away(self) -> None:
        """No agent has run for long; from now on one does."""
        self._left_alone |= {each for each in self._driver.instances if each.is_ours}

    def begins(self, pod: Pod, container: Container) -> None:
        """A container begins to run: each slot is an instance of its own, of the slot's GPU, as large as recorded."""
        key = pod.uid, container.name
        slots, answer = self._kubelet.used.get((*key, GPU)), self._kubelet.answers.get((*key, GPU))
        if not slots or answer is None or not slots.isdisjoint(self.contested):
            return
        title, uuids = f"{container.name} of {pod.name}", told_of(answer)
        found = [self._driver.called(uuid) for uuid in uuids]
        if pod.uid in self.stranded:
            if all(found) and not any(each is not None and not each.is_ours for each in found):
                self._had[key] = tuple(each for each in found if each is not None)
            return
        if missing := [uuid for uuid, each in zip(uuids, found, strict=True) if each is None]:
            self._violate("F33", f"{title} begins with {missing}, which are not there")
        there = self._had[key] = tuple(each for each in found if each is not None)
        if foreign := [each for each in there if not each.is_ours and not each.is_mistakable]:
            self._violate("F33", f"{title} begins with {foreign}")
        if sorted(map(card, uuids)) != sorted(map(card, slots)):
            self._violate("F33", f"{title} has {sorted(slots)} and is told of {uuids}")
        recorded = sorted(each.memory for each in answer.slots.values())
        if recorded and recorded != sorted(each.profile.memory for each in there):
            self._violate("I14", f"{title} has {there}, and recorded are {recorded} bytes")

    def after_step(self) -> None:
        """No two containers have one instance, but for those of a pod that have a slot one after the other."""
        users = dict[Instance, Key]()
        for key, instances in self.in_use().items():
            for each in instances:
                other = users.setdefault(each, key)
                if other != key and not self._share_a_slot(other, key):
                    self._violate("I14", f"{key} and {other} have {each}")

    def in_use(self) -> dict[Key, tuple[Instance, ...]]:
        """Containers that run now -> the instances that they began with."""
        running, found = self._running(), {}
        for uid, container, resource in sorted(self._kubelet.used):
            held = {device for kind, device in running.get(uid, ()) if kind == GPU}
            slots = self._kubelet.used[uid, container, resource]
            if resource == GPU and slots <= held - self.contested and (had := self._had.get((uid, container))):
                found[uid, container] = had
        return found

    def is_destroyed(self, instance: Instance) -> None:
        """An agent destroys an instance."""
        if not instance.is_ours and not instance.is_mistakable:
            self._violate("F33", f"{instance} is destroyed")
        for key, instances in self.in_use().items():
            if instance in instances:
                self._violate("F33", f"{instance} is destroyed, which {key} has")

    def converged(self, state: NodeState, instances: Instances) -> str | None:
        """In the end there is one instance for each slot that is recorded with one, and no other of ours. None: so it is."""
        if instances.failing:
            return f"instances are said to fail: {instances.failing}"
        live = state.allocations.values()
        recorded = [(slot, uuid) for each in live for slot, uuid in each.instances.items()]
        ours = [each for each in self._driver.instances if each.is_ours]
        wanted = {uuid for _, uuid in recorded}
        if len(wanted) != len({*recorded}):
            return f"an instance is recorded for two slots: {sorted(recorded)}"
        unsaid = {
            card(slot) for each in live for slot in each.device_ids - each.instances.keys() if way(slot) == "share"
        }
        unsaid |= {card(slot) for each in live for former in each.displaced for slot in chain(*former.devices.values())}
        spared = [each for each in ours if each in self._left_alone or each.gpu in unsaid]
        if left := [each for each in ours if each.uuid not in wanted and each not in spared]:
            return f"instances are left over: {left}"
        there = {each.uuid for each in self._driver.instances if each.has_compute}
        if missing := {uuid for slot, uuid in recorded if (slot, uuid) not in self._gone} - there:
            return f"recorded instances are not there: {sorted(missing)}"
        noted = [each for each in instances.own if each.uuid not in wanted and each.gpu not in unsaid]
        return f"noted are {noted}" if noted else None

    def full(self, hardware: Topology) -> set[DeviceID]:
        """The GPUs of which no further instance need be offered: no place is free, or it is not known what all have."""
        found = set[DeviceID]()
        live = self._live.values()
        recorded = {s: each.instances.get(s) for each in live for s in each.device_ids if way(s) == "share"}
        for gpu in hardware.gpus:
            taken = [each.placement for each in gpu.mig or () if each.placement is not None]
            there = {each.uuid for each in gpu.mig or ()}
            if any(card(slot) == gpu.id and uuid not in there for slot, uuid in recorded.items()) or is_full(taken):
                found.add(gpu.id)
        return found

    def _expect_own(self, allocation: Allocation) -> None:
        """No live allocation has one of its instances for another slot."""
        for slot, uuid in allocation.instances.items():
            for each in self._live.values():
                others = [other for other, of in each.instances.items() if of == uuid and other != slot]
                if others:
                    self._violate("I14", f"{uuid} is recorded for {slot} and for {others} of {each.id}")

    def _share_a_slot(self, one: Key, other: Key) -> bool:
        slots, others = (self._kubelet.used.get((*key, GPU), frozenset()) for key in (one, other))
        return one[0] == other[0] and not slots.isdisjoint(others)

    def _violate(self, invariant: str, finding: str) -> None:
        self._world.violate(Violation(invariant, finding))


def told_of(answer: Answer) -> list[DeviceID]:
    """The instances that a container was told of."""
    return [DeviceID(each) for each in answer.variables.get(VARIABLE, "").split(",") if each]


def is_full(taken: Iterable[MigPlacement]) -> bool:
    """Whether not even the smallest instance fits beside these."""
    slices = {each for place in taken for each in range(place.start, place.start + place.size)}
    return slices.issuperset(range(7))
