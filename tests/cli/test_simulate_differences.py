"""Whether pods of a simulated cluster got what was reserved for them."""

from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.tools.simulate.cases import Taken, case_of, lines
from topoalign.tools.simulate.reserved import UNKNOWN_SECONDS, Given, NodeRecord, differences


def record(*cancelled_at: float, **gpus: tuple[str, ...]) -> NodeRecord:
    """A node on which these GPUs were reserved for these pods at second 10."""
    made = NodeRecord()
    for pod, ids in gpus.items():
        container = ReservedContainer(container=ContainerName("main"), devices={GPU: tuple(map(DeviceID, ids))})
        reservation = Reservation(
            pod_uid=pod, namespace=Namespace("ml"), pod=PodName(pod), containers=(container,), seconds_left=9
        )
        made.note(changed(reservations=(reservation,), made=(pod,)), 10.0)
    for at in cancelled_at:
        made.note(changed(cancelled=("another",)), at)
    return made


def changed(**said: object) -> ReservationsChanged:
    fields = {"node": NodeName("node-1"), "epoch": 1, "seq": 1, "writer": "r1", "reservations": ()} | said
    return ReservationsChanged(**fields)  # type: ignore[arg-type]  # as the fields are


def given(pod: str, *gpus: str, at: float = 11.0) -> Given:
    return Given(Taken(pod, pod, at), frozenset(map(DeviceID, gpus)))


def test_a_pod_that_got_what_was_reserved_does_not_differ() -> None:
    found = differences(record(a=("g0", "g1")), [given("a", "g1", "g0"), given("unreserved", "g7")], [])

    assert {"undisturbed": 1} == {name: count for name, count in found.counts.items() if count}


def test_pods_that_got_what_was_reserved_for_each_other_are_swapped() -> None:
    found = differences(record(a=("g0",), b=("g1",)), [given("a", "g1"), given("b", "g0")], [])

    assert (1, 0) == (found.counts["swapped"], found.counts["deviated"])


def test_a_pod_that_got_what_was_reserved_for_nobody_deviated() -> None:
    found = differences(record(a=("g0",)), [given("a", "g2")], [12.0, 9.9 - UNKNOWN_SECONDS])

    assert 1 == found.counts["deviated"]
    assert [given("a", "g2")] == found.deviated


def test_a_pod_is_aligned_anew_where_something_became_free() -> None:
    """A pod of its node ended, or a reservation was given back, before the kubelet admitted it."""
    for node, freed in ((record(a=("g0",)), [10.1 - UNKNOWN_SECONDS]), (record(10.5, a=("g0",)), [])):
        found = differences(node, [given("a", "g2")], freed).counts
        assert (1, 0, 0) == (found["realigned"], found["deviated"], found["undisturbed"])


def test_a_pod_of_whose_devices_a_realigned_one_took_some_is_realigned() -> None:
    """Only b was reserved its devices long after something became free, of which a took advantage."""
    node, early = record(a=("g0",), b=("g4", "g5")), 10.0 - UNKNOWN_SECONDS
    node.reserved["a"] = node.reserved["a"]._replace(at=early - 1)

    found = differences(node, [given("a", "g4"), given("b", "g0", "g1")], [early - 0.5]).counts
    alone = differences(node, [given("b", "g0", "g1")], [early - 0.5]).counts

    assert (2, 0, 0) == (found["realigned"], found["deviated"], found["undisturbed"])
    assert (0, 1, 1) == (alone["realigned"], alone["deviated"], alone["undisturbed"])


def test_a_case_tells_what_was_reserved_preferred_given_and_free() -> None:
    """Pod c came too late for the reservation of b, which was over, and a's was written after it."""
    node = record(a=("g0",), b=("g1",), c=("g2",))
    node.reserved["a"] = node.reserved["a"]._replace(at=11.5)
    node.note(changed(consumed=("b",)), 10.5)
    taken = Taken("c", "train", 11.0, frozenset({DeviceID("g3"), DeviceID("g2")}), [DeviceID("g3")])
    case = case_of(
        "deviated", NodeName("node-1"), taken, node.reserved, container="main", given=frozenset({DeviceID("g3")})
    )

    assert ("g2",) == case.reserved
    assert 1.0 == case.reserved_seconds
    assert (("g3",), ("g3",), ("g2", "g3"), {}) == (case.preferred, case.given, case.free, case.held)
    assert "got g3 instead of g2" == case.message
    assert "deviated: pod train, node node-1, container main: got g3 instead of g2" == lines(case)[0]


def test_a_case_tells_what_was_reserved_for_other_pods() -> None:
    """Pod a was reserved before and came after it, b has not come."""
    node, taken = record(a=("g0",), b=("g1",)), Taken("z", "z", 11.0)
    case = case_of(
        "refused",
        NodeName("node-1"),
        taken,
        node.reserved,
        {"a": 13.0, "z": 11.0},
        container=None,
        message="NotAligned",
    )

    assert {"a": -2.0, "b": None} == {pod: each.taken_seconds for pod, each in case.held.items()}
    assert {(("g0",), 1.0), (("g1",), 1.0)} == {(each.devices, each.reserved_seconds) for each in case.held.values()}
    assert ((), None, "NotAligned") == (case.reserved, case.reserved_seconds, case.message)
    assert "  held       g1 for b, written 1 s before the decision, not taken" == lines(case)[-1]
