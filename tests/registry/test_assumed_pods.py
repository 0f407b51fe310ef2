"""
Pods whose bind has begun hold what they will get, because the scheduler asks about the next pod meanwhile. They hold it for
the bind alone, and keep no other bind of the node back.
"""

from collections.abc import AsyncIterator

import anyio
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from fact_support import reservation
from fact_support import reserved_container as reserved
from registry_support import World
from view_support import NODE, RULES, OneNode, Says, asked

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import ApiUnavailable
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import BoundElsewhere
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
B = asked(pod(container("main", gpus=1), name="b"), "b")


class Gate(MemoryKubernetes):
    """An API server that creates a Binding once the gate is open, or never where it `fails`."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.opened = anyio.Event()
        self.fails = False

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        await self.opened.wait()
        if self.fails:
            raise ApiUnavailable("no answer")
        await super().bind(namespace, name, uid, node)


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.add_node(NODE)
    return made


@pytest.fixture
def api(cluster: FakeCluster) -> Gate:
    return Gate(cluster)


@pytest.fixture
async def world(cluster: FakeCluster, api: Gate) -> World:
    """Three GPUs are free on NUMA node 0, and two on node 1."""
    made = World(api)
    made.kubernetes = cluster
    made.says = Says(NODE, machine(gpus=(0, 0, 0, 1, 1)), RULES)
    await made.say(*made.says.all())
    return made


@pytest.fixture
async def scheduling(world: World) -> AsyncIterator[SchedulingService]:
    async with world.allocator(world.says), world.registry() as (made, _):
        await world.rounds()
        yield made


def add(world: World, name: str, gpus: int) -> str:
    return str(world.kubernetes.add_pod(shown_pod(name, gpus=gpus))["metadata"]["uid"])


def new(gpus: int) -> PodToSchedule:
    return asked(pod(container("main", gpus=gpus)), "new")


def code(scheduling: SchedulingService, gpus: int) -> str:
    """Of the refusal of a new pod; empty: it fits."""
    return next((each.code for each in scheduling.scheduler.filter(new(gpus), (NODE,)).refused.values()), "")


async def test_a_pod_holds_its_devices_while_it_is_bound(
    world: World, scheduling: SchedulingService, api: Gate
) -> None:
    """From the first turn of its bind on, when its node has not confirmed anything yet."""
    uid = add(world, "a", 3)
    await all_tasks_blocked()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scheduling.bind, "ml", "a", uid, NODE)
        while not scheduling.view.pods_on(NODE).assumed:
            await anyio.lowlevel.checkpoint()
        reserved, codes = scheduling.reservations.held(NODE), [code(scheduling, gpus) for gpus in (2, 3)]
        api.opened.set()
    await all_tasks_blocked()

    assert ((), ["", "NotEnoughDevices"]) == (reserved, codes)
    assert frozenset() == scheduling.view.pods_on(NODE).assumed


async def test_binds_of_one_node_do_not_wait_for_one_another(
    world: World, scheduling: SchedulingService, api: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either would fit alone; the first one is bound, and the other one waits for its admission."""
    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(binding, "BIND_SECONDS", 60.0)
    api.opened.set()
    uids = {"a": add(world, "a", 3), "b": add(world, "b", 1)}
    await all_tasks_blocked()
    failed = {}

    async def bind(name: str) -> None:
        try:
            await scheduling.bind("ml", name, uids[name], NODE)
        except TopoalignError as error:
            failed[name] = error.code

    async with anyio.create_task_group() as tasks:
        for name in uids:
            tasks.start_soon(bind, name)

    assert {"b": "PodsPending"} == failed
    assert NODE == world.kubernetes.pods.get(("ml", "a"))["spec"]["nodeName"]


async def test_nothing_is_held_after_a_bind_that_has_failed(
    world: World, scheduling: SchedulingService, api: Gate
) -> None:
    """Another scheduler binds the pod to another node meanwhile."""
    world.kubernetes.add_node("node-2")
    uid = add(world, "a", 3)
    await all_tasks_blocked()
    async with anyio.create_task_group() as tasks:

        async def bind() -> None:
            with pytest.raises(BoundElsewhere):
                await scheduling.bind("ml", "a", uid, NODE)

        tasks.start_soon(bind)
        await all_tasks_blocked()
        world.kubernetes.bind("ml", "a", {"metadata": {"uid": uid}, "target": {"name": "node-2"}})
        await all_tasks_blocked()
        api.opened.set()
    await all_tasks_blocked()

    assert "" == code(scheduling, 3)
    assert frozenset() == scheduling.view.pods_on(NODE).uids


async def test_a_bind_that_fails_wakes_no_pod(
    world: World, scheduling: SchedulingService, api: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler itself tries waiting pods again then; an annotation of a node would wake this pod, too."""
    monkeypatch.setattr(binding, "BIND_SECONDS", 0.2)
    monkeypatch.setattr(binding, "PAUSE", 0.01)
    api.opened.set()
    api.fails = True
    uid = add(world, "a", 3)
    add(world, "waits", 5)
    await all_tasks_blocked()
    assert scheduling.watch is not None
    await world.rounds()
    before = scheduling.watch.requeue.done
    for _ in range(2):
        with pytest.raises(TopoalignError):
            await scheduling.bind("ml", "a", uid, NODE)
        scheduling.view.renew()
        await world.clock.advance(6)

    assert before == scheduling.watch.requeue.done


def node_of_a() -> tuple[OneNode, list[NodeName]]:
    """A node with pod `a`, and how often more is free on it than before, while the bind of `b` has begun."""
    it = OneNode()
    it.tell([*it.says.all(), *it.says.admit(pod(container("main", gpus=2), name="a"), "a")])
    it.view.renew()
    it.offered.clear()
    it.view.assume(NODE, B)
    it.view.renew()
    return it, it.offered


@pytest.mark.parametrize("how", ["bound", "reserved"])
def test_a_bind_that_succeeds_does_not_hide_that_a_node_has_more_free(how: str) -> None:
    """The end of another pod is seen in the same renewal as the end of the bind."""
    it, offered = node_of_a()
    if how == "bound":
        it.view.expect(NODE, B)
    else:
        it.view.reserve(NODE, [reservation("b", reserved("GPU-2"), uid="b")])
    it.tell(it.says.end("a"))
    it.view.unassume(NODE, "b")
    it.view.renew()

    assert [NODE] == offered


def test_after_a_bind_that_has_failed_a_node_that_has_more_free_is_noticed() -> None:
    """The end of the bind is not: the scheduler tries waiting pods again by itself."""
    it, offered = node_of_a()
    it.view.unassume(NODE, "b")
    it.view.renew()
    after_bind = [*offered]
    it.tell(it.says.end("a"))
    it.view.renew()

    assert ([], [NODE]) == (after_bind, offered)


@pytest.mark.parametrize("steps", [("expect",), ("assume",), ("assume", "expect")])
def test_a_pod_is_placed_beside_those_before_it_alone(steps: tuple[str, ...]) -> None:
    """
    Not beside itself, also where it is shown bound before its bind ends: GPU-0 is the only one of its NUMA node, so a pod
    that asks for one leaves two that are aligned.
    """
    it = OneNode(hardware=machine(gpus=(0, 1, 1)))
    it.tell(it.says.all())
    pods = [asked(pod(container("main", gpus=gpus), name=name), name) for name, gpus in (("a", 1), ("b", 2))]
    codes = list[str]()
    for each in pods:
        for step in steps:
            getattr(it.view, step)(NODE, each)
        codes.append(it.code(gpus=2))

    assert ["", "NotEnoughDevices"] == codes


def test_an_assumed_pod_is_held_as_its_kubelet_will_place_it() -> None:
    it = OneNode()
    it.tell(it.says.all())
    it.view.assume(NODE, asked(pod(container("main", gpus=2), name="a"), "a"))
    before = it.code(gpus=3), it.code(gpus=2)
    it.view.unassume(NODE, "a")

    assert ("NotEnoughDevices", "") == before
    assert "" == it.code(gpus=4)
    assert {} == it.view._pods


def test_a_pod_that_ends_before_its_bind_does_holds_nothing() -> None:
    """It is shown bound, and deleted, before the API server's answer has come."""
    it = OneNode()
    it.tell(it.says.all())
    it.view.assume(NODE, B)
    it.view.expect(NODE, B)
    before = it.code(gpus=4)
    it.view.end(NODE, "b")

    assert ("NotEnoughDevices", "", True) == (before, it.code(gpus=4), it.view.pods_on(NODE).is_empty)
