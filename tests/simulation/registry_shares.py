"""
Nodes of the simulation of registries whose GPUs are in slots or in units: what pods ask for there, what their kubelets do,
and that of no GPU more is held and reserved than it has.

A kubelet hears of pods in any order, asks for the resources of a container in any order, takes what the plugin prefers of
all that it has free, and knows no amounts. Nothing aligns it to NUMA nodes. So the node need refuse no pod that a registry
has bound, and a pod that spreads its units over several GPUs has equal parts of just as many. The nodes of some clusters
choose as gpu-manager and HAMi do (`TOPOALIGN_COMPAT`).

    GPU-0: slot 0 with 60 cores is held, slot 1 with 50 is reserved      110 of 100: a violation
    GPU-0: slot 0 is held by a pod, and is reserved for one that asks for the same        counted once
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec
from decision_support import machine
from simulation.divisions import ALL_CORES, ALL_MEMORY, BLOCKS, CORES, MEMORY, SLOTS, Much, card, much, way
from simulation.registry_nodes import Node
from simulation.world import Violation
from slot_support import PLAIN, WITH_NUMA_NODES, in_slots
from unit_support import in_units

from topoalign.allocator.ledger.ledger import Binding
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import GPU_COUNT, Compat
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology

Division = Literal["whole", "slots", "units"]
SHARE_CLUSTERS = 0.3
"""How many of the clusters have GPUs in slots or in units."""
COMPATS: Mapping[Division, Compat] = {"whole": "", "slots": "hami", "units": "gaia"}
"""Whose answers pods may get instead of ours."""
AMOUNTS = Slots()


def division_of(seed: int) -> Division:
    chance = Random(f"divided-{seed}")
    return chance.choice(("slots", "units")) if chance.random() < SHARE_CLUSTERS else "whole"


def hardware_of(division: Division, seed: int, gpus: Sequence[int] = (0, 0, 1, 1)) -> Topology:
    """A node with these GPUs by NUMA node; half of those in slots are listed with NUMA nodes."""
    found = machine(gpus=gpus, nics=(0, 0, 1))
    if division == "whole":
        return found
    sized = tuple(msgspec.structs.replace(gpu, memory=ALL_MEMORY) for gpu in found.gpus)
    found = msgspec.structs.replace(found, gpus=sized)
    if division == "units":
        return in_units(found, len(gpus))
    return in_slots(found, SLOTS, scaling=Random(f"listed-{seed}").choice((PLAIN, WITH_NUMA_NODES)))


def compat_of(seed: int, division: Division) -> Compat:
    """Whose answers pods get on all nodes."""
    return Random(f"compat-{seed}").choice(("", COMPATS[division]))


def asked_of(division: Division, chance: Random) -> tuple[dict[ResourceName, int], dict[str, str]]:
    """What the container of a pod asks for, and the annotations of its pod that are about that."""
    if division == "slots":
        cores, percentage = chance.choice((5, 30, 60, 100)), chance.choice((10, 25, 60, 100))
        return {GPU: chance.choice((1, 1, 1, 2, 3)), AMOUNTS.cores: cores, AMOUNTS.percentage: percentage}, {}
    if chance.random() < 0.2:
        return {CORES: ALL_CORES * chance.choice((1, 2))}, {}
    if chance.random() < 0.3:
        cards = chance.choice((2, 3))
        limits = {CORES: cards * chance.choice((5, 30)), MEMORY: cards * chance.randint(1, BLOCKS // 2)}
        return limits, {GPU_COUNT: str(cards)}
    return {CORES: chance.choice((5, 30, 60)), MEMORY: chance.randint(1, BLOCKS)}, {}


class ShareNode(Node):
    """The kubelet of such a node."""

    def __init__(self, *details: Any) -> None:
        super().__init__(*details)
        self._given: dict[str, set[tuple[ResourceName, DeviceID]]] = {}
        """UID -> what the kubelet has given to the pod."""

    def _in_turn(self, pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.chance.shuffle(pods)
        return pods

    async def _admit(self, pod: dict[str, Any], uid: str) -> None:
        name, limits = pod["metadata"]["name"], pod["spec"]["containers"][0]["resources"]["limits"]
        order = [ResourceName(each) for each in limits if each in self.ledger.state.hardware.devices]
        self.chance.shuffle(order)
        made = list[Allocation]()
        try:
            for resource in order:
                made.append(await self._give(uid, resource, int(limits[resource])))
        except TopoalignError as error:
            self._given.pop(uid, None)
            if uid not in self._world.gone:
                self.refused.append(f"{name} ({error.code}: {error.finding})")
        else:
            owner = Owner(namespace=Namespace("ml"), pod=PodName(name), container=ContainerName("main"))
            self.ledger.bind([Binding(each.id, owner, uid) for each in made])
            self.given.append(name)
            check_share(name, made, int(pod["metadata"]["annotations"].get(GPU_COUNT, 1)))
        if made and (uid in self._world.gone or uid not in self._given):
            live = self.ledger.state.allocations
            self.ledger.release([each.id for each in made if each.id in live], "gone")
        self._world.done.add(uid)
        check_enough(self.ledger.state.allocations.values(), await self.reserved(), self._world.done)

    async def _give(self, uid: str, resource: ResourceName, count: int) -> Allocation:
        """What the kubelet gives of one resource. Raises what the plugin raises, and NotEnough."""
        for gone in [each for each in self._given if each in self._world.gone]:
            del self._given[gone]
        taken = set[tuple[ResourceName, DeviceID]]().union(*self._given.values())
        free = [device for device in self.ledger.state.healthy(resource) if (resource, device) not in taken]
        preferred = await self._allocations.prefer(resource, free, [], count)
        chosen = [*preferred, *(device for device in free if device not in preferred)][:count]
        self._given.setdefault(uid, set()).update((resource, device) for device in chosen)
        (made,) = await self._allocations.allocate(resource, [chosen])
        return made


class Part(NamedTuple):
    """What one holder has of a card by one device."""

    device: DeviceID
    amount: Much


def check_share(name: str, made: Iterable[Allocation], spread_over: int) -> None:
    """The units of a container are of whole GPUs, or equal parts of as many as its pod says."""
    parts: dict[DeviceID, Much] = {}
    for unit in (device for each in made for device in each.device_ids if way(device) == "unit"):
        had, more = parts.get(card(unit), Much(0, 0)), much(unit)
        parts[card(unit)] = Much(had.cores + more.cores, had.memory + more.memory)
    if all(each.cores == ALL_CORES for each in parts.values()):
        return
    if len(parts) != spread_over or len({*parts.values()}) > 1:
        raise Violation("I14", f"{name} has {parts}, which are not equal parts of {spread_over} GPUs")


def check_enough(live: Iterable[Allocation], reservations: Iterable[Reservation], done: Collection[str]) -> None:
    """
    Of no card more is held and reserved than it has. `done`: UIDs of pods that were admitted or are gone: what is reserved
    for them, and for pods that have something, counts no more; nor what is planned, of which no node was asked.
    """
    held = [*live]
    there = {*done, *(each.pod_uid for each in held)}
    parts: dict[DeviceID, dict[DeviceID, Much]] = defaultdict(dict)
    for each in held:
        add(parts, parts_of(each.device_ids, each.slots))
    for pod in reservations:
        if pod.pod_uid not in there and not pod.planned:
            for one in pod.containers:
                add(parts, parts_of((device for ids in one.devices.values() for device in ids), one.slots))
    for gpu, amounts in parts.items():
        cores, memory = sum(each.cores for each in amounts.values()), sum(each.memory for each in amounts.values())
        if cores > ALL_CORES or memory > ALL_MEMORY:
            raise Violation(
                "I14", f"{cores:g} cores and {memory:g} bytes of {gpu} are held and reserved: {dict(amounts)}"
            )


def add(to: Mapping[DeviceID, dict[DeviceID, Much]], parts: Iterable[Part]) -> None:
    """A device counts once, with the larger amount."""
    for device, amount in parts:
        of = to[card(device)]
        known = of.get(device, Much(0, 0))
        of[device] = Much(max(known.cores, amount.cores), max(known.memory, amount.memory))


def parts_of(devices: Iterable[DeviceID], slots: Mapping[DeviceID, Amount]) -> Iterator[Part]:
    for device in devices:
        if way(device) != "nic":
            amount = slots.get(device)
            yield Part(device, Much(amount.cores, amount.memory) if amount is not None else much(device))
