"""Whose request works next, and which connection is closed: against a reference that was written from the rule."""

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from topoalign.runtime.fair_share import CATCH_UP_SECONDS, FairQueue, OpenConnections, Peer, ServedRequest

PEERS: tuple[Peer, ...] = (("a",), ("b",), ("c",), ("a", "probe"))
SLICES = st.sampled_from((0.0, 0.001, 0.005, 0.02, 0.1, 0.3))


class Reference:
    """The rule, without heaps and without forgetting anything."""

    def __init__(self) -> None:
        self.waiting: list[tuple[ServedRequest, float]] = []
        """Requests in the order in which they were added, with what each had had then."""
        self.since: dict[Peer, int] = {}
        self.used: dict[Peer, float] = {}
        self.now = 0.0
        self.added = 0

    def start(self, peer: Peer) -> float:
        return max(self.used.get(peer, 0.0), self.now - CATCH_UP_SECONDS)

    def add(self, request: ServedRequest) -> None:
        self.added += 1
        if all(each.peer != request.peer for each, _ in self.waiting):
            self.since[request.peer] = self.added
            self.used[request.peer] = self.start(request.peer)
        self.waiting.append((request, request.seconds))

    def take(self) -> ServedRequest:
        peers = {each.peer for each, _ in self.waiting}
        peer = min(peers, key=lambda each: (self.used[each], self.since[each]))
        mine = [each for each in self.waiting if each[0].peer == peer]
        chosen = min(mine, key=lambda each: each[1])  # the first of several
        self.waiting.remove(chosen)
        self.now = max(self.now, self.used[peer])
        return chosen[0]

    def charge(self, request: ServedRequest, seconds: float) -> None:
        self.used[request.peer] = self.start(request.peer) + seconds


@given(
    st.lists(st.one_of(st.sampled_from(PEERS), st.tuples(SLICES, st.booleans())), max_size=60),
)
@example([("c",), (0.1, True), (0.0, False), ("a",), ("b",), ("a", "probe"), (0.0, False), (0.0, False), (0.0, False)])
@example([("a",), (0.3, True), (0.0, True), ("b",), (0.0, False), ("c",), *[(0.02, True)] * 4])
def test_the_order_is_that_of_the_reference(steps: list[Peer | tuple[float, bool]]) -> None:
    """A step adds a request of a peer, or takes one, which works for so long and perhaps waits again."""
    queue, reference = FairQueue[ServedRequest](), Reference()
    for step in steps:
        if isinstance(step[0], str):
            request = ServedRequest(step)
            queue.add(request)
            reference.add(request)
        elif queue:
            seconds, again = step
            taken = queue.take()
            assert taken is reference.take()
            reference.charge(taken, seconds)
            queue.charge(taken, seconds)
            if again:
                queue.add(taken)
                reference.add(taken)
    assert bool(queue) == bool(reference.waiting)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.data())
def test_peers_that_always_wait_have_equal_time(numbers: list[int], data: st.DataObject) -> None:
    """However many requests each of them has: they differ by one slice, and by what may be caught up."""
    queue, had = FairQueue[ServedRequest](), {(str(place),): 0.0 for place in range(len(numbers))}
    for peer, number in zip(had, numbers, strict=True):
        for _ in range(number):
            queue.add(ServedRequest(peer))
    for _ in range(200):
        request = queue.take()
        seconds = data.draw(st.sampled_from((0.001, 0.005, 0.02)))
        queue.charge(request, seconds)
        had[request.peer] += seconds  # type: ignore[index]  # one of them
        queue.add(request)

    assert max(had.values()) - min(had.values()) <= 0.02 + 1e-9


def test_a_small_request_goes_before_large_ones_of_its_peer() -> None:
    queue, large, small = FairQueue[ServedRequest](), [ServedRequest(("a",)) for _ in range(16)], ServedRequest(("a",))
    for each in large:
        queue.charge(each, 0.01)
        queue.add(each)
    queue.add(small)

    assert small is queue.take()


def test_time_that_was_not_used_is_not_saved_up() -> None:
    """After a long pause a peer catches up, and then has its turns like the others."""
    queue, busy, paused = FairQueue[ServedRequest](), ServedRequest(("a",)), ServedRequest(("b",))
    for _ in range(1_000):
        queue.charge(busy, CATCH_UP_SECONDS / 5.05)
        queue.add(busy)
        queue.take()
    order = []
    queue.add(busy)
    queue.add(paused)
    for _ in range(40):
        request = queue.take()
        order.append(request is paused)
        queue.charge(request, CATCH_UP_SECONDS / 5.05)
        queue.add(request)

    assert [True] * 5 == order[:5]
    assert 5 <= sum(order) - sum(not each for each in order) <= 7


@dataclass(frozen=True, eq=False)
class Held:
    """A connection."""

    peer: Peer
    since: float
    waited_for: bool

    def is_waited_for(self) -> bool:
        return self.waited_for


@given(st.lists(st.builds(Held, st.sampled_from(PEERS), st.floats(0, 2), st.booleans()), min_size=1, max_size=30))
def test_the_peer_with_the_most_connections_gives_up_the_slowest(places: list[Held]) -> None:
    open_now = OpenConnections[Held]()
    for each in places:
        open_now.add(each)
    for each in sorted(places, key=lambda each: each.since):
        open_now.renew(each)
    closed = open_now.first_to_close()
    counts = {peer: sum(each.peer == peer for each in places) for peer in PEERS}

    assert counts[closed.peer] == max(counts.values())
    others = [each for each in places if counts[each.peer] == counts[closed.peer]]
    assert closed.waited_for or not any(each.waited_for for each in others)
    assert not any(each.since < closed.since for each in others if each.waited_for == closed.waited_for)
