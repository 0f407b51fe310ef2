"""All pods of a gang have a place, within one NVLink fabric where that has room, or none has."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from decision_support import container, machine, node, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.admission.gang_plan import (
    GangMember,
    GangPlacement,
    Plan,
    fabric_of,
    group_nodes_by_fabric,
    plan_gang,
)
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.model import Fabric, Topology

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)


def named(name: str, gpus: int) -> GangPlacement:
    """A node with so many GPUs, half of them near each of two NUMA nodes."""
    state = node(machine(gpus=[0] * (gpus // 2) + [1] * (gpus - gpus // 2)))
    return GangPlacement(msgspec.structs.replace(state, node=NodeName(name)), RULES)


ANYWHERE = frozenset(map(NodeName, ("a", "b", "c", "n0", "n1", "n2", "n3")))


def members(*gpus: int, nodes: frozenset[NodeName] = ANYWHERE) -> list[GangMember]:
    return [
        GangMember(f"uid-{n}", pod(container("main", gpus=each), name=f"p{n}"), nodes) for n, each in enumerate(gpus)
    ]


def planned(gang: Sequence[GangMember], nodes: Mapping[str, int], fixed: tuple[str, str] | None = None) -> Plan | None:
    """The plan for nodes with so many GPUs each."""
    candidates = {NodeName(name): named(name, gpus) for name, gpus in nodes.items()}
    first = None if fixed is None else (fixed[0], NodeName(fixed[1]))
    steps = plan_gang("ml/g", gang, [*candidates], candidates.get, 60.0, first)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan: Plan | None = end.value
            return plan


def uids(plan: Plan | None) -> dict[str, list[str]] | None:
    return None if plan is None else {name: sorted(each.pod_uid for each in there) for name, there in plan.items()}


def test_nodes_are_filled_one_after_the_other() -> None:
    plan = planned(members(2, 2, 2), {"a": 4, "b": 4, "c": 4})

    assert {"a": ["uid-0", "uid-1"], "b": ["uid-2"]} == uids(plan)
    assert plan is not None
    gpus = [each.containers[0].devices[GPU] for each in plan[NodeName("a")]]
    assert ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] == sorted(gpu for ids in gpus for gpu in ids)
    assert {("ml/g", 60.0)} == {(each.gang, each.seconds_left) for there in plan.values() for each in there}


def test_a_gang_that_does_not_fit_whole_gets_nothing() -> None:
    assert planned(members(2, 2, 2), {"a": 4, "b": 1}) is None
    assert planned(members(1), {}) is None


def test_the_largest_pods_are_placed_first() -> None:
    """Else the small ones take what the large ones need."""
    assert {"a": ["uid-1"], "b": ["uid-0", "uid-2"]} == uids(planned(members(1, 4, 1), {"a": 4, "b": 2}))


def test_a_pod_that_is_to_be_bound_now_goes_to_its_node() -> None:
    """And if that does not work there is no such plan."""
    assert {"b": ["uid-1"], "a": ["uid-0", "uid-2"]} == uids(
        planned(members(2, 4, 2), {"a": 4, "b": 4}, ("uid-1", "b"))
    )
    assert planned(members(2, 4), {"a": 4, "b": 2}, ("uid-1", "b")) is None


def test_a_launcher_without_gpus_is_planned_beside_its_workers() -> None:
    """On its own nodes, or where workers leave it CPUs; and workers do not take the node that it needs."""
    workers, launcher = members(4, 4), pod(container("main", cpus=2, gib=1), name="launcher")
    only_there = frozenset({NodeName("c")})

    beside = planned([*workers, GangMember("l", launcher, ANYWHERE)], {"a": 4, "b": 4})
    apart = planned([*workers, GangMember("l", launcher, only_there)], {"a": 4, "b": 4, "c": 4})
    assert {"a": ["l", "uid-0"], "b": ["uid-1"]} == uids(beside)
    assert {"a": ["uid-0"], "b": ["uid-1"], "c": ["l"]} == uids(apart)


def test_a_pod_goes_to_no_node_that_is_not_for_it() -> None:
    """Although another member may go there; one with few nodes is placed before a larger one that may go anywhere."""
    there = frozenset({NodeName("a")})
    (small,) = members(2, nodes=there)
    large = GangMember("large", pod(container("main", gpus=4), name="large"), ANYWHERE)

    assert {"a": ["uid-0"], "b": ["large"]} == uids(planned([large, small], {"a": 4, "b": 4}))
    assert planned([large, small], {"b": 4, "c": 4}) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(0, 4), max_size=4))
def test_a_plan_is_what_the_nodes_would_admit(gpus: list[int], nodes: list[int]) -> None:
    """The naive reference admits the planned pods again, one after the other. Pods that are alike fit if there is room."""
    plan = planned(members(*gpus), {f"n{n}": count for n, count in enumerate(nodes)})

    if plan is None:
        assert len({*gpus}) > 1 or sum(count // gpus[0] for count in nodes) < len(gpus) or gpus[0] == 3
        return
    assert sorted(f"uid-{n}" for n in range(len(gpus))) == sorted(
        each.pod_uid for there in plan.values() for each in there
    )
    for name, there in plan.items():
        state = named(name, nodes[int(name[1:])]).state
        for each in there:
            decision = admit(state, pod(container("main", gpus=gpus[int(each.pod_uid[4:])]), name=each.pod), RULES)
            assert isinstance(decision, Admission)
            for allocation in decision.allocations:
                state = state.holding(allocation)


def test_each_fabric_is_tried_alone_and_then_all_nodes() -> None:
    """That of the node which was asked for comes first."""
    fabrics = {NodeName(name): fabric for name, fabric in (("a", "x/1"), ("b", "x/2"), ("c", ""), ("d", "x/1"))}

    assert [("a", "d"), ("b",), ("a", "b", "c", "d")] == [*group_nodes_by_fabric(fabrics)]
    assert [("b",), ("a", "d"), ("a", "b", "c", "d")] == [*group_nodes_by_fabric(fabrics, NodeName("b"))]


@pytest.mark.parametrize(
    ("fabrics", "expected"),
    [
        ([Fabric(cluster="u", clique=1)] * 2, "u/1"),
        ([Fabric(cluster="u", clique=1), Fabric(cluster="u", clique=2)], ""),
        ([None, Fabric(cluster="u", clique=1)], ""),
        ([None, None], ""),
    ],
)
def test_a_node_is_in_a_fabric_with_all_its_gpus(fabrics: list[Fabric | None], expected: str) -> None:
    found = machine(gpus=(0, 1))
    gpus = tuple(msgspec.structs.replace(gpu, fabric=its) for gpu, its in zip(found.gpus, fabrics, strict=True))

    assert expected == fabric_of(msgspec.structs.replace(found, gpus=gpus))
    assert "" == fabric_of(Topology())
