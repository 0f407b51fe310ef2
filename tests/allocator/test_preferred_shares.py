"""Preferences among shares: those of a naive reading of the rule, with work that does not grow with their number."""

import gc
import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from random import Random
from types import FrameType
from typing import Literal

import msgspec
import pytest
from device_allocations_support import GPUS, MemoryAllocator, Node, recorded
from hypothesis import assume, given
from hypothesis import strategies as st
from kubelet_support import two_nodes
from unit_support import DGX, MEMORY, in_units

from topoalign.core.model.events import Allocation, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import PluginDevice, Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.placement.sparing import held_among, is_any_held
from topoalign.core.state.fold import NodeState

pytestmark = pytest.mark.anyio

PACKINGS: tuple[Literal["distributed", "packed"], ...] = ("distributed", "packed")
OTHER = ResourceName("nvidia.com/other")
HEALTHS = st.builds(DeviceHealth, state=st.sampled_from(HealthState), cordoned=st.booleans())
UNKNOWN = [DeviceID(name) for name in ("", "nobody", "nobody::0", "GPU-0::", "GPU-0::00", "GPU-1::4", "MIG-9::1")]


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Four GPUs, two of them in MIG mode, offered under one or two resources, in shares or not."""
    plain, chance = two_nodes(gpus=4), Random(draw(st.integers(0, 999)))
    gpus = []
    for gpu in plain.gpus:
        parts = [f"MIG-{gpu.index * 3 + n}" for n in range(draw(st.integers(1, 3)) if gpu.index > 1 else 0)]
        mig = [MigDevice(uuid=DeviceID(u), profile="1g", gpu_instance=1, compute_instance=0, memory=1) for u in parts]
        gpus.append(msgspec.structs.replace(gpu, mig=tuple(mig) or None))
    links = tuple(Link(a=a.id, b=b.id, pcie=chance.choice([*PcieClass])) for a, b in combinations(gpus, 2))
    bases = [base for gpu in gpus for base in ([each.uuid for each in gpu.mig] if gpu.mig else [gpu.id])]
    chance.shuffle(bases)
    first, second = sorted((draw(st.integers(0, len(bases))), draw(st.integers(0, len(bases)))))
    packing = draw(st.sampled_from(PACKINGS))
    offers = tuple(
        Offer(resource=name, devices=tuple(devices), replicas=draw(st.integers(1, 4)), packing=packing)
        for name, devices in zip((GPU, GPU, OTHER), (bases[:first], bases[first:second], bases[second:]), strict=True)
    )
    others = draw(st.just(()) | st.just((PluginDevice(id=DeviceID("x-1"), resource=GPU, nodes=None),)))
    return msgspec.structs.replace(plain, gpus=tuple(gpus), links=links, offers=offers, others=others)


def wholes(machine: Topology, device: DeviceID) -> set[str]:
    """What an id stands for, and all that this is a part of."""
    cards = {each.uuid: gpu.id for gpu in machine.gpus for each in gpu.mig or ()}
    base = device.partition("::")[0]
    return {device, base, cards.get(DeviceID(base), DeviceID(base))}


def is_held(machine: Topology, device: DeviceID, held: Sequence[DeviceID]) -> bool:
    return any(device in wholes(machine, each) or each in wholes(machine, device) for each in held)


def naive(
    machine: Topology, available: Sequence[DeviceID], must: Sequence[DeviceID], size: int, held: Sequence[DeviceID]
) -> tuple[DeviceID, ...]:
    """The rule, device by device. Devices that are not listed, or named twice, have no preference."""
    listed = [*machine.devices.get(GPU, ())]
    if len({*available}) < len(available) or not {*available} <= {*listed}:
        return ()
    among, required = [*available], [*must]
    if {*must} <= {*available} and len(must) <= size <= len(available):
        spare = [each for each in available if each in must or not is_held(machine, each, held)]
        among, required = (spare, [*must]) if len(spare) >= size else ([*available], spare)
    if not {*required} <= {*among} or not max(1, len(required)) <= size <= len(among):
        return ()
    cards = {device: machine.parent_of(device) for device in listed}
    order = [*dict.fromkeys(cards.values())]
    sign = -1 if any(offer.packing == "packed" for offer in machine.offers_of[GPU]) else 1
    chosen = {*required}

    def rank(device: DeviceID) -> tuple[int, int, int, int, int]:
        card = cards[device]
        mine = Counter(cards[each] for each in chosen)
        used = sum(cards[each] == card and (each not in among or each in chosen) for each in listed)
        near = sum(connection_score(machine, card, other) for other in mine if other != card)
        return sign * used, mine[card], -near, order.index(card), listed.index(device)

    while len(chosen) < size:
        chosen.add(min((each for each in among if each not in chosen), key=rank))
    return tuple(each for each in listed if each in chosen)


def node(machine: Topology, held: Sequence[DeviceID], health: dict[DeviceID, DeviceHealth]) -> NodeState:
    allocator = MemoryAllocator(machine)
    allocator.judge(health)
    state = allocator.state
    for place, device in enumerate(held):
        cards = state.ownership.parents_of([device])
        state = state.holding(Allocation(id=AllocationID(f"a{place}"), devices={GPU: (device,)}, parents=cards))
    return state


@given(machines(), st.data())
async def test_a_preference_among_parts_is_that_of_the_rule_device_by_device(of: Topology, data: st.DataObject) -> None:
    """Also with parts of a resource held, of any health, and for a question that names what is not there, or twice."""
    assume(of.kind_of(GPU) == "part")
    listed = [*of.devices.get(GPU, ())]
    known = [*listed, *(gpu.id for gpu in of.gpus), *(each.uuid for gpu in of.gpus for each in gpu.mig or ())]
    held = data.draw(st.lists(st.sampled_from([*known, *UNKNOWN]), max_size=4, unique=True))
    available = data.draw(
        st.lists(st.sampled_from(listed or known), unique=True)
        | st.just(listed[::-1])
        | st.lists(st.sampled_from([*known, *UNKNOWN]), max_size=8)
    )
    must = data.draw(st.just([]) | st.lists(st.sampled_from(available or known), max_size=3))
    size = data.draw(st.integers(-1, len(available) + 1))
    health = data.draw(st.dictionaries(st.sampled_from(known), HEALTHS))
    state = node(of, held, health)
    allocations, ledger = recorded(state)
    if held:
        ledger.grant([*state.allocations.values()])

    expected = naive(of, available, must, size, held)

    assert expected == await allocations.prefer(GPU, available, must, size)


@given(machines(), st.data())
def test_held_devices_are_those_that_are_held_one_by_one(of: Topology, data: st.DataObject) -> None:
    listed = [each for devices in of.devices.values() for each in devices]
    cards = [gpu.id for gpu in of.gpus]
    known = [*listed, *cards, *UNKNOWN]
    held = data.draw(st.lists(st.sampled_from(cards) | st.sampled_from(known), max_size=3, unique=True))
    ownership = node(of, held, {}).ownership

    for resource, devices in of.devices.items():
        expected = {each for each in devices if is_held(of, each, held)}

        assert expected == {*held_among(ownership, resource, devices)}


@given(machines(), st.data())
def test_some_devices_are_held_if_one_of_them_is(of: Topology, data: st.DataObject) -> None:
    known = [*(each for devices in of.devices.values() for each in devices), *(gpu.id for gpu in of.gpus), *UNKNOWN]
    held, asked = (
        data.draw(st.lists(st.sampled_from(known), min_size=least, max_size=4, unique=True)) for least in (0, 1)
    )
    ownership = node(of, held, {}).ownership

    expected = any(map(ownership.is_held, asked))

    assert [expected] * len(of.devices) == [is_any_held(of, ownership, resource, asked) for resource in of.devices]


class Calls:
    """Counts the functions that are called while the context is open, but not those of the garbage collector."""

    def __enter__(self) -> "Calls":
        self.number = 0
        gc.disable()
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        gc.enable()

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.number += event in ("call", "c_call")


async def calls(shares: int) -> tuple[int, int]:
    """
    How many functions are called for one preference and for one Allocate on a node with so many shares of each of eight
    GPUs, some of them held.
    """
    gpus = tuple(two_nodes().gpu_by_id)
    offer = Offer(resource=GPU, devices=gpus, replicas=shares)
    allocations, ledger = recorded(msgspec.structs.replace(two_nodes(), offers=(offer,)))
    listed = [*allocations.state.hardware.devices[GPU]]
    ledger.grant([Allocation(id=AllocationID("a"), devices={GPU: tuple(listed[:10])})])
    await allocations.prefer(GPU, listed, [], 1)  # what is worked out once for a topology
    await allocations.allocate(GPU, [listed[10:12]])
    with Calls() as preferring:
        chosen = await allocations.prefer(GPU, [*listed[:5], *listed[6:]], [], 1)
    with Calls() as allocating:
        await allocations.allocate(GPU, [listed[12:14]])

    assert (f"{gpus[1]}::0",) == chosen, "the first of those of which the fewest are held"
    return preferring.number, allocating.number


async def test_hardly_more_functions_are_called_for_thousands_of_shares() -> None:
    """None of them is called for each share: that would be 60 ms for 8,192 of them. A search halves them."""
    await calls(20)  # what is worked out once in a process
    few, many = await calls(20), await calls(2_500)

    assert few[0] <= many[0] <= few[0] + math.log2(2_500 / 20) + 1
    assert few[1] == many[1]


async def test_an_allocate_of_units_calls_few_functions_for_each() -> None:
    """Ten at most, most of them of C: a share may be hundreds of units."""
    numbers = []
    for blocks in (20, 60):
        allocations, _ = recorded(in_units(DGX))
        units = [*allocations.state.hardware.devices[MEMORY]]
        await allocations.allocate(MEMORY, [units[-4:]])
        with Calls() as allocating:
            await allocations.allocate(MEMORY, [units[:blocks]])
        numbers.append(allocating.number)
    few, many = numbers

    assert many - few <= 10 * 40


async def calls_beside(holders: int) -> int:
    """How many functions are called for a preference beside so many containers that the kubelet shows, with a share each."""
    it = Node()
    it.topology = msgspec.structs.replace(it.topology, offers=(Offer(resource=GPU, devices=GPUS, replicas=10),))
    it.hear_topology(it.ledger, 2)
    shares = [*it.ledger.state.hardware.devices[GPU]]
    for number, share in enumerate(shares[:holders]):
        it.kubelet.show(f"pod-{number}", share)
        await it.device_allocations.allocate(GPU, [[share]])
    await it.device_allocations.reconcile()
    await it.device_allocations.prefer(GPU, shares, [], 1)
    with Calls() as preferring:
        await it.device_allocations.prefer(GPU, shares, [], 1)
    return preferring.number


async def test_a_holder_adds_little_to_the_work_for_a_preference() -> None:
    """Ten functions: none is compared with all that is shown, as 25,000 devices of 240 containers with 105 units each."""
    few, many = await calls_beside(16), await calls_beside(64)

    assert many - few <= 10 * (64 - 16)
