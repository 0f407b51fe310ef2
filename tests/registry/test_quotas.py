"""A namespace has no more parts of GPUs than its quota allows: said by the webhook, the filter and a bind."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import pytest
from api_server_support import pod_of
from registry_support import World
from scheduling_support import go_json
from unit_support import CORES, DGX, MEMORY, in_units
from view_support import NODE, Says

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.ids import GPU, ContainerName, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.requests import GANG, GANG_SIZE, AdmissionRules, ContainerRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.quota_amounts import (
    Amounts,
    GpuSizes,
    OverQuota,
    PerGpu,
    amounts_per_gpu,
    quota_amounts,
    sum_quota_amounts,
)
from topoalign.registry.ports import SeenPod, SeenQuota
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.filter.namespace_quotas import NamespaceUse, Quotas
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)
LIMIT = f"limits.{CORES}"
NO_ROOM = (
    "OverQuota: the quota of the namespace for parts of GPUs is used up; wait until its pods end or raise the quota"
)
ML = Namespace("ml")
MIB, PERCENT = Slots().memory, Slots().percentage
OTHER_MIB = ResourceName("example.com/mib")
Limits = dict[str, str]


def share(cores: int) -> Limits:
    return {str(CORES): str(cores), str(MEMORY): "8"}


def pod(name: str, limits: Limits) -> dict[str, Any]:
    asks = {"name": "main", "resources": {"limits": limits, "requests": limits}}
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"containers": [asks]}}


class Site:
    """A registry with its nodes, and its API server."""

    def __init__(
        self, world: World, http: httpx.AsyncClient, scheduling: SchedulingService, nodes: Sequence[NodeName]
    ) -> None:
        self.world = world
        self.http = http
        self.scheduling = scheduling
        self.nodes = nodes
        self.cluster = world.kubernetes

    async def call(self, path: str, body: object) -> Any:
        headers = {"content-type": "application/json"}
        answer = await self.http.post(path, content=go_json(body), headers=headers)
        await all_tasks_blocked()
        return answer.json()

    async def created(self, limits: Limits, namespace: str = "ml") -> tuple[int, str]:
        """Status and message of the webhook's denial; (200, "") where it lets a pod pass."""
        resource = {"group": "", "version": "v1", "resource": "pods"}
        request = {"uid": "r", "operation": "CREATE", "namespace": namespace, "resource": resource}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        said = await self.call("/webhook", {**review, "request": {**request, "object": pod("new", limits)}})
        status = said["response"].get("status", {"code": 200, "message": ""})
        return status["code"], status["message"]

    def add(self, name: str, limits: Limits) -> str:
        return str(self.cluster.add_pod(pod(name, limits))["metadata"]["uid"])

    async def filtered(self, name: str, node: NodeName = NODE) -> str:
        """What the filter says of the node; empty: it passes."""
        shown = self.cluster.pods.get(("ml", name))
        answer = await self.call("/scheduler/filter", {"Pod": shown, "NodeNames": self.nodes})
        return str(answer["FailedAndUnresolvableNodes"].get(node, answer["Error"]))

    async def bound(self, name: str, node: NodeName = NODE) -> str:
        """What the scheduler is answered to a bind; empty: it is bound."""
        uid = self.cluster.pods.get(("ml", name))["metadata"]["uid"]
        body = {"PodName": name, "PodNamespace": "ml", "PodUID": uid, "Node": node}
        return str((await self.call("/scheduler/bind", body))["Error"])

    def limit(self, amount: str, name: str = "gpus", key: str = LIMIT, **spec: object) -> None:
        self.cluster.quotas.apply(
            ("ml", name), {"metadata": {"namespace": "ml"}, "spec": {"hard": {key: amount}, **spec}}
        )


@asynccontextmanager
async def site(machines: Mapping[NodeName, Topology] = MappingProxyType({NODE: in_units(DGX)})) -> AsyncIterator[Site]:
    """By default with one node of GPUs in units."""
    world = World()
    nodes = [Says(name, machine, RULES) for name, machine in machines.items()]
    async with AsyncExitStack() as stack:
        for says in nodes:
            world.kubernetes.add_node(says.node)
            await world.say(*says.all())
            await stack.enter_async_context(world.allocator(says))
        scheduling, url = await stack.enter_async_context(world.registry())
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        await world.rounds()
        yield Site(world, http, scheduling, [*machines])


async def test_a_new_pod_counts_beside_all_pods_of_its_namespace() -> None:
    """Also those that wait, until they end. Kubernetes' own counting in the quota's status is no news."""
    async with site() as at:
        at.limit("50")
        at.add("one", share(30))
        await all_tasks_blocked()

        assert (200, "") == await at.created(share(20))
        code, message = await at.created(share(21))
        assert 403 == code
        assert (
            f"topoalign: namespace ml: limits.{CORES} of its ResourceQuota is 50, its pods hold 30, and this pod asks for 21"
            == message.partition(";")[0]
        )
        assert (200, "") == await at.created(share(99), namespace="other")
        at.cluster.set_status("ml", "one", phase="Succeeded")
        await all_tasks_blocked()
        assert (200, "") == await at.created(share(50))


async def test_waiting_pods_count_beside_those_that_are_bound() -> None:
    """Two that were created in the same moment do not keep one another waiting."""
    async with site() as at:
        at.limit("50")
        for name in ("one", "two"):
            at.add(name, share(30))
        await all_tasks_blocked()

        assert ["", ""] == [await at.filtered(name) for name in ("one", "two")]
        assert "" == await at.bound("one")
        assert NO_ROOM == await at.filtered("two")
        assert NO_ROOM == await at.bound("two")
        assert "" == await at.filtered("one")
        at.limit("60")
        await all_tasks_blocked()
        assert "" == await at.filtered("two")
        assert "" == await at.bound("two")


async def test_a_full_quota_is_named_although_the_nodes_are_full_as_well() -> None:
    """Pods that end elsewhere give the namespace no room. Victims may: then the quota has room, too."""
    async with site() as at:
        for gpu in range(8):
            at.add(f"{gpu}", share(100))
        at.add("late", share(30))
        await all_tasks_blocked()
        assert [""] * 8 == [await at.bound(f"{gpu}") for gpu in range(8)]

        assert (await at.filtered("late")).startswith("NotEnoughDevices: ")
        at.limit("800")
        await all_tasks_blocked()
        assert NO_ROOM == await at.filtered("late")
        late = at.cluster.pods.get(("ml", "late"))
        victims = {NODE: {"Pods": [{"UID": at.cluster.pods.get(("ml", "3"))["metadata"]["uid"]}]}}
        answer = await at.call("/scheduler/preempt", {"Pod": late, "NodeNameToMetaVictims": victims})
        assert [NODE] == [*answer["NodeNameToMetaVictims"]]


def two_pods_and_room_for_one(mates: Sequence[str] = ()) -> tuple[Quotas, SeenPod, SeenPod]:
    """A namespace with 50 units of computing time, and two waiting pods that ask for 30 each."""
    cluster, offers = FakeCluster(), OfferedResources()
    offers.note(NODE, in_units(DGX))
    quotas = Quotas(offers, dict, lambda uid: mates)
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 50}))
    one, two = (pod_of(cluster.add_pod(pod(name, share(30)))) for name in ("one", "two"))
    for each in (one, two):
        quotas.see_pod(each)
    return quotas, one, two


async def test_a_pod_counts_while_it_is_being_bound() -> None:
    """Before anything is reserved for it: of two pods bound at once one has room. A failed bind gives it back."""
    quotas, one, two = two_pods_and_room_for_one()

    for _ in range(2):
        with pytest.raises(BusUnavailable), quotas.claim(one.to_schedule(), NODE):
            quotas.check_waiting(one.to_schedule())
            with pytest.raises(OverQuota):
                quotas.check_waiting(two.to_schedule())
            with pytest.raises(OverQuota), quotas.claim(two.to_schedule(), NODE):
                pass
            raise BusUnavailable("no bus")
        with pytest.raises(BusUnavailable), quotas.claim(two.to_schedule(), NODE):
            raise BusUnavailable("no bus")


def test_a_pod_of_a_gang_counts_on_its_own_node_while_it_is_bound() -> None:
    """The others of its gang count on the node of the first that is bound, and those that are bound on theirs."""
    mates = list[str]()
    quotas, one, two = two_pods_and_room_for_one(mates)
    mates += [one.uid, two.uid]
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 100}))
    other = NodeName("another")
    places = list[dict[str, NodeName]]()
    with quotas.claim(one.to_schedule(), NODE):
        places.append({**quotas._places()})
        with quotas.claim(two.to_schedule(), other):
            places.append({**quotas._places()})

    assert [{one.uid: NODE, two.uid: NODE}, {one.uid: NODE, two.uid: other}] == places
    assert {} == quotas._places()


def test_a_pod_counts_once_it_is_bound_although_that_is_not_shown_yet() -> None:
    """Its node may tell what it has before the watch of pods tells of the bind, and then nothing is reserved for it."""
    quotas, one, two = two_pods_and_room_for_one()

    with quotas.claim(one.to_schedule(), NODE):
        pass
    with pytest.raises(OverQuota):
        quotas.check_waiting(two.to_schedule())
    quotas.see_pod(msgspec.structs.replace(one, node=NODE))
    with pytest.raises(OverQuota):
        quotas.check_waiting(two.to_schedule())
    quotas.end_pod(one.uid)
    quotas.check_waiting(two.to_schedule())


@pytest.mark.parametrize(
    "annotations",
    [{"nvidia.com/use-gputype": "x" * 40_000}, {f"example.com/{number}": "" for number in range(1_001)}],
    ids=["too long", "too many"],
)
def test_a_pod_counts_whatever_its_annotations_say(annotations: dict[str, str]) -> None:
    """They can be written while it runs. A registry that begins then counts what it holds."""
    cluster, offers = FakeCluster(), OfferedResources()
    offers.note(NODE, in_units(DGX))
    quotas = Quotas(offers, dict)
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 50}))
    shown = pod("one", share(30))
    shown["metadata"]["annotations"] = annotations
    quotas.see_pod(msgspec.structs.replace(pod_of(cluster.add_pod(shown)), node=NODE))

    with pytest.raises(OverQuota):
        quotas.check_waiting(pod_of(cluster.add_pod(pod("two", share(30)))).to_schedule())


async def test_a_preemption_frees_quota_of_the_victims_namespace() -> None:
    """As filter says once they are gone. Victims of another namespace hold nothing of it."""
    async with site() as at:
        at.limit("50")
        for name in ("low", "high"):
            at.add(name, share(30))
        await all_tasks_blocked()
        assert "" == await at.bound("low")
        high, low = (at.cluster.pods.get(("ml", name)) for name in ("high", "low"))

        async def helped(uid: str) -> bool:
            victims = {NODE: {"Pods": [{"UID": uid}], "NumPDBViolations": 0}}
            said = await at.call("/scheduler/preempt", {"Pod": high, "NodeNameToMetaVictims": victims})
            return bool(said["NodeNameToMetaVictims"])

        assert NO_ROOM == await at.filtered("high")
        assert [True, False] == [await helped(uid) for uid in (low["metadata"]["uid"], "of another namespace")]


async def test_pods_that_end_for_a_nominated_pod_hold_no_quota_against_it() -> None:
    """Filter judges so while they are being deleted. They hold it for every other pod."""
    async with site() as at:
        at.limit("50")
        for name in ("low", "high", "other"):
            at.add(name, share(30))
        await all_tasks_blocked()
        assert "" == await at.bound("low")
        at.cluster.delete_pod("ml", "low", grace=30)
        at.cluster.set_status("ml", "high", nominatedNodeName=NODE)
        await all_tasks_blocked()

        assert ["", NO_ROOM] == [await at.filtered(name) for name in ("high", "other")]


WHOLE = msgspec.structs.replace(DGX, offers=(Offer(resource=GPU, devices=tuple(gpu.id for gpu in DGX.gpus)),))
ONE = {"nvidia.com/gpu": "1"}
PERCENTAGE = {**ONE, "nvidia.com/gpumem-percentage": "40"}


@pytest.mark.parametrize(
    ("whole", "limits", "quota", "held"),
    [
        (False, PERCENTAGE, {"limits.nvidia.com/gpumem": "24000"}, 16384),
        (False, ONE, {"limits.nvidia.com/gpumem": "60000"}, 40960),
        (False, ONE, {"limits.nvidia.com/gpucores": "150"}, 100),
        (True, ONE, {"limits.nvidia.com/gpumem": "60000"}, 40960),
        (True, ONE, {"limits.nvidia.com/gpucores": "150"}, 100),
    ],
)
async def test_amounts_that_are_not_named_count_from_filter_and_bind_on(
    whole: bool, limits: Limits, quota: Limits, held: int
) -> None:
    """By the size of the node's GPUs, and from then on for the webhook, too."""
    async with site({NODE: WHOLE if whole else in_slots(40)}) as at:
        ((key, amount),) = quota.items()
        at.limit(amount, key=key)
        for name in ("one", "two"):
            at.add(name, limits)
        await all_tasks_blocked()

        assert ["", ""] == [await at.filtered(name) for name in ("one", "two")]
        assert "" == await at.bound("one")
        assert [NO_ROOM, NO_ROOM] == [await at.filtered("two"), await at.bound("two")]
        if not whole:
            name = key.removeprefix("limits.")
            code, message = await at.created({**ONE, name: "30000" if "mem" in name else "99"})
            assert (403, True) == (code, f"its pods hold {held}, " in message)
        at.cluster.set_status("ml", "one", phase="Succeeded")
        await all_tasks_blocked()
        assert "" == await at.filtered("two")


async def test_a_quota_may_leave_the_nodes_with_smaller_gpus() -> None:
    async with site({SMALL: in_slots(16), LARGE: in_slots(40)}) as at:
        at.limit("20000", key="limits.nvidia.com/gpumem")
        at.add("one", ONE)
        await all_tasks_blocked()

        assert ["", NO_ROOM] == [await at.filtered("one", node) for node in (SMALL, LARGE)]
        assert NO_ROOM == await at.bound("one", LARGE)
        assert "" == await at.bound("one", SMALL)


async def test_a_gang_without_amounts_counts_as_a_whole() -> None:
    async with site({NODE: in_slots(40)}) as at:
        at.limit("60000", key="limits.nvidia.com/gpumem")
        for name in ("one", "two"):
            shown = pod(name, ONE)
            shown["metadata"]["annotations"] = {GANG: "g", GANG_SIZE: "2"}
            at.cluster.add_pod(shown)
        await all_tasks_blocked()
        assert [NO_ROOM, NO_ROOM] == [await at.filtered("one"), await at.bound("one")]
        at.limit("90000", key="limits.nvidia.com/gpumem")
        await all_tasks_blocked()

        assert ["", ""] == [await at.bound(name) for name in ("one", "two")]


async def test_the_lowest_limit_counts_and_scopes_do_not() -> None:
    """A quota with scopes is about some pods of the namespace, and whether about this one is not looked at."""
    async with site() as at:
        at.limit("50")
        at.limit("10", "some", scopes=["BestEffort"])
        await all_tasks_blocked()
        assert (200, "") == await at.created(share(50))
        at.limit("20", "low")
        await all_tasks_blocked()
        assert 403 == (await at.created(share(21)))[0]
        at.cluster.quotas.remove(("ml", "low"))
        at.cluster.quotas.remove(("ml", "gpus"))
        await all_tasks_blocked()
        assert (200, "") == await at.created(share(90))


async def test_hamis_amounts_count_for_each_gpu() -> None:
    async with site() as at:
        hard = {"limits.nvidia.com/gpumem": "8000"}
        at.cluster.quotas.apply(("ml", "gpus"), {"metadata": {"namespace": "ml"}, "spec": {"hard": hard}})
        await all_tasks_blocked()

        assert (200, "") == await at.created({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "4000"})
        assert 403 == (await at.created({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "4001"}))[0]


def test_slots_count_for_each_gpu_under_the_names_that_they_have() -> None:
    """Also those of pods that were there before any node offered them."""
    cluster, offers = FakeCluster(), OfferedResources()
    quotas = Quotas(offers, dict)
    mib, count = ResourceName("example.com/mib"), ResourceName("example.com/l4")
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={mib: 1000}))
    quotas.see_pod(pod_of(cluster.add_pod(pod("one", {count: "3", mib: "200"}))))
    offer = Offer(resource=count, devices=(DGX.gpus[0].id,), replicas=10, slots=Slots(memory=mib))
    offers.note(NodeName("in-slots"), msgspec.structs.replace(DGX, offers=(offer,)))
    new = {amount: pod_of(cluster.add_pod(pod(f"n{amount}", {count: "2", mib: amount}))) for amount in ("200", "201")}

    quotas.check_new(new["200"].to_schedule().request)
    with pytest.raises(OverQuota, match="is 1000, its pods hold 600, and this pod asks for 402"):
        quotas.check_new(new["201"].to_schedule().request)


def test_what_a_pod_holds_is_counted_once_for_all_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter asks hundreds of times a second. It is counted anew when nodes offer slots under other names."""
    cluster, offers, counted = FakeCluster(), OfferedResources(), list[str]()
    offers.note(NODE, in_units(DGX))
    quotas = Quotas(offers, dict)
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 100}))
    held = [pod_of(cluster.add_pod(pod(name, share(30)))) for name in ("one", "two")]
    new = pod_of(cluster.add_pod(pod("new", share(30)))).to_schedule().request
    for each in held:
        quotas.see_pod(each)

    def counting(request: PodRequest, per_gpu: PerGpu, sizes: GpuSizes) -> dict[ResourceName, int]:
        counted.append(request.name)
        return quota_amounts(request, per_gpu, sizes)

    monkeypatch.setattr("topoalign.registry.scheduling.filter.namespace_quotas.quota_amounts", counting)
    quotas.check_new(new)
    quotas.check_new(new)
    assert ["new", "one", "two", "new"] == counted

    offer = Offer(resource=ResourceName("example.com/l4"), devices=(DGX.gpus[0].id,), replicas=10, slots=Slots())
    offers.note(NodeName("in-slots"), msgspec.structs.replace(DGX, offers=(offer,)))
    quotas.check_new(new)
    assert ["new", "one", "two"] == counted[4:]
    quotas.end_pod(held[0].uid)
    quotas.check_new(new)
    assert ["new"] == counted[7:]


SMALL, LARGE = NodeName("small"), NodeName("large")


def in_slots(gib: int, memory: str = MIB) -> Topology:
    """The machine with its GPUs in slots, each of so many GiB, and this name of an amount of memory."""
    gpus = tuple(msgspec.structs.replace(gpu, memory=gib * 2**30) for gpu in DGX.gpus)
    slots = Slots(memory=ResourceName(memory))
    offer = Offer(resource=GPU, devices=tuple(gpu.id for gpu in gpus), replicas=10, slots=slots)
    return msgspec.structs.replace(DGX, gpus=gpus, offers=(offer,))


def test_reserved_pods_of_a_gang_count_on_their_own_nodes_during_a_bind() -> None:
    """A pod on a node with larger GPUs counts more, although another pod of its gang is being bound elsewhere."""
    cluster, offers = FakeCluster(), OfferedResources()
    offers.note(SMALL, in_slots(16))
    offers.note(LARGE, in_slots(40))
    one, two, other = (pod_of(cluster.add_pod(pod(name, {str(GPU): "1"}))) for name in ("one", "two", "other"))
    quotas = Quotas(offers, lambda: {one.uid: {SMALL}, two.uid: {LARGE}}, lambda uid: {one.uid, two.uid} - {other.uid})
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={MIB: (16 + 40 + 15) * 1024}))
    for each in (one, two, other):
        quotas.see_pod(each)

    with quotas.claim(one.to_schedule(), SMALL), pytest.raises(OverQuota, match="hold 57344"):
        quotas.check_waiting(other.to_schedule(), SMALL)


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_what_a_namespace_holds_is_what_its_pods_hold_one_by_one(first: int) -> None:
    """Whatever comes, is bound, reserved and ends, under whichever names and in whichever sizes slots are offered."""
    for seed in range(first, first + 20):
        chance, offers, pods = Random(seed), OfferedResources(), dict[str, PodRequest]()
        offers.note(SMALL, in_slots(16))
        offers.note(LARGE, in_slots(40))
        use, bound = NamespaceUse(offers), dict[str, NodeName]()
        for number in range(60):
            if not pods or chance.random() < 0.5:
                named = (GPU, MIB, OTHER_MIB, PERCENT)
                limits = {each: chance.randrange(1, 9) for each in named if chance.random() < 0.5}
                asks = ContainerRequest(name=ContainerName("main"), limits=limits)
                pods[f"u{number}"] = PodRequest(namespace=ML, name=PodName(f"p{number}"), containers=(asks,))
                use.add(f"u{number}", pods[f"u{number}"])
            elif chance.random() < 0.5:
                uid, node = chance.choice([*pods]), chance.choice((SMALL, LARGE))
                bound[uid] = node
                use.bind(uid, node)
            else:
                use.end(uid := chance.choice([*pods]))
                del pods[uid]
                bound.pop(uid, None)
            if chance.random() < 0.2:
                offers.note(SMALL, in_slots(chance.choice((16, 24)), memory=chance.choice((MIB, OTHER_MIB))))
            per_gpu = amounts_per_gpu(offers.slots)
            others = {each: chance.choice((SMALL, LARGE)) for each in (*pods, "gone") if chance.random() < 0.3}
            without = {each for each in (*pods, "gone") if chance.random() < 0.3}
            placed = {each: node for each, node in {**others, **bound}.items() if each in pods and each not in without}

            def totals(places: Mapping[str, NodeName | None]) -> Amounts:
                held = (quota_amounts(pods[each], per_gpu, offers.sizes_on(node)) for each, node in places.items())  # noqa: B023  # called in this turn
                return nonzero(sum_quota_amounts(held))

            assert totals({each: bound.get(each) for each in pods}) == nonzero(use.all()), seed
            assert totals(placed) == nonzero(use.placed(others, without)), seed


def nonzero(amounts: Amounts) -> Amounts:
    return {name: amount for name, amount in amounts.items() if amount}


class Unread(dict[str, PodRequest]):
    """Pods that are looked up and never gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all pods are gone through")


def test_a_check_looks_at_no_pod_that_is_bound_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5,000 pods of the namespace a check took 9 ms of every call. Those are looked at that are being bound."""
    cluster, offers, reserved = FakeCluster(), OfferedResources(), dict[str, list[NodeName]]()
    offers.note(NODE, in_units(DGX))
    quotas = Quotas(offers, lambda: reserved)
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 100}))
    for number in range(4):
        quotas.see_pod(each := pod_of(cluster.add_pod(pod(f"p{number}", share(30)))))
        if number < 2:
            quotas.see_pod(msgspec.structs.replace(each, node=NODE))
    waiting = pod_of(cluster.add_pod(pod("new", share(40)))).to_schedule()
    quotas.check_waiting(waiting)
    use = quotas._held["ml"]
    monkeypatch.setattr(use, "pods", Unread(use.pods))
    quotas.check_waiting(waiting)
    reserved[each.uid] = [NODE]

    with pytest.raises(OverQuota, match="is 100, its pods hold 90, and this pod asks for 40"):
        quotas.check_waiting(waiting)
    quotas.check_waiting(each.to_schedule())


async def test_waiting_pods_are_woken_when_a_limit_changes() -> None:
    """And not when Kubernetes writes into the quota what it has counted itself."""
    async with site() as at:
        at.limit("10")
        at.add("one", share(30))
        await all_tasks_blocked()
        await at.world.clock.advance(6)
        await all_tasks_blocked()
        before = at.scheduling.watch.requeue.done if at.scheduling.watch else -1
        at.cluster.quotas.merge(("ml", "gpus"), {"status": {"used": {"pods": "1"}}})
        await all_tasks_blocked()
        await at.world.clock.advance(6)
        await all_tasks_blocked()
        assert at.scheduling.watch is not None
        assert before == at.scheduling.watch.requeue.done
        at.limit("30")
        await all_tasks_blocked()
        await at.world.clock.advance(6)
        await all_tasks_blocked()
        assert before + 1 == at.scheduling.watch.requeue.done


async def test_pods_with_shares_wait_until_quotas_are_listed() -> None:
    """Others do not: a registry without the permission serves them as before."""
    async with site() as at:
        assert at.scheduling.quotas is not None
        at.scheduling.quotas.listed = False
        at.add("one", share(30))
        at.add("plain", {"nvidia.com/gpu": "1"})
        await all_tasks_blocked()

        assert (503, "topoalign: the ResourceQuotas of Kubernetes are not listed yet") == (
            (answer := await at.created(share(1)))[0],
            answer[1].partition(",")[0],
        )
        assert (await at.filtered("one")).startswith("QuotasUnknown: ")
        assert not (await at.filtered("plain")).startswith("QuotasUnknown")
        assert (200, "") == await at.created({"nvidia.com/gpu": "1"})


async def test_a_gang_counts_as_a_whole() -> None:
    """Its first pod would fit, and all of them are reserved with it. A pod that asks for no share is held up, too."""
    async with site() as at:
        at.limit("50")
        for name, cores in (("one", 30), ("two", 30), ("launcher", 0)):
            shown = pod(name, share(cores) if cores else {"cpu": "1"})
            shown["metadata"]["annotations"] = {GANG: "g", GANG_SIZE: "3"}
            at.cluster.add_pod(shown)
        at.add("other", share(20))
        await all_tasks_blocked()
        refused = [await at.filtered(name) for name in ("one", "two", "launcher")]
        bound = await at.bound("one")
        reserved = at.scheduling.reservations.held(NODE)
        at.limit("60")
        await all_tasks_blocked()
        passed = [await at.filtered(name) for name in ("one", "two")]
        await at.bound("one")
        await all_tasks_blocked()

        assert ([NO_ROOM] * 3, NO_ROOM, ()) == (refused, bound, reserved)
        assert (["", ""], NO_ROOM) == (passed, await at.filtered("other"))
        assert "" == await at.bound("two")


async def test_a_pod_counts_that_is_bound_before_it_is_shown() -> None:
    """It is read then, and counts beside others from then on, unless its bind fails."""
    cluster, offers = FakeCluster(), OfferedResources()
    offers.note(NODE, in_units(DGX))
    quotas = Quotas(offers, dict)
    quotas.listed = True
    quotas.see(SeenQuota(namespace="ml", name="gpus", uid="q", limits={CORES: 50}))
    one, two, three = (pod_of(cluster.add_pod(pod(name, share(30)))) for name in ("one", "two", "three"))
    quotas.see_pod(three)
    with quotas.claim(one.to_schedule(), NODE):
        with pytest.raises(OverQuota), quotas.claim(two.to_schedule(), NODE):
            pass
        with pytest.raises(OverQuota):
            quotas.check_waiting(three.to_schedule())
    with pytest.raises(OverQuota):
        quotas.check_waiting(three.to_schedule())
    quotas.see_pod(msgspec.structs.replace(one, node=NODE))
    quotas.end_pod(one.uid)
    with pytest.raises(BusUnavailable), quotas.claim(two.to_schedule(), NODE):
        raise BusUnavailable("no bus")
    quotas.end_pod(three.uid)
    quotas.check_new(three.to_schedule().request)
