"""What the API server shows of pods and nodes reaches the view of the cluster, the reservations and the metrics."""

from asyncio import get_running_loop
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import anyio
import pytest
from api_server_support import shown_pod
from fact_support import reservation
from registry_support import watch_of
from view_support import SETTLED

from topoalign.core.model.errors import BusRefused
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.ports import ApiUnavailable, PodEvent
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.kubernetes.cluster_watch import PAUSE
from topoalign.registry.scheduling.kubernetes.pod_events import BURST, BURST_SECONDS
from topoalign.registry.scheduling.kubernetes.refused_pods import refused_event
from topoalign.registry.scheduling.kubernetes.requeue import KEPT_SECONDS
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


class Reserved(ClusterReservations):
    """Pods that have a reservation, and whether it can be ended."""

    def __init__(self) -> None:
        self.uids: set[str] = set()
        self.nodes = [NODE]
        self.names: dict[str, str] = {}
        self.read = True
        self.refusing = False
        self.forgotten: list[NodeName] = []

    def of_pod(self, uid: str) -> dict[NodeName, Reservation]:
        return dict.fromkeys(self.nodes, reservation(uid)) if uid in self.uids else {}

    def behind(self) -> str | None:
        return None if self.read else "not read"

    def pods(self) -> dict[str, tuple[str, str]]:
        return {uid: ("ml", self.names.get(uid, "gone")) for uid in self.uids}

    def forget(self, node: NodeName, *, although_reserved: bool = False) -> None:
        self.forgotten.append(node)

    async def cancel(self, uid: str, nodes: Collection[NodeName] | None = None) -> None:
        assert nodes == {NODE}
        if self.refusing:
            raise BusRefused("no permission", "give it")
        self.uids.discard(uid)


class World:
    """A cluster with its watch, and a clock that the test advances."""

    def __init__(self, delete_refused: bool = False) -> None:
        self.clock = ManualClock()
        self.cluster = FakeCluster()
        self.reserved = Reserved()
        self.api = MemoryKubernetes(self.cluster)
        self.view = ClusterView(Cluster(), lambda: SETTLED, self.clock)
        self.watch = watch_of(self.api, self.clock, self.view, self.reserved, delete_refused=delete_refused)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background() as tasks:
            tasks.start_soon(self.watch.run)
            await self.settle()
            yield

    async def settle(self) -> None:
        await all_tasks_blocked()

    def held(self, node: NodeName = NODE) -> list[str]:
        waiting = self.view.pods_on(node).waiting(NodeState(node=node), lambda reserved: None)
        return [each.request.name for each, _ in waiting]

    def refuse(self, name: str, reason: str = "TopologyAffinityError") -> None:
        self.cluster.set_status("ml", name, phase="Failed", reason=reason)

    @property
    def woken(self) -> list[str]:
        annotations = (node["metadata"].get("annotations", {}) for node in self.cluster.nodes)
        return [each["topoalign.io/woken"] for each in annotations if "topoalign.io/woken" in each]


def plain_pod(name: str, **requests: str) -> dict[str, object]:
    container = {"name": "main", "image": "i", "resources": {"requests": requests}}
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"containers": [container], "nodeName": NODE}}


async def test_bound_pods_are_expected_in_the_order_of_binding() -> None:
    """Also where another scheduler bound them, and those that were bound before the registry began."""
    world = World()
    world.cluster.add_pod(shown_pod("old", node=NODE))
    async with world.running():
        for name in ("b", "a"):
            world.cluster.add_pod(shown_pod(name))
            world.cluster.bind("ml", name, {"target": {"name": NODE}})
            world.cluster.set_status("ml", name, phase="Running")
            await world.settle()

        assert ["old", "b", "a"] == world.held()


async def test_a_pod_without_anything_of_its_own_is_not_held() -> None:
    """A burstable pod without devices: its kubelet hands nothing out to it."""
    world = World()
    world.cluster.add_pod(plain_pod("plain", cpu="500m", memory="1Gi"))
    world.cluster.add_pod(plain_pod("odd", cpu="much"))
    async with world.running():
        assert [] == world.held()


async def test_a_pod_that_waits_is_kept_as_it_was_shown_last() -> None:
    """Until it is bound or gone; one that will hold nothing is not kept."""
    world = World()
    uid = world.cluster.add_pod(shown_pod("p"))["metadata"]["uid"]
    gone = world.cluster.add_pod(shown_pod("gone"))["metadata"]["uid"]
    world.cluster.add_pod(shown_pod("nothing", gpus=0))
    async with world.running():
        first = set(world.watch.pods.waiting)
        world.cluster.pods.merge(("ml", "p"), {"metadata": {"annotations": {GANG: "y"}}})
        world.cluster.delete_pod("ml", "gone")
        await world.settle()
        kept = await world.watch.pods.waiting_pod("ml", "p", uid, 0)
        world.cluster.bind("ml", "p", {"target": {"name": NODE}})
        await world.settle()

        assert {uid, gone} == first
        assert kept is not None and {GANG: "y"} == kept.to_schedule().request.annotations
        assert ({}, {uid: NODE}) == (world.watch.pods.waiting, world.watch.pods.bound)


async def test_what_cannot_be_ended_yet_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the bus is away. It is seen again every second, and a list of it would grow all the time."""
    world, bus = World(), anyio.Event()
    world.reserved.uids.add("gone")

    async def cancel(uid: str, nodes: Collection[NodeName] | None = None) -> None:
        await bus.wait()
        world.reserved.uids.discard(uid)

    monkeypatch.setattr(world.reserved, "cancel", cancel)
    async with world.running():
        for _ in range(10):
            await world.clock.advance(1)
            await world.settle()
        asked = len(world.watch._cancelled)
        bus.set()
        await world.settle()

        assert (1, 0, set()) == (asked, len(world.watch._cancelled), world.reserved.uids)


@pytest.mark.parametrize("how", ["deleted", "succeeded", "refused"])
async def test_a_pod_that_ended_holds_nothing_and_is_not_reserved(how: str) -> None:
    world = World()
    uid = world.cluster.add_pod(shown_pod("p", node=NODE))["metadata"]["uid"]
    async with world.running():
        world.reserved.uids.add(uid)
        assert NODE == world.watch.pods.bound[uid]
        if how == "deleted":
            world.cluster.delete_pod("ml", "p", grace=0)
        elif how == "succeeded":
            world.cluster.set_status("ml", "p", phase="Succeeded")
        else:
            world.refuse("p")
        await world.settle()

        assert ([], set(), {}) == (world.held(), world.reserved.uids, world.watch.pods.bound)


async def test_what_is_reserved_for_a_bound_pod_elsewhere_ends() -> None:
    """It was stored after its registry had given up the bind. What is reserved on the pod's own node stays."""
    world = World()
    world.reserved.nodes = [NODE, NodeName("node-2")]
    here, elsewhere = (
        str(world.cluster.add_pod(shown_pod(name, node=node))["metadata"]["uid"])
        for name, node in (("here", NODE), ("elsewhere", "node-2"))
    )
    async with world.running():
        world.reserved.uids = {here, elsewhere}
        world.view.reserve(NODE, tuple(reservation("p", uid=uid) for uid in (here, elsewhere)))
        await world.clock.advance(PAUSE)
        await world.settle()

        assert {here} == world.reserved.uids


async def test_what_is_stored_for_a_pod_after_its_end_ends_too() -> None:
    """Nobody tells of its end again. A pod that is reserved for before it is shown keeps what it has."""
    world = World()
    async with world.running():
        await world.clock.advance(PAUSE)
        uid = str(world.cluster.add_pod(shown_pod("soon"))["metadata"]["uid"])
        world.reserved.uids = {"gone", uid}
        world.reserved.names = {uid: "soon"}
        for _ in range(2):
            await world.clock.advance(PAUSE)
            await world.settle()

        assert {uid} == world.reserved.uids


async def test_reservations_of_pods_that_ended_before_the_start_end() -> None:
    """Nobody tells of their end; one is deleted, one has finished, one was created again under its name."""
    world = World()
    done = world.cluster.add_pod(shown_pod("done", node=NODE))["metadata"]["uid"]
    world.cluster.set_status("ml", "done", phase="Succeeded")
    waiting = world.cluster.add_pod(shown_pod("waiting"))["metadata"]["uid"]
    again = world.cluster.add_pod(shown_pod("again"))["metadata"]["uid"]
    world.reserved.read = False
    async with world.running():
        world.reserved.names = {done: "done", waiting: "waiting", "old": "again", again: "again", "deleted": "deleted"}
        world.reserved.uids = {*world.reserved.names}
        world.reserved.read = True
        await world.clock.advance(PAUSE)
        await world.settle()

        assert {waiting, again} == world.reserved.uids


async def test_a_reservation_is_not_ended_the_first_time_its_pod_is_not_shown() -> None:
    """Another registry has reserved, and the pod has just been created: only after a second the API server is asked."""
    world = World()
    async with world.running():
        await world.clock.advance(PAUSE)
        world.reserved.uids.add("new")
        await world.clock.advance(PAUSE)
        first = {*world.reserved.uids}
        await world.clock.advance(PAUSE)
        await world.settle()

        assert ({"new"}, set()) == (first, world.reserved.uids)


async def test_a_pod_deleted_before_its_binding_loses_its_reservation() -> None:
    world = World()
    uid = world.cluster.add_pod(shown_pod("p"))["metadata"]["uid"]
    async with world.running():
        world.reserved.uids.add(uid)
        world.cluster.delete_pod("ml", "p")
        await world.settle()

        assert set() == world.reserved.uids


async def test_a_reservation_that_cannot_be_ended_holds_up_no_other() -> None:
    world = World()
    uids = [world.cluster.add_pod(shown_pod(name))["metadata"]["uid"] for name in ("p", "q")]
    async with world.running():
        world.reserved.uids.update(uids)
        world.reserved.refusing = True
        world.cluster.delete_pod("ml", "p")
        await world.settle()
        world.reserved.refusing = False
        world.cluster.delete_pod("ml", "q")
        await world.settle()

        assert {uids[0]} == world.reserved.uids


async def test_a_refused_pod_is_counted_once_with_its_reservation() -> None:
    """What had failed before the registry began is not counted, and neither is a pod that failed by itself."""
    world = World()
    for name in ("before", "ours", "foreign", "own-fault", "room"):
        world.cluster.add_pod(shown_pod(name, node=NODE))
    world.refuse("before")
    async with world.running():
        world.reserved.uids.add(world.cluster.pods.get(("ml", "ours"))["metadata"]["uid"])
        world.refuse("ours")
        world.refuse("foreign", "UnexpectedAdmissionError")
        world.refuse("own-fault", "Error")
        world.refuse("room", "OutOfnvidia.com/gpu")
        await world.settle()
        world.cluster.set_status("ml", "ours", message="told again")
        world.cluster.pods.compact()
        await world.settle()

        expected = {("TopologyAffinityError", True): 1, ("UnexpectedAdmissionError", False): 1, ("OutOf", False): 1}
        assert expected == world.watch.refused.counts


async def test_refused_pods_of_controllers_are_deleted_six_a_minute() -> None:
    world = World(delete_refused=True)
    for number in range(9):
        world.cluster.add_pod(shown_pod(f"p-{number}", node=NODE, owner="Job"))
    world.cluster.add_pod(shown_pod("bare", node=NODE))
    world.cluster.add_pod(shown_pod("ending", node=NODE, owner="Job"))
    world.cluster.pods.merge(("ml", "ending"), {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    async with world.running():
        for name in ("bare", "ending", *(f"p-{number}" for number in range(9))):
            world.refuse(name)
        await world.settle()
        left = [len(world.cluster.pods)]
        for seconds in (9, 1, 60):
            await world.clock.advance(seconds)
            left.append(len(world.cluster.pods))

        assert [5, 5, 4, 2] == left
        assert ["bare", "ending"] == [pod["metadata"]["name"] for pod in world.cluster.pods]
        assert 9 == world.watch.refused.deleted


async def test_refused_pods_stay_unless_their_deletion_is_wished() -> None:
    world = World()
    world.cluster.add_pod(shown_pod("p", node=NODE, owner="Job"))
    async with world.running():
        world.refuse("p")
        await world.settle()

        assert 1 == len(world.cluster.pods)


async def test_nodes_bring_labels_and_are_forgotten_when_deleted() -> None:
    world = World()
    world.cluster.add_node(NODE, {"zone": "a"})
    async with world.running():
        seen = world.view.labels(NODE)["zone"], world.watch.nodes.has_gone(NODE)
        world.cluster.nodes.remove(("", NODE))
        await world.settle()

        assert (("a", False), ({}, True)) == (seen, (world.view.labels(NODE), world.watch.nodes.has_gone(NODE)))
        assert [NODE] == world.reserved.forgotten


async def test_not_ready_until_pods_and_nodes_are_listed() -> None:
    world = World()
    before = world.watch.behind()
    async with world.running():
        assert ("nodes and pods of Kubernetes are not listed yet", None) == (before, world.watch.behind())
        assert (1, 36) == world.watch.version


async def test_waiting_pods_are_woken_seldom_and_together() -> None:
    """At once, and then once in five seconds however often it is asked for."""
    world = World()
    world.cluster.add_node(NODE)
    world.cluster.add_pod(shown_pod("p"))
    async with world.running():
        for _ in range(3):
            world.watch.requeue.ask("reservation-expired")
        await world.settle()
        first, done = world.woken, world.watch.requeue.done
        world.watch.requeue.ask("node-whole")
        await world.clock.advance(4.9)
        early = world.watch.requeue.done
        await world.clock.advance(0.2)

        assert (1, 1, 2) == (done, early, world.watch.requeue.done)
        assert ["reservation-expired 1700000000.000"] == first
        assert ["node-whole 1700000005.000"] == world.woken


async def test_nobody_is_woken_while_no_pod_waits() -> None:
    world = World()
    world.cluster.add_node(NODE)
    uid = world.cluster.add_pod(shown_pod("p"))["metadata"]["uid"]
    async with world.running():
        await world.api.bind("ml", "p", uid, NODE)
        await world.settle()
        world.watch.requeue.ask("reservation-expired")
        await world.clock.advance(60)

        assert [] == world.woken


async def test_a_pod_that_is_shown_after_the_change_is_woken() -> None:
    """The scheduler has it earlier: it was refused by what was true before, and nothing else would wake it."""
    world = World()
    world.cluster.add_node(NODE)
    async with world.running():
        await world.settle()
        world.watch.requeue.ask("node-whole")
        await world.settle()
        before = world.watch.requeue.done
        world.cluster.add_pod(shown_pod("p"))
        await world.settle()
        world.cluster.add_pod(shown_pod("later"))
        await world.clock.advance(60)

        assert (0, 1) == (before, world.watch.requeue.done)


async def test_a_change_of_long_ago_wakes_no_pod() -> None:
    world = World()
    world.cluster.add_node(NODE)
    async with world.running():
        await world.settle()
        world.watch.requeue.ask("node-whole")
        await world.clock.advance(KEPT_SECONDS + 1)
        world.cluster.add_pod(shown_pod("p"))
        await world.clock.advance(60)

        assert 0 == world.watch.requeue.done


async def test_a_wake_up_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, wake = World(), MemoryKubernetes.wake
    world.cluster.add_node(NODE)
    world.cluster.add_pod(shown_pod("p"))
    failing = [ApiUnavailable("away")]

    async def once(self: MemoryKubernetes, node: NodeName, text: str) -> None:
        if failing:
            raise failing.pop()
        await wake(self, node, text)

    monkeypatch.setattr(MemoryKubernetes, "wake", once)
    async with world.running():
        world.watch.requeue.ask("reservation-expired")
        await world.settle()
        before = world.watch.requeue.done
        await world.clock.advance(6)

        assert (0, 1) == (before, world.watch.requeue.done)


async def test_the_same_report_is_written_once_in_ten_minutes() -> None:
    """Then again, if the former Event is gone; else one Event stays, which counts as written."""
    world = World()
    report = PodEvent(namespace="ml", name="p", uid="u", reason="TopologyReserved", note="GPU-0")
    async with world.running():
        for _ in range(3):
            world.watch.reports.submit(report)
            await world.settle()
        (first,) = world.cluster.events
        await world.clock.advance(600)
        world.watch.reports.submit(report)
        await world.settle()
        assert [first] == [*world.cluster.events]
        assert {"written": 2, "repeated": 2} == world.watch.reports.counts

        world.cluster.events.remove(("ml", first["metadata"]["name"]))
        await world.clock.advance(600)
        world.watch.reports.submit(report)
        await world.settle()
        assert (1, 3) == (len(world.cluster.events), world.watch.reports.counts["written"])


async def test_replicas_write_one_event_for_a_pod_that_its_node_refused() -> None:
    """One of them may know the reservation that the other one does not."""
    world = World()
    world.cluster.add_pod(shown_pod("p", node=NODE))
    world.refuse("p")
    refused = await world.api.pod("ml", "p")
    assert refused is not None

    assert refused_event(refused, reserved=True).key == refused_event(refused, reserved=False).key


async def test_a_report_that_was_dropped_is_written_when_it_comes_again() -> None:
    """Unlike one that was written: it comes again within ten minutes and is left out."""
    world = World()
    reports = [PodEvent(namespace="ml", name=f"p{n}", uid=f"u{n}", reason="R", note="") for n in range(BURST + 1)]
    async with world.running():
        for report in reports:
            world.watch.reports.submit(report)
        await world.clock.advance(BURST_SECONDS)
        for report in (reports[0], reports[-1]):
            world.watch.reports.submit(report)
        await world.settle()

    assert {"written": BURST + 1, "dropped": 1, "repeated": 1} == world.watch.reports.counts


async def test_what_a_report_tells_of_is_answered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is awake before the answer is on its way."""
    world, order = World(), list[str]()

    async def report(report: PodEvent) -> None:
        order.append("written")

    monkeypatch.setattr(world.api, "report", report)
    async with world.running():
        world.watch.reports.submit(PodEvent(namespace="ml", name="p", uid="u", reason="R", note=""))
        get_running_loop().call_soon(order.append, "answered")
        await world.settle()

    assert ["answered", "written"] == order


async def test_reports_beyond_the_bound_are_dropped_and_counted() -> None:
    """Sixty at once, then two a second."""
    world = World()
    async with world.running():
        for number in range(100):
            world.watch.reports.submit(PodEvent(namespace="ml", name="p", uid=str(number), reason="R", note=""))
            await world.settle()
        at_once = len(world.cluster.events)
        await world.clock.advance(1)
        for number in range(100, 110):
            world.watch.reports.submit(PodEvent(namespace="ml", name="p", uid=str(number), reason="R", note=""))
            await world.settle()

        assert (60, 62) == (at_once, len(world.cluster.events))
        assert 48 == world.watch.reports.counts["dropped"]
