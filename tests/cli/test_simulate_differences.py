"""Whether pods of a simulated cluster got what was reserved for them."""

from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
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
    return Given(pod, frozenset(map(DeviceID, gpus)), at)


def test_a_pod_that_got_what_was_reserved_does_not_differ() -> None:
    found = differences(record(a=("g0", "g1")), [given("a", "g1", "g0"), given("unreserved", "g7")], [])

    assert {"undisturbed": 1} == {name: count for name, count in found.items() if count}


def test_pods_that_got_what_was_reserved_for_each_other_are_swapped() -> None:
    found = differences(record(a=("g0",), b=("g1",)), [given("a", "g1"), given("b", "g0")], [])

    assert (1, 0) == (found["swapped"], found["deviated"])


def test_a_pod_that_got_what_was_reserved_for_nobody_deviated() -> None:
    assert 1 == differences(record(a=("g0",)), [given("a", "g2")], [12.0, 9.9 - UNKNOWN_SECONDS])["deviated"]


def test_a_pod_is_aligned_anew_where_something_became_free() -> None:
    """A pod of its node ended, or a reservation was given back, before the kubelet admitted it."""
    for node, freed in ((record(a=("g0",)), [10.1 - UNKNOWN_SECONDS]), (record(10.5, a=("g0",)), [])):
        found = differences(node, [given("a", "g2")], freed)
        assert (1, 0, 0) == (found["realigned"], found["deviated"], found["undisturbed"])
