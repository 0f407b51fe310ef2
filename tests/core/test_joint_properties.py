"""The default of joint allocation against naive references, which try all sets of GPUs and ask every NIC how near it is."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from joint_support import GPU, GPUS, NIC, SAME_PCIE, TOGETHER, UNITS, Spot, box, chosen

from topoalign.core.deviceshare.inventory import NodeInventory

MOST = 8


class Node(NamedTuple):
    gpus: tuple[Spot, ...]
    nics: tuple[Spot, ...]
    busy_gpus: frozenset[int]
    busy_nics: frozenset[int]
    shared_nics: frozenset[int]
    """Half in use."""

    @property
    def inventory(self) -> NodeInventory:
        used = dict.fromkeys(self.shared_nics, 50) | dict.fromkeys(self.busy_nics, 100)
        return box(self.gpus, self.nics, busy_gpus=sorted(self.busy_gpus), busy_nics=used)

    def free_gpus(self) -> list[int]:
        return [gpu for gpu in range(len(self.gpus)) if gpu not in self.busy_gpus]

    def fitting_nics(self, units: int) -> list[int]:
        least = {**dict.fromkeys(self.shared_nics, 50), **dict.fromkeys(self.busy_nics, 0)}
        return [nic for nic in range(len(self.nics)) if least.get(nic, 100) >= units]


def pcie(spot: Spot) -> str:
    return "" if spot is None else spot[1]


def switch(spot: Spot) -> str:
    return spot[2] if spot is not None and len(spot) > 2 else ""


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Up to 8 GPUs and 8 NICs on two NUMA nodes with up to two root complexes each, of up to two switches."""
    with_switches = draw(st.booleans())

    def spot(node: int, complex_: int, below: int) -> Spot:
        name = f"{node}-{complex_}"
        return (node, name, f"{name}-{below}") if with_switches else (node, name)

    spots = st.builds(spot, st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))
    gpus = tuple(draw(st.lists(spots, min_size=draw(st.integers(1, MOST)), max_size=MOST)))
    nics = tuple(draw(st.lists(spots | st.none(), min_size=draw(st.integers(0, MOST)), max_size=MOST)))
    some = st.frozensets(st.integers(0, MOST - 1), max_size=4)
    return Node(gpus, nics, draw(some), draw(some), draw(some))


counts = st.integers(1, 5)
units = st.sampled_from([1, 50, 100, 200, 300])


def wanted(units: int) -> tuple[int, int]:
    """How many NICs, and what of each."""
    return (units // 100, 100) if units > 100 else (1, units)


def same_pcie_possible(node: Node, gpus: int, count: int, each: int, one_numa_node: bool = False) -> bool:
    """Whether there are GPUs each of whose root complexes has a NIC, with enough NICs on all of them."""
    nics = [pcie(node.nics[nic]) for nic in node.fitting_nics(each)]
    for picked in combinations(node.free_gpus(), gpus):
        on = {pcie(node.gpus[gpu]) for gpu in picked}
        numa = {spot[0] for gpu in picked if (spot := node.gpus[gpu]) is not None}
        if on <= {*nics} and sum(nic in on for nic in nics) >= count and not (one_numa_node and len(numa) > 1):
            return True
    return False


@given(nodes(), counts, units, st.booleans())
def test_same_pcie_finds_devices_exactly_where_there_are_some(
    node: Node, gpus: int, amount: int, one_numa_node: bool
) -> None:
    count, each = wanted(amount)
    hints = {"gpu": {"requiredTopologyScope": "NUMANode"}} if one_numa_node else None

    got = chosen(node.inventory, {GPUS: gpus, UNITS: amount}, SAME_PCIE, hints)

    assert same_pcie_possible(node, gpus, count, each, one_numa_node) == isinstance(got, dict), got
    if isinstance(got, dict):
        assert gpus == len(set(got["gpu"]) & set(node.free_gpus())) == len(got["gpu"])
        assert count <= len(set(got["rdma"]) & set(node.fitting_nics(each))) == len(got["rdma"])
        assert {pcie(node.gpus[gpu]) for gpu in got["gpu"]} == {pcie(node.nics[nic]) for nic in got["rdma"]}
        numa = {spot[0] for gpu in got["gpu"] if (spot := node.gpus[gpu]) is not None}
        assert not one_numa_node or len(numa) == 1


def tier(node: Node, nic: int, gpus: Sequence[int]) -> int:
    """0 same switch, 1 same root complex, 2 same NUMA node, 3 elsewhere."""
    there = node.nics[nic]
    if there is None:
        return 3
    near = [node.gpus[gpu] for gpu in gpus]
    if switch(there) and switch(there) in map(switch, near):
        return 0
    if pcie(there) in map(pcie, near):
        return 1
    return 2 if any(spot is not None and there[0] == spot[0] for spot in near) else 3


@given(nodes(), counts, units)
def test_nics_are_of_the_nearest_tier_that_has_enough(node: Node, gpus: int, amount: int) -> None:
    count, each = wanted(amount)

    got = chosen(node.inventory, {GPUS: gpus, UNITS: amount}, TOGETHER)
    alone = chosen(node.inventory, {GPUS: gpus})

    fitting = node.fitting_nics(each)
    enough = len(node.free_gpus()) >= gpus and len(fitting) >= count
    assert enough == isinstance(got, dict), got
    if not isinstance(got, dict) or not isinstance(alone, dict):
        return
    assert alone["gpu"] == got["gpu"]
    there = [sum(tier(node, nic, got["gpu"]) == each for nic in fitting) for each in range(4)]
    taken = [sum(tier(node, nic, got["gpu"]) == each for nic in got["rdma"]) for each in range(4)]
    assert min(count, there[0]) <= taken[0]
    assert min(count, there[0] + there[1]) <= taken[0] + taken[1]
    assert max(0, min(count - there[0] - there[1], there[2])) == taken[2]
    assert max(0, count - sum(there[:3])) == taken[3]


@given(nodes(), counts, units)
def test_every_switch_of_the_gpus_gets_a_nic_if_it_has_one(node: Node, gpus: int, amount: int) -> None:
    """Every switch and every root complex of the chosen GPUs gets a NIC if it has one."""
    count, each = wanted(amount)

    got = chosen(node.inventory, {GPUS: gpus, UNITS: amount}, TOGETHER)

    if isinstance(got, dict):
        scopes = set()
        for scope_of in (switch, pcie):
            on = {scope_of(node.gpus[gpu]) for gpu in got["gpu"]} - {""}
            having = {scope_of(node.nics[nic]) for nic in node.fitting_nics(each)}
            scopes |= on & having
            assert on & having <= {scope_of(node.nics[nic]) for nic in got["rdma"]}
        assert len(got["rdma"]) <= count + len(scopes)


@given(nodes(), counts)
def test_gpus_are_of_the_smallest_part_of_the_machine_that_has_enough(node: Node, gpus: int) -> None:
    got = chosen(node.inventory, {GPUS: gpus})

    assert (len(node.free_gpus()) >= gpus) == isinstance(got, dict), got
    if isinstance(got, dict):
        for part in (switch, pcie, lambda spot: str(spot[0])):
            free = [part(node.gpus[gpu]) for gpu in node.free_gpus()]
            if any(name and free.count(name) >= gpus for name in free):
                assert len({part(node.gpus[gpu]) for gpu in got["gpu"]}) == 1
                break


@given(nodes(), counts, units, st.sampled_from([None, TOGETHER, SAME_PCIE]), st.booleans(), st.integers(0, 99))
def test_the_order_in_which_devices_are_listed_has_no_say(
    node: Node, gpus: int, amount: int, joint: object, compat: bool, seed: int
) -> None:
    devices = list(node.inventory.devices)
    Random(seed).shuffle(devices)
    shuffled = NodeInventory(devices=tuple(devices))
    asked = {GPUS: gpus, UNITS: amount}

    assert chosen(node.inventory, asked, joint, compat=compat) == chosen(shuffled, asked, joint, compat=compat)


@given(nodes(), counts, units, st.sampled_from([None, TOGETHER, SAME_PCIE]), st.booleans())
def test_what_is_no_longer_free_is_not_given(node: Node, gpus: int, amount: int, joint: object, compat: bool) -> None:
    got = chosen(node.inventory, {GPUS: gpus, UNITS: amount}, joint, compat=compat)

    if isinstance(got, dict):
        first_gpu, first_nic = got["gpu"][0], got["rdma"][0]
        without = msgspec.structs.replace(
            node.inventory,
            devices=tuple(
                each
                for each in node.inventory.devices
                if (each.kind, each.minor) not in ((GPU, first_gpu), (NIC, first_nic))
            ),
        )
        again = chosen(without, {GPUS: gpus, UNITS: amount}, joint, compat=compat) if without.devices else "none left"
        assert isinstance(again, str) or (first_gpu not in again["gpu"] and first_nic not in again["rdma"])
