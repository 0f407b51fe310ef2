"""
Binds: what the scheduler does with each outcome is measured (extender.md 6), and each of its rows is a test here. Ok is
answered only after the pod was read with our node in it, and always then.
"""

import gc
from collections.abc import AsyncIterator, Callable

import anyio
import msgspec
import pytest
from binding_support import Registry, Site, running
from fact_support import reservation, reserved_container

from topoalign.core import wire
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.errors import BusUnavailable, NoFit, TopoalignError
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.ports import Message, Stream
from topoalign.registry.ports import ApiConflict, ApiRefused, ApiUnavailable, SeenPod
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import BindUnknown, BoundElsewhere, NodeRefuses, PodGone, PodsPending
from topoalign.registry.scheduling.binding.cluster_reservations import ReservationChange
from topoalign.registry.scheduling.scheduling_api import PODS_PENDING, PodToSchedule
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_scheduler.extender import TIMEOUT_SECONDS
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "PAUSE", 0.001)
    monkeypatch.setattr(binding, "REPORTED_SECONDS", 0.0)


class Troubled(MemoryKubernetes):
    """An API server of which calls go wrong: the next `lost` binds are done without an answer, `dropped` ones are not."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.lost = self.dropped = self.unread = 0
        self.binds = self.reads = 0
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        self.binds += 1
        self.before()
        if self.dropped:
            self.dropped -= 1
            raise ApiUnavailable("no answer")
        await super().bind(namespace, name, uid, node)
        self.after()
        if self.lost:
            self.lost -= 1
            raise ApiUnavailable("no answer")

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        self.reads += 1
        if self.unread:
            self.unread -= 1
            raise ApiUnavailable("no answer")
        return await super().pod(namespace, name)


@pytest.fixture
def api(site: Site) -> Troubled:
    return Troubled(site.cluster)


@pytest.fixture
async def registry(site: Site, bus: MemoryBus, api: Troubled) -> AsyncIterator[Registry]:
    one = Registry(site, bus, api=api)
    async with running(site, bus, one):
        yield one


async def test_a_pod_is_reserved_and_bound(site: Site, registry: Registry) -> None:
    uid = site.add("a", gpus=2)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")
    assert {"a": ["GPU-0", "GPU-1"]} == registry.reserved()
    assert {"bound": 1} == registry.binder.counts


async def test_a_pod_that_gets_nothing_of_its_own_is_bound(site: Site, registry: Registry, bus: MemoryBus) -> None:
    await registry.bind("a", site.add("a", gpus=0))

    assert "node-1" == site.node_of("a")
    assert 0 == await bus.last_position(Stream.RESERVATIONS, "topoalign.v1.reservation.*")


async def test_ok_is_not_answered_for_a_binding_that_was_not_made(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler would hold the pod's GPUs for it, and nobody would ever bind it."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.5)
    uid = site.add("a")
    api.dropped = 1_000_000
    with pytest.raises(BindUnknown):
        await registry.bind("a", uid)

    assert "" == site.node_of("a")
    assert {"a": ["GPU-0"]} == registry.reserved()


async def test_a_node_that_does_not_answer_is_an_error(site: Site, bus: MemoryBus, api: Troubled) -> None:
    """C49: the node has left after the pod was filtered. Nothing is reserved and nothing bound."""
    registry = Registry(site, bus, api=api)
    uid = site.add("a")
    with pytest.raises(BusUnavailable, match="nobody answers"):
        await registry.bind("a", uid, "gone")

    assert (0, {}) == (api.binds, registry.reserved())


async def test_a_binding_whose_answer_was_lost_is_ok(site: Site, registry: Registry, api: Troubled) -> None:
    """An error would stay on the pod, which runs."""
    api.lost = 1
    await registry.bind("a", site.add("a"))

    assert ("node-1", 1) == (site.node_of("a"), api.binds)


async def test_a_pod_that_the_watch_shows_is_not_read(site: Site, registry: Registry, api: Troubled) -> None:
    """The watch is the API server's word as well, before the bind and after it."""
    uid = site.add("a")
    await registry.show("a")
    api.after = lambda: registry.shown.bind(uid, NODE)
    await registry.bind("a", uid)

    assert ("node-1", 1, 0) == (site.node_of("a"), api.binds, api.reads)


@pytest.mark.parametrize("shows", [NodeName("node-2"), None])
async def test_a_binding_that_the_watch_does_not_show_is_read(
    site: Site, registry: Registry, api: Troubled, shows: NodeName | None
) -> None:
    """It shows the pod elsewhere, or nothing in time."""
    uid = site.add("a")
    await registry.show("a")
    api.after = lambda: registry.shown.bind(uid, shows) if shows else None
    await registry.bind("a", uid)

    assert ("node-1", 1, 1) == (site.node_of("a"), api.binds, api.reads)


async def test_a_binding_is_awaited_until_the_watch_shows_it(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "REPORTED_SECONDS", 60.0)
    uid = site.add("a")
    await registry.show("a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "a", uid)
        await all_tasks_blocked()
        before = registry.binder.counts["bound"]
        registry.shown.bind(uid, NODE)

    assert (0, 1, 0) == (before, registry.binder.counts["bound"], api.reads)


async def test_a_pod_is_awaited_until_the_watch_shows_it(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may hear of a pod a moment before the registry does."""
    monkeypatch.setattr(binding, "REPORTED_SECONDS", 60.0)
    uid = site.add("a")
    api.after = lambda: registry.shown.bind(uid, NODE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "a", uid)
        await all_tasks_blocked()
        before = registry.binder.counts["bound"]
        await registry.show("a")

    assert (0, 1, 0) == (before, registry.binder.counts["bound"], api.reads)


@pytest.mark.parametrize(("how", "binds"), [("deleted", 1), ("bound", 1), ("being deleted", 0), ("another name", 0)])
async def test_what_the_watch_has_not_shown_yet_is_found_out(
    site: Site, registry: Registry, api: Troubled, how: str, binds: int
) -> None:
    """C49: the watch is behind, and the Binding is refused; or the pod is read. Nothing is bound or stays reserved."""
    uid, pod = site.add("a"), "a"
    if how == "being deleted":
        shown = site.cluster.pods.get(("ml", "a"))
        deleted = {**shown["metadata"], "deletionTimestamp": "2026-01-01T00:00:30Z"}
        site.cluster.pods.replace(("ml", "a"), {**shown, "metadata": deleted})
    await registry.show("a")
    if how == "deleted":
        site.cluster.delete_pod("ml", "a")
    if how == "bound":
        site.cluster.bind("ml", "a", {"target": {"name": "node-2"}})
    if how == "another name":
        pod = "b"
        site.add(pod)
    with pytest.raises((PodGone, BoundElsewhere)):
        await registry.bind(pod, uid)

    assert ({}, binds) == (registry.reserved(), api.binds)
    assert NODE not in [each["spec"].get("nodeName") for each in site.cluster.pods]


async def test_a_binding_that_was_not_made_is_tried_again(site: Site, registry: Registry, api: Troubled) -> None:
    """Also if the pod cannot be read for a while, before and after."""
    api.dropped = 2
    api.unread = 2
    await registry.bind("a", site.add("a"))

    assert ("node-1", 3) == (site.node_of("a"), api.binds)


async def test_nothing_is_bound_after_the_deadline(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late Binding would race with the scheduler's next try. What was reserved moves with that."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.5)
    uid = site.add("a")
    api.dropped = 1_000_000
    with pytest.raises(BindUnknown):
        await registry.bind("a", uid)
    tried, api.dropped = api.binds, 0
    await registry.bind("a", uid, "node-2")

    assert ("node-2", tried + 1) == (site.node_of("a"), api.binds)
    assert ({}, {"a": ["GPU-0"]}) == (registry.reserved(), registry.reserved("node-2"))


async def test_what_a_pod_has_reserved_is_not_in_its_own_way(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier try ended without an answer and left the whole node reserved. The next one confirms it anew."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.5)
    uid = site.add("a", gpus=4)
    api.dropped = 1_000_000
    with pytest.raises(BindUnknown):
        await registry.bind("a", uid)
    api.dropped = 0
    monkeypatch.setattr(binding, "BIND_SECONDS", 60.0)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")
    assert {"a": ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]} == registry.reserved()


async def test_a_refusal_ends_what_an_earlier_try_reserved(
    site: Site, registry: Registry, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node gave its GPUs to somebody else meanwhile."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.5)
    uid = site.add("a", gpus=2)
    api.dropped = 1_000_000
    with pytest.raises(BindUnknown):
        await registry.bind("a", uid)
    taken = {GPU: tuple(DeviceID(f"GPU-{n}") for n in (1, 2, 3))}
    site.ledgers[NODE].grant([Allocation(id=AllocationID("x"), devices=taken)])
    with pytest.raises(NodeRefuses):
        await registry.bind("a", uid)

    assert {} == registry.reserved()


async def test_a_bind_of_a_bound_pod_is_ok_and_does_nothing(site: Site, registry: Registry, api: Troubled) -> None:
    """C49: bind twice, one after the other."""
    uid = site.add("a")
    await registry.bind("a", uid)
    await registry.bind("a", uid)

    assert (1, {"bound": 2}) == (api.binds, registry.binder.counts)


async def test_two_binds_of_one_pod_at_the_same_time_are_both_ok(site: Site, registry: Registry, api: Troubled) -> None:
    """C49: the second Binding is a conflict, and the pod is on our node."""
    uid = site.add("a")
    api.before = lambda: None if site.node_of("a") else site.cluster.bind("ml", "a", {"target": {"name": "node-1"}})
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")
    assert {"a": ["GPU-0"]} == registry.reserved()


async def test_a_pod_that_another_bound_elsewhere_is_refused(site: Site, registry: Registry, api: Troubled) -> None:
    """C49: before the bind, and between reading the pod and binding it. What was reserved is free again."""
    bound, late = site.add("a"), site.add("b")
    site.cluster.bind("ml", "a", {"target": {"name": "node-2"}})
    with pytest.raises(BoundElsewhere, match="ml/a is bound to node node-2"):
        await registry.bind("a", bound)
    api.before = lambda: site.cluster.bind("ml", "b", {"target": {"name": "node-2"}})
    with pytest.raises(BoundElsewhere):
        await registry.bind("b", late)

    assert (1, {}) == (api.binds, registry.reserved())


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
async def test_a_pod_that_is_gone_is_refused(site: Site, registry: Registry, api: Troubled, again: bool) -> None:
    """Before the bind, and between reading the pod and binding it: the Binding carries the UID of the pod."""
    gone, late = site.add("a"), site.add("b")

    def delete(name: str) -> None:
        site.cluster.delete_pod("ml", name)
        if again:
            site.add(name)

    delete("a")
    with pytest.raises(PodGone):
        await registry.bind("a", gone)
    api.before = lambda: delete("b")
    with pytest.raises(PodGone):
        await registry.bind("b", late)

    assert {} == registry.reserved()
    assert not again or "" == site.node_of("a") == site.node_of("b")


@pytest.mark.parametrize("error", [ApiRefused("forbidden"), ApiConflict("the object has been modified")])
async def test_a_binding_that_fails_for_good_cancels_its_reservation(
    site: Site, registry: Registry, monkeypatch: pytest.MonkeyPatch, error: TopoalignError
) -> None:
    uid = site.add("a")

    async def refuse(namespace: str, name: str, uid: str, node: NodeName) -> None:
        raise error

    monkeypatch.setattr(registry.api, "bind", refuse)
    with pytest.raises(type(error)):
        await registry.bind("a", uid)

    assert {} == registry.reserved()


async def test_a_node_that_knows_better_than_the_view_refuses(site: Site, registry: Registry, api: Troubled) -> None:
    """C51: the view is one allocation behind. The node is asked before anything is reserved or bound; it is counted."""
    site.ledgers[NODE].grant(
        [Allocation(id=AllocationID("x"), devices={GPU: tuple(DeviceID(f"GPU-{n}") for n in range(3))})]
    )
    uid = site.add("a", gpus=2)
    with pytest.raises(NodeRefuses, match="node-1 would refuse the pod: NotEnoughDevices"):
        await registry.bind("a", uid)
    await registry.bind("a", uid, "node-2")

    assert ("node-2", 1) == (site.node_of("a"), api.binds)
    assert (1, {}) == (registry.binder.counts["stale"], registry.reserved())


async def test_a_pod_must_fit_beside_those_that_are_pending(site: Site, bus: MemoryBus, api: Troubled) -> None:
    """What an earlier try had reserved there is of no use any more."""
    asked: list[tuple[NodeName, str]] = []
    answers = ["", "NotAligned"]

    async def fits(node: NodeName, pod: PodToSchedule) -> str:
        asked.append((node, pod.uid))
        return answers[len(asked) - 1]

    registry = Registry(site, bus, api=api, fits=fits)
    first, second = site.add("a"), site.add("b")
    async with running(site, bus, registry):
        await registry.bind("a", first)
        with pytest.raises(NodeRefuses, match="NotAligned"):
            await registry.bind("b", second)

    assert [(NODE, first), (NODE, second)] == asked
    assert {"a": ["GPU-0"]} == registry.reserved()


async def test_no_lock_is_kept_of_a_node_without_a_bind(site: Site, bus: MemoryBus, api: Troubled) -> None:
    """Names of nodes may never come twice, as an autoscaler makes them."""
    registry = Registry(site, bus, api=api)
    uid = site.add("a")
    async with running(site, bus, registry):
        await registry.bind("a", uid)
    gc.collect()

    assert [] == [*registry.binder._turns]


@pytest.mark.parametrize(("code", "error"), [(PODS_PENDING, PodsPending), ("NodeStale", NodeRefuses)])
async def test_what_is_reserved_stays_while_it_cannot_be_judged(
    site: Site, bus: MemoryBus, api: Troubled, monkeypatch: pytest.MonkeyPatch, code: str, error: type[NoFit]
) -> None:
    """As for a pod of a gang: it is planned there, and only has to wait; or another registry knows that the node answers."""
    answers = [""]

    async def fits(node: NodeName, pod: PodToSchedule) -> str:
        return answers.pop() if answers else code

    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.2)
    registry = Registry(site, bus, api=api, fits=fits)
    uid = site.add("a")
    async with running(site, bus, registry):
        api.dropped = 1_000_000
        async with background() as tasks:  # the first try is given up once something is reserved
            tasks.start_soon(registry.bind, "a", uid)
            while not registry.reserved():
                await anyio.lowlevel.checkpoint()
        with pytest.raises(error):
            await registry.bind("a", uid)

    assert {"a": ["GPU-0"]} == registry.reserved()


async def test_a_bind_waits_for_pods_that_come_first(
    site: Site, bus: MemoryBus, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S05. An error would make the scheduler wait for seconds. The next change of the node ends the wait."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 60.0)
    monkeypatch.setattr(binding, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(binding, "RETRY_SECONDS", 60.0)
    answers = [PODS_PENDING]

    async def fits(node: NodeName, pod: PodToSchedule) -> str:
        return answers[0]

    registry = Registry(site, bus, api=api, fits=fits)
    uid = site.add("a")
    async with running(site, bus, registry), anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "a", uid)
        await all_tasks_blocked()
        before = site.node_of("a")
        answers[0] = ""
        registry.checks.change()

    assert ("", "node-1") == (before, site.node_of("a"))
    assert {"waited": 1, "bound": 1} == registry.binder.counts


async def test_a_bind_that_waits_keeps_no_other_from_the_node(
    site: Site, bus: MemoryBus, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod that it waits for may have to be bound there first."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 60.0)
    monkeypatch.setattr(binding, "WAIT_SECONDS", 60.0)

    async def fits(node: NodeName, pod: PodToSchedule) -> str:
        return "" if pod.request.name == "first" or site.node_of("first") else PODS_PENDING

    registry = Registry(site, bus, api=api, fits=fits)
    second, first = site.add("second"), site.add("first")
    await registry.show("second", "first")
    async with running(site, bus, registry), anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "second", second)
        await all_tasks_blocked()
        await registry.bind("first", first)
        registry.checks.change()

    assert ("node-1", "node-1") == (site.node_of("first"), site.node_of("second"))


async def test_a_bind_waits_for_the_devices_of_terminated_pods(
    site: Site, bus: MemoryBus, api: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S01, S05. The API server shows their end before the node does, which refuses the pod until then."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 60.0)
    monkeypatch.setattr(binding, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(binding, "RETRY_SECONDS", 60.0)
    every = {GPU: tuple(DeviceID(f"GPU-{n}") for n in range(4))}
    site.ledgers[NODE].grant([Allocation(id=AllocationID("x"), devices=every, pod_uid="old")])
    registry = Registry(site, bus, api=api)
    registry.checks.ended = ("old",)
    uid = site.add("a")
    async with running(site, bus, registry), anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "a", uid)
        await all_tasks_blocked()
        before = site.node_of("a")
        site.ledgers[NODE].release([AllocationID("x")], "gone")
        registry.checks.change()

    assert ("", "node-1") == (before, site.node_of("a"))


async def test_a_bound_pod_is_ok_though_the_bus_is_gone(
    site: Site, registry: Registry, api: Troubled, bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier try reserved elsewhere cannot be ended then."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.5)
    monkeypatch.setattr(binding, "TIDY_SECONDS", 0.01)
    uid = site.add("a")
    api.dropped = 1_000_000
    with pytest.raises(BindUnknown):
        await registry.bind("a", uid)
    api.dropped = 0

    async def away(message: Message, expected_last: int | None = None) -> int:
        raise BusUnavailable("away")

    api.before = lambda: monkeypatch.setattr(bus, "publish", away)
    await registry.bind("a", uid, "node-2")

    assert "node-2" == site.node_of("a")
    assert {"a": ["GPU-0"]} == registry.reserved()


async def test_binds_of_one_node_at_the_same_time_get_devices_of_their_own(site: Site, registry: Registry) -> None:
    """Four pods of one GPU each, and a fifth for which there is none."""
    pods = {f"p{n}": site.add(f"p{n}") for n in range(5)}
    failures: list[TopoalignError] = []
    await registry.show(*pods)

    async def bind(pod: str) -> None:
        try:
            await registry.bind(pod, pods[pod])
        except NodeRefuses as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for pod in pods:
            tasks.start_soon(bind, pod)

    assert ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] == sorted(gpu for gpus in registry.reserved().values() for gpu in gpus)
    assert 1 == len(failures)
    assert 0 == registry.reservations.counts["conflicts"]


async def test_what_is_reserved_for_another_is_not_reserved_before_it_is_heard(site: Site, registry: Registry) -> None:
    """The node has given the other pod GPU-1 and confirms GPU-0; its registry still holds GPU-0 for the other one."""
    first, second = site.add("a"), site.add("b")
    await registry.bind("a", first)
    owner = Owner(namespace=Namespace("ml"), pod=PodName("a"), container=ContainerName("main"))
    given = Allocation(id=AllocationID("x"), owner=owner, devices={GPU: (DeviceID("GPU-1"),)}, pod_uid=first)
    site.ledgers[NODE].grant([given])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "b", second)
        await all_tasks_blocked()
        before = registry.reserved(), site.node_of("b")
        registry.reservations.observe(NODE)

    assert (({"a": ["GPU-0"]}, ""), "node-1") == (before, site.node_of("b"))
    assert {"b": ["GPU-0"]} == registry.reserved()


async def test_a_slow_node_holds_up_no_other(site: Site, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binds come in parallel; there is no lock for all."""
    first, second = site.add("a"), site.add("b")
    never = anyio.Event()
    ask = MemoryBus.ask

    async def slow(self: MemoryBus, subject: str, body: bytes, within: float) -> bytes:
        if "node-1" in subject:
            await never.wait()
        return await ask(self, subject, body, within)

    monkeypatch.setattr(MemoryBus, "ask", slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.bind, "a", first)
        await registry.bind("b", second, "node-2")
        before = site.node_of("a")
        never.set()

    assert ("", "node-1", "node-2") == (before, site.node_of("a"), site.node_of("b"))


async def test_two_registries_never_reserve_one_device_twice(site: Site, bus: MemoryBus) -> None:
    """C44, I14: each binds at the same time to the same node; who loses the race asks the node anew."""
    one, other = Registry(site, bus, "r1"), Registry(site, bus, "r2")
    pods = {f"p{n}": site.add(f"p{n}", gpus=2) for n in range(4)}
    for each in (one, other):
        await each.show(*pods)

    async def bind(registry: Registry, pod: str) -> None:
        try:
            await registry.bind(pod, pods[pod])
        except NodeRefuses:
            await registry.bind(pod, pods[pod], "node-2")

    async with running(site, bus, one, other), anyio.create_task_group() as tasks:
        for number, pod in enumerate(pods):
            tasks.start_soon(bind, (one, other)[number % 2], pod)

    for name in ("node-1", "node-2"):
        newest = await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(NodeName(name)))
        assert newest is not None
        said = wire.decode_event(newest.message)
        gpus = [gpu for gpus in one.reserved(name).values() for gpu in gpus]
        assert ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] == sorted(gpus), said
    assert one.reservations.counts["conflicts"] + other.reservations.counts["conflicts"] > 0


async def test_a_node_is_asked_again_after_another_registry_has_reserved_there(
    site: Site, bus: MemoryBus, api: Troubled
) -> None:
    """Its answer counts with the reservations that it was asked with, whatever was reserved: here CPUs."""
    asked: list[str] = []

    async def fits(node: NodeName, pod: PodToSchedule) -> str:
        asked.append(pod.request.name)
        if len(asked) == 1:
            cpus = reservation("x", reserved_container(cpus="0-1"))
            await other.reservations.write([ReservationChange(node=node, position=0, made=(cpus,))])
            await all_tasks_blocked()
        return ""

    one, other = Registry(site, bus, "r1", api=api, fits=fits), Registry(site, bus, "r2")
    uid = site.add("a")
    one.shown.bind("uid-x", NODE)
    async with running(site, bus, one, other):
        await one.bind("a", uid)

    assert (["a", "a"], 1) == (asked, one.reservations.counts["conflicts"])
    assert {"x": [], "a": ["GPU-0"]} == one.reserved() == other.reserved()


def test_a_bind_is_answered_before_the_scheduler_gives_it_up() -> None:
    """The scheduler tries again after `httpTimeout`: a Binding of the first try must not come between."""
    with_tidying = binding.BIND_SECONDS + binding.TIDY_SECONDS
    last_try = binding.WAIT_SECONDS + binding.RETRY_SECONDS

    assert last_try < binding.BIND_SECONDS < with_tidying < TIMEOUT_SECONDS


async def test_a_pod_that_cannot_be_meant_is_refused(site: Site, registry: Registry) -> None:
    uid = site.add("a")
    pod = site.cluster.pods.get(("ml", "a"))
    broken = msgspec.json.decode(msgspec.json.encode(pod))
    broken["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1.5"
    site.cluster.pods.replace(("ml", "a"), broken)

    with pytest.raises(TopoalignError, match="is no amount"):
        await registry.bind("a", uid)
    assert "" == site.node_of("a")
