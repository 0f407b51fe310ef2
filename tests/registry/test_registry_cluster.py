"""Pages of nodes and allocations are what sorting and filtering everything would give, at the price of the page."""

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_support import allocation, announce, tell

from topoalign.client import Delivery
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    Event,
    Owner,
)
from topoalign.core.model.ids import AllocationID, ContainerName, Namespace, NodeName, PodName
from topoalign.core.state.fold import NodeState
from topoalign.registry.api import page
from topoalign.registry.cluster_nodes import Cluster, Key

NODES = tuple(map(NodeName, ("a", "a.b", "b", "c")))
IDS = tuple(map(AllocationID, ("0", "1", "10", "2")))
NAMESPACES = (None, "ml", "web")
PODS = (None, "p", "q")

Row = tuple[NodeName, AllocationID]
Live = dict[Row, Allocation]
Deed = tuple[str, NodeName, AllocationID, str, str]


def test_a_list_that_is_read_to_its_end_has_no_next_page() -> None:
    rows = [((str(number),), number) for number in range(3)]

    assert [True, False, False] == [page(rows, limit).next is not None for limit in (2, 3, 4)]
    assert (0, 1, 2) == page(rows, 3).items


def test_of_a_node_with_a_new_epoch_only_the_new_allocations_are_listed() -> None:
    """Its seq may be the next one by chance: the fact says nothing of the allocations of the former epoch."""
    cluster, new = Cluster(), allocation("new", "p", 1)
    announce(cluster, "a", allocation("old", "p", 0))
    before = cluster.member(NodeName("a")).state
    granted = AllocationGranted(node=before.node, epoch=before.epoch + 1, seq=before.seq + 1, allocation=new)
    now = msgspec.structs.replace(before, epoch=granted.epoch, seq=granted.seq, allocations={new.id: new})
    cluster.apply(Delivery(event=granted, position=1, time=None, state=now, anew=True))

    assert [new] == [each for _, _, each in chain.from_iterable(cluster.allocations())]


deeds = st.lists(
    st.tuples(
        st.sampled_from(("grant", "bind", "release", "snapshot", "forget")),
        st.sampled_from(NODES),
        st.sampled_from(IDS),
        st.sampled_from(NAMESPACES[1:]),
        st.sampled_from(PODS[1:]),
    ),
    max_size=40,
)


class Reference:
    """All live allocations in one dict, sorted and filtered for each question."""

    def __init__(self) -> None:
        self.live: Live = {}
        self.seqs: dict[NodeName, int] = {}

    def do(self, deed: Deed) -> Event | None:
        """What the node says of it; None if it cannot be, or is no fact."""
        kind, node, name, namespace, pod = deed
        if kind == "forget":
            self.seqs.pop(node, None)
            self.live = {row: held for row, held in self.live.items() if row[0] != node}
            return None
        seq = self.seqs.get(node, 0) + 1
        owner = Owner(namespace=Namespace(namespace), pod=PodName(pod), container=ContainerName("main"))
        event: Event
        if kind == "snapshot" or seq == 1:
            held = Allocation(id=name, owner=owner)
            self.live = {row: kept for row, kept in self.live.items() if row[0] != node} | {(node, name): held}
            event = AllocationsSnapshot(node=node, epoch=1, seq=seq, allocations=(held,), digest="")
        elif kind == "grant" and (node, name) not in self.live:
            self.live[node, name] = held = Allocation(id=name)
            event = AllocationGranted(node=node, epoch=1, seq=seq, allocation=held)
        elif kind == "bind" and (node, name) in self.live:
            self.live[node, name] = Allocation(id=name, owner=owner)
            event = AllocationBound(node=node, epoch=1, seq=seq, allocation=name, owner=owner)
        elif kind == "release" and self.live.pop((node, name), None) is not None:
            event = AllocationReleased(node=node, epoch=1, seq=seq, allocation=name, reason="gone")
        else:
            return None
        self.seqs[node] = seq
        return event

    def rows(self, after: Key, node: NodeName | None, namespace: str | None, pod: str | None) -> list[Row]:
        def wanted(row: Row, held: Allocation) -> bool:
            found = (row[0], held.owner.namespace, held.owner.pod) if held.owner else (row[0], None, None)
            return all(asked in (None, has) for asked, has in zip((node, namespace, pod), found, strict=True))

        return sorted(row for row, held in self.live.items() if row > after and wanted(row, held))


@given(deeds, st.sampled_from(((), *((n,) for n in NODES), *((n, i) for n in NODES for i in IDS), ("b", "1", "x"))))
def test_allocations_are_found_as_by_sorting_and_filtering_all(doings: list[Deed], after: Key) -> None:
    """After any sequence of facts, for each filter and from any key."""
    cluster, reference = Cluster(), Reference()
    for deed in doings:
        event = reference.do(deed)
        if event is not None:
            tell(cluster, event)
        elif deed[0] == "forget":
            cluster.forget(deed[1])

    assert tuple(sorted(reference.seqs)) == cluster.nodes == tuple(member.state.node for member in cluster)
    for node in (None, *NODES):
        for namespace in NAMESPACES:
            for pod in PODS:
                found = list(chain.from_iterable(cluster.allocations(after, node, namespace, pod)))
                assert reference.rows(after, node, namespace, pod) == [row[0] for row in found]
                assert [reference.live[key] for key, _, _ in found] == [held for _, _, held in found]


@given(st.sets(st.text("ab.", min_size=1, max_size=3)), st.text("ab.", max_size=3))
def test_the_nodes_behind_a_name_come_in_the_order_of_their_names(names: set[str], after: str) -> None:
    cluster = Cluster()
    for name in names:
        tell(cluster, AllocationsSnapshot(node=NodeName(name), epoch=1, seq=1, allocations=(), digest=""))

    assert sorted(name for name in names if name > after) == [each.state.node for each in cluster.members(after)]


class Counted(dict[AllocationID, Allocation]):
    """Allocations that count how often one of them is looked up."""

    looks = 0

    def __getitem__(self, name: AllocationID) -> Allocation:
        Counted.looks += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("filters", [{}, {"node": NodeName("node-07")}])
def test_a_page_looks_at_the_rows_of_its_nodes_alone(filters: dict[str, NodeName]) -> None:
    """At those of the nodes where it begins and ends, however many there are in all."""
    cluster = Cluster()
    for n in range(20):
        announce(cluster, f"node-{n:02}", *(allocation(f"a{k:02}", f"train-{n}-{k}") for k in range(20)))
    for member in cluster:
        state = member.state
        member.state = NodeState(node=state.node, allocations=Counted(state.allocations), seq=state.seq)
    Counted.looks = 0

    found = chain.from_iterable(cluster.allocations(("node-05", "a03"), **filters))
    rows = page(((row[0], row) for row in found), 10)
    assert 20 == Counted.looks
    assert (10, True) == (len(rows.items), rows.next is not None)


def test_what_is_derived_of_a_state_is_computed_once_for_it() -> None:
    cluster = Cluster()
    announce(cluster, "node-1", allocation("a", "train", 0))
    member = cluster.member(NodeName("node-1"))
    seen: list[int] = []

    def length(state: NodeState) -> int:
        seen.append(state.seq)
        return len(state.ownership.holders)

    before = [member.derived(length), member.derived(length)]
    tell(cluster, AllocationReleased(node=NodeName("node-1"), epoch=5, seq=3, allocation=AllocationID("a"), reason=""))
    after = [member.derived(length), member.derived(length)]

    assert ([1, 1], [0, 0], [2, 3]) == (before, after, seen)
    assert "ownership" not in vars(member.state)


def test_a_fact_handed_over_with_a_later_state_brings_all_that_is_in_it() -> None:
    """As where the client left out facts in between."""
    cluster, node = Cluster(), NodeName("node-1")
    announce(cluster, node, allocation("a", "train", 0), allocation("b", "train", 1))
    live = {held.id: held for held in (allocation("b", "other", 1), allocation("c", "train", 2))}
    event = AllocationGranted(node=node, epoch=5, seq=9, allocation=live[AllocationID("c")])
    state = NodeState(node=node, epoch=5, seq=9, allocations=live)
    cluster.apply(Delivery(event=event, position=1, time=None, state=state))

    assert [(node, "b"), (node, "c")] == [key for key, _, _ in chain.from_iterable(cluster.allocations())]
    assert [(node, "c")] == [key for key, _, _ in chain.from_iterable(cluster.allocations(pod="train"))]
