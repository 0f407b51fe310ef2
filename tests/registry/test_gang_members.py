"""Which pods are members of a gang: those that the API server shows, whatever changes while they are planned."""

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from api_server_support import shown_pod
from binding_support import Registry, Site, running
from registry_support import watch_of
from view_support import SETTLED

from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.binding.gang_binding import GangWaits
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


class Interrupted(Registry):
    """Something happens while the nodes for a gang are looked for."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    async def passing(self, pod: PodToSchedule, chosen: NodeName | None = None) -> list[NodeName]:
        self.happens()
        return await super().passing(pod, chosen)


@pytest.fixture
def site() -> Site:
    return Site(("node-1", "node-2", "node-3"))


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Interrupted]:
    bus = MemoryBus()
    one = Interrupted(site, bus)
    async with running(site, bus, one):
        yield one


def gang(site: Site, *pods: str, size: int = 2, name: str = "g") -> dict[str, str]:
    """Pod -> UID of these pods, which wait."""
    return {pod: site.add(pod, gpus=2, annotations={GANG: name, GANG_SIZE: str(size)}) for pod in pods}


def reserved(registry: Registry) -> list[str]:
    """The pods for which something is reserved."""
    return sorted(pod for name in registry.site.ledgers for pod in registry.reserved(name))


async def test_a_pod_that_is_lost_before_it_is_planned_is_no_member(site: Site, registry: Interrupted) -> None:
    """The watch loses it after the bind has read it. It does not count for the gang of those that come after it."""
    uids = gang(site, "a", "b")
    await registry.see("a", "b")
    seen = await registry.api.pod("ml", "a")
    assert seen is not None
    registry.gangs.lose(uids["a"])
    with pytest.raises(GangWaits, match="does not report the pod"):
        await registry.plan(seen.to_schedule(), NODE)
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("b", uids["b"])

    assert [] == reserved(registry)


async def test_nothing_stays_reserved_for_a_pod_lost_while_planned(site: Site, registry: Interrupted) -> None:
    uids = gang(site, "a", "b")
    await registry.see("a", "b")
    registry.happens = lambda: registry.gangs.lose(uids["b"])
    await registry.bind("a", uids["a"])

    assert ["a"] == reserved(registry)


async def test_nothing_stays_reserved_elsewhere_for_a_pod_bound_meanwhile(site: Site, registry: Interrupted) -> None:
    """Another scheduler binds it while it is planned to the first pod's node."""
    uids = gang(site, "a", "b")
    await registry.see("a", "b")
    site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
    bound = await registry.api.pod("ml", "b")
    assert bound is not None
    registry.happens = lambda: registry.gangs.see(bound)
    await registry.bind("a", uids["a"])

    assert ["a"] == reserved(registry)


async def test_pods_of_a_gang_go_where_their_own_node_selectors_let_them(site: Site) -> None:
    """They ask for the same, and node-1 has room for both."""

    class Selecting(Registry):
        async def passing(self, pod: PodToSchedule, chosen: NodeName | None = None) -> list[NodeName]:
            return [NodeName(pod.constraints.labels["node"])]

    uids, bus = gang(site, "a", "b"), MemoryBus()
    for pod, node in (("a", "node-1"), ("b", "node-3")):
        site.cluster.pods.merge(("ml", pod), {"spec": {"nodeSelector": {"node": node}}})
    registry = Selecting(site, bus)
    async with running(site, bus, registry):
        await registry.see("a", "b")
        await registry.bind("a", uids["a"])

        assert (["a"], ["b"]) == ([*registry.reserved("node-1")], [*registry.reserved("node-3")])


async def test_a_pod_that_another_scheduler_bound_counts_and_is_not_planned(site: Site, registry: Interrupted) -> None:
    uids = gang(site, "a", "b")
    site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
    await registry.see("a", "b")
    await registry.bind("a", uids["a"])

    assert ["a"] == reserved(registry)


async def test_a_pod_that_is_being_deleted_is_no_member(site: Site, registry: Interrupted) -> None:
    """Its successor has its name and another UID: with the old one the gang would be whole one pod too early."""
    uids = gang(site, "a", "b")
    site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
    await registry.see("a", "b")
    site.cluster.delete_pod("ml", "b")
    await registry.see("b")
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("a", uids["a"])

    site.cluster.delete_pod("ml", "b", grace=0)
    gang(site, "b")
    await registry.see("b")
    await registry.bind("a", uids["a"])
    assert ["a", "b"] == reserved(registry)


async def test_pods_that_differ_in_the_size_of_their_gang_wait(site: Site, registry: Interrupted) -> None:
    """By the smaller size it would start in part. Pods that have their nodes say what was right then."""
    uids = gang(site, "a", "b", size=2) | gang(site, "c", size=3)
    await registry.see("a", "b", "c")
    with pytest.raises(GangWaits, match="differ in the gang's size"):
        await registry.bind("a", uids["a"])
    assert [] == reserved(registry)

    for pod in ("a", "b"):
        site.cluster.bind("ml", pod, {"target": {"name": "node-3"}})
    await registry.see("a", "b")
    await registry.bind("c", uids["c"])
    assert ["c"] == reserved(registry)


async def test_a_pod_that_is_given_another_gang_leaves_its_former_one(site: Site, registry: Interrupted) -> None:
    uids = gang(site, "a", "b")
    await registry.see("a", "b")
    site.cluster.pods.merge(("ml", "b"), {"metadata": {"annotations": {GANG: "other"}}})
    await registry.see("b")
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("a", uids["a"])
    site.cluster.pods.merge(("ml", "b"), {"metadata": {"annotations": {GANG: None, GANG_SIZE: None}}})
    await registry.see("b")
    await registry.bind("b", uids["b"])

    assert ["b"] == reserved(registry)


@pytest.mark.parametrize(
    ("spec", "finding"),
    [
        ({"schedulingGates": [{"name": "example.com/quota"}]}, "ml/c has scheduling gates"),
        (
            {"resourceClaims": [{"name": "net", "resourceClaimTemplateName": "nic"}]},
            "ml/c waits for the resource claim 'net'",
        ),
        ({"schedulerName": "volcano"}, "ml/c names the scheduler volcano"),
    ],
)
async def test_a_gang_waits_for_pods_that_cannot_be_scheduled(
    site: Site, registry: Interrupted, spec: dict[str, object], finding: str
) -> None:
    """Nothing is reserved until all pods of the gang can be scheduled by the scheduler of the pod; bound pods count."""
    uids = gang(site, "a", "b", "c", size=3)
    before = site.cluster.pods.get(("ml", "c"))["spec"]
    site.cluster.pods.merge(("ml", "c"), {"spec": spec})
    await registry.see("a", "b", "c")
    with pytest.raises(GangWaits, match=f"not all of its pods are there yet: 2 of 3; {finding}"):
        await registry.bind("a", uids["a"])
    assert [] == reserved(registry)

    bound = msgspec.structs.replace(await seen(registry, "c"), node=NodeName("node-3"))
    registry.gangs.see(bound)
    await registry.bind("a", uids["a"])
    assert ["a", "b"] == reserved(registry)

    site.cluster.pods.merge(("ml", "c"), {"spec": {key: before.get(key) for key in spec}})
    await registry.see("c")
    await registry.bind("c", uids["c"], "node-2")
    assert ["a", "b", "c"] == reserved(registry)


async def test_nothing_is_planned_for_a_surplus_pod_with_scheduling_gates(site: Site, registry: Interrupted) -> None:
    uids = gang(site, "a", "b", "c")
    site.cluster.pods.merge(("ml", "c"), {"spec": {"schedulingGates": [{"name": "example.com/quota"}]}})
    await registry.see("a", "b", "c")
    await registry.bind("a", uids["a"])

    assert ["a", "b"] == reserved(registry)


async def test_a_gang_does_not_wait_for_claims_that_exist(site: Site, registry: Interrupted) -> None:
    """Of a template, once the claim is named in the status; a claim that the pod names itself is not looked up."""
    uids = gang(site, "a", "b")
    claims = [{"name": "net", "resourceClaimTemplateName": "nic"}, {"name": "disk", "resourceClaimName": "scratch"}]
    site.cluster.pods.merge(("ml", "b"), {"spec": {"resourceClaims": claims}})
    site.cluster.set_status("ml", "b", resourceClaimStatuses=[{"name": "net", "resourceClaimName": "b-net-x7"}])
    await registry.see("a", "b")
    await registry.bind("a", uids["a"])

    assert ["a", "b"] == reserved(registry)


def own(site: Site, controller: str, *pods: str) -> None:
    """A controller has made these pods."""
    for pod in pods:
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": controller, "controller": True}
        site.cluster.pods.merge(("ml", pod), {"metadata": {"ownerReferences": [reference]}})


async def test_a_pod_that_has_succeeded_counts_for_its_jobs_next_one(site: Site, registry: Interrupted) -> None:
    """One of three is done, one runs, and one has failed: that one's successor does not wait for the one that is done."""
    gang(site, "done", "running", "failed", size=3)
    for pod in ("done", "running", "failed"):
        site.cluster.bind("ml", pod, {"target": {"name": "node-3"}})
    site.cluster.set_status("ml", "done", phase="Succeeded")
    site.cluster.set_status("ml", "failed", phase="Failed")
    uids = gang(site, "again", size=3)
    own(site, "job", "done", "running", "failed", "again")
    await registry.see("failed", "running", "again")
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("again", uids["again"])
    await registry.see("done")
    await registry.bind("again", uids["again"])

    assert ["again"] == reserved(registry)


@pytest.mark.parametrize("controller", ["", "an earlier job"])
async def test_a_pod_of_an_earlier_run_that_has_succeeded_does_not_count(
    site: Site, registry: Interrupted, controller: str
) -> None:
    """A CronJob's next Job has the same annotations: its pods start when all of them are there."""
    former = gang(site, "former")
    site.cluster.bind("ml", "former", {"target": {"name": "node-3"}})
    site.cluster.set_status("ml", "former", phase="Succeeded")
    uids = gang(site, "a")
    if controller:
        own(site, controller, "former")
        own(site, "job", "a")
    await registry.see("former", "a")
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("a", uids["a"])

    with pytest.raises(GangWaits, match="does not report the pod"):  # nor is it ever bound itself
        await registry.plan(msgspec.structs.replace(await waiting(registry, "a"), uid=former["former"]), NODE)
    assert [] == reserved(registry)


async def seen(registry: Registry, pod: str) -> SeenPod:
    found = await registry.api.pod("ml", pod)
    assert found is not None
    return found


async def waiting(registry: Registry, pod: str) -> PodToSchedule:
    return (await seen(registry, pod)).to_schedule()


async def test_the_watch_tells_gangs_which_pods_have_succeeded(site: Site, registry: Interrupted) -> None:
    clock = SystemClock()
    view = ClusterView(Cluster(), lambda: SETTLED, clock)
    watch = watch_of(registry.api, clock, view, registry.reservations, registry.gangs)
    async with background() as tasks:
        tasks.start_soon(watch.run)
        uids = gang(site, "a", "b")
        own(site, "job", "a", "b")
        site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
        site.cluster.set_status("ml", "b", phase="Succeeded")
        await all_tasks_blocked()
        site.cluster.delete_pod("ml", "b", grace=0)
        await all_tasks_blocked()
        with pytest.raises(GangWaits, match="not all of its pods are there yet"):
            await registry.bind("a", uids["a"])

        gang(site, "b")
        own(site, "job", "b")
        site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
        await all_tasks_blocked()
        site.cluster.set_status("ml", "b", phase="Succeeded")
        await all_tasks_blocked()
        await registry.bind("a", uids["a"])
        assert ["a"] == reserved(registry)


async def test_the_watch_tells_gangs_what_what_becomes_of_their_pods(site: Site, registry: Interrupted) -> None:
    """
    A launcher without devices counts, and nothing is reserved for it: the scheduler does not ask where it may go. A pod that
    another scheduler binds elsewhere gives back what was planned for it, and one that is being deleted is none.
    """
    launcher = shown_pod("launcher")
    launcher["metadata"]["annotations"] |= {GANG: "g", GANG_SIZE: "3"}
    launcher["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "100m"}}
    clock, api = SystemClock(), registry.api
    view = ClusterView(Cluster(), lambda: SETTLED, clock)
    watch = watch_of(api, clock, view, registry.reservations, registry.gangs)
    async with background() as tasks:
        tasks.start_soon(watch.run)
        site.cluster.add_pod(launcher)
        uids = gang(site, "a", "b", size=3)
        await registry.show("a", "b")
        await all_tasks_blocked()
        await registry.bind("a", uids["a"])
        assert (["a", "b"], 3) == (reserved(registry), registry.reservations.counts["made"])  # a when it is bound, too

        site.cluster.bind("ml", "b", {"target": {"name": "node-3"}})
        await all_tasks_blocked()
        assert ["a"] == reserved(registry)

        site.cluster.delete_pod("ml", "b")
        uids |= gang(site, "c", size=3)
        await all_tasks_blocked()
        site.cluster.delete_pod("ml", "launcher")
        await all_tasks_blocked()
        with pytest.raises(GangWaits, match="not all of its pods are there yet"):
            await registry.bind("c", uids["c"])
