"""`SamePCIe` spares what others may need: compared with a walk over all sets of PCIe scopes in the order of the rule."""

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from joint_support import GPUS, SAME_PCIE, TOGETHER, UNITS, box, chosen, demand

from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.inventory import NodeInventory
from topoalign.core.deviceshare.joint_allocation import allocate_all_types

Placed = tuple[int, str, str]
"""NUMA node, root complex, switch; the switch is empty where it is not known."""
ScopeOf = Callable[[Placed], str]


class Node(NamedTuple):
    gpus: tuple[Placed, ...]
    nics: tuple[Placed, ...]
    busy_gpus: frozenset[int]
    busy_nics: frozenset[int]

    @property
    def inventory(self) -> NodeInventory:
        return box(self.gpus, self.nics, busy_gpus=sorted(self.busy_gpus), busy_nics=dict.fromkeys(self.busy_nics, 1))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Up to 9 GPUs and 7 NICs on two NUMA nodes with up to three root complexes each, of up to two switches."""
    with_switches = draw(st.booleans())

    def placed(node: int, complex_: int, below: int) -> Placed:
        name = f"{node}-{complex_}"
        return (node, name, f"{name}-{below}" if with_switches else "")

    places = st.builds(placed, st.integers(0, 1), st.integers(0, 2), st.integers(0, 1))
    some = st.frozensets(st.integers(0, 8), max_size=3)
    gpus, nics = (draw(st.lists(places, min_size=1, max_size=most)) for most in (9, 7))
    return Node(tuple(gpus), tuple(nics), draw(some), draw(some))


class Scope(NamedTuple):
    """Free GPUs and untouched NICs beside one another."""

    name: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    busy: bool
    place: Placed


def switch(place: Placed) -> str:
    return place[2]


def root_complex(place: Placed) -> str:
    return place[1]


LOOKS: list[tuple[int, ScopeOf]] = [
    (3, switch),
    (2, switch),
    (2, root_complex),
    (1, switch),
    (1, root_complex),
    (0, switch),
    (0, root_complex),
]
"""How many of (NUMA node, root complex, switch) a part of the machine has in common, and what lies beside one another."""


def scopes_of(node: Node, scope_of: ScopeOf) -> list[Scope]:
    """One in use before one that is idle, then the fewest GPUs, then the lowest."""
    found = []
    for name in {scope_of(place) for place in node.gpus} - {""}:
        inside = [gpu for gpu, place in enumerate(node.gpus) if scope_of(place) == name]
        gpus = tuple(gpu for gpu in inside if gpu not in node.busy_gpus)
        nics = tuple(
            nic for nic, place in enumerate(node.nics) if scope_of(place) == name and nic not in node.busy_nics
        )
        if gpus and nics:
            found.append(Scope(name, gpus, nics, len(gpus) < len(inside), node.gpus[gpus[0]]))
    return sorted(found, key=lambda scope: (not scope.busy, len(scope.gpus), scope.gpus[0]))


def first_of_all(node: Node, gpus: int, nics: int) -> tuple[ScopeOf, set[str]] | None:
    for shared, scope_of in LOOKS:
        scopes = scopes_of(node, scope_of)
        parts = list(dict.fromkeys(scope.place[:shared] for scope in scopes))
        inside = [[scope for scope in scopes if scope.place[:shared] == part] for part in parts]
        for part in sorted(inside, key=lambda each: not any(scope.busy for scope in each)):
            for size in range(1, gpus + 1):
                for picked in combinations(part, size):
                    if (
                        sum(len(scope.gpus) for scope in picked) >= gpus
                        and sum(len(scope.nics) for scope in picked) >= nics
                    ):
                        return scope_of, {scope.name for scope in picked}
    return None


@given(nodes(), st.integers(1, 5), st.integers(1, 4))
def test_same_pcie_takes_the_first_scopes_that_will_do(node: Node, gpus: int, nics: int) -> None:
    """The smallest part of the machine, there the fewest scopes, and of those the ones with the least to spare."""
    expected = first_of_all(node, gpus, nics)

    got = chosen(node.inventory, {GPUS: gpus, UNITS: 100 * nics}, SAME_PCIE)

    if expected is None or isinstance(got, str):
        assert (expected is None) is isinstance(got, str), (expected, got)
        return
    scope_of, names = expected
    assert names == {scope_of(node.gpus[gpu]) for gpu in got["gpu"]}
    assert names == {scope_of(node.nics[nic]) for nic in got["rdma"]}
    assert (gpus, max(nics, len(names))) == (len(got["gpu"]), len(got["rdma"]))


def test_a_root_complex_in_use_goes_before_one_that_is_idle() -> None:
    """GPU 2 on `b` is held, so GPU 1 beside it is taken rather than GPU 0; without that the lowest is."""
    spots = [(0, "a"), (0, "b"), (0, "b")]

    assert {"gpu": [1], "rdma": [1]} == chosen(box(spots, spots[:2], busy_gpus=[2]), {GPUS: 1, UNITS: 1}, SAME_PCIE)
    assert {"gpu": [0], "rdma": [0]} == chosen(box(spots, spots[:2]), {GPUS: 1, UNITS: 1}, SAME_PCIE)


def test_of_several_root_complexes_those_in_use_are_taken_first() -> None:
    """GPU 3 beside GPU 2 is held: the second GPU comes from the lowest of the idle root complexes."""
    spots = [(0, "a"), (0, "b"), (0, "c"), (0, "c")]

    assert {"gpu": [0, 2], "rdma": [0, 2]} == chosen(
        box(spots, spots[:3], busy_gpus=[3]), {GPUS: 2, UNITS: 1}, SAME_PCIE
    )


def test_a_root_complex_that_went_without_gets_one_more_nic_and_no_two() -> None:
    """One NIC is asked for, on `a`; of the two on `b`, where the other GPU is, one is given as well."""
    node = box([(0, "a"), (0, "b")], [(0, "a"), (0, "b"), (0, "b")])

    assert {"gpu": [0, 1], "rdma": [0, 1]} == chosen(node, {GPUS: 2, UNITS: 1}, TOGETHER)


def test_a_switch_that_is_not_known_is_no_smaller_part_of_the_machine() -> None:
    """GPU 2 is on a switch of its own; of GPUs 0 and 1 only the root complex is known."""
    node = box([(0, "a", ""), (0, "a", ""), (0, "b", "b1")])

    assert {"gpu": [2]} == chosen(node, {GPUS: 1})


def test_each_step_of_a_search_is_told_to_who_asked() -> None:
    """So the searches of all containers of a pod have one limit."""
    steps: list[None] = []
    spots = [(0, "a"), (0, "b"), (0, "c")]
    asked = JointRequest(
        demand=demand({GPUS: 3, UNITS: 1}, SAME_PCIE), inventory=box(spots, spots), step=lambda: steps.append(None)
    )

    allocate_all_types(asked)

    assert steps
