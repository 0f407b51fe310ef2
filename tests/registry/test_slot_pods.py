"""Pods with slots of GPUs: where they are offered, what is reserved for them, and what their binds wait for."""

from collections.abc import AsyncIterator

import msgspec
import pytest
from api_server_support import shown_pod
from binding_support import Registry, Site, running
from decision_support import container, machine, node, pod
from instance_support import A100, place
from slot_support import CORES, MEMORY, MIB, PERCENTAGE, PLAIN, WITH_NUMA_NODES, asks, in_slots
from unit_support import refused
from view_support import NODE, RULES, OneNode, asked

from topoalign.core.admission.feasibility import machine_key
from topoalign.core.admission.realignment import PendingPod
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import CPU, GPU, DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.slot_defaults import with_defaults
from topoalign.registry.scheduling.filter.admission_order import all_fit, are_ambiguous
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, PodClasses
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.testing.manual_clock import ManualClock

EACH = 40_000
UUIDS = "nvidia.com/use-gpuuuid"


def shared(gpus: int = 4, terms: Slots = PLAIN) -> Topology:
    """Two NUMA nodes with two GPUs each, of 40000 MiB."""
    plain = machine()
    sized = tuple(msgspec.structs.replace(gpu, memory=EACH * MIB) for gpu in plain.gpus)
    return in_slots(msgspec.structs.replace(plain, gpus=sized), 10, gpus, terms)


def world(hardware: Topology) -> OneNode:
    found = OneNode(RULES, hardware)
    found.tell(found.says.all())
    return found


def code(of: OneNode, request: PodRequest) -> str:
    refused = of.scheduler.filter(asked(request), (NODE,)).refused
    return refused[NODE].code if NODE in refused else ""


def test_a_node_is_offered_where_gpus_have_enough_left() -> None:
    it = world(shared())

    assert "" == code(it, pod(asks(4, memory=9_000)))
    assert "NotEnoughShareGpus" == code(it, pod(asks(5)))
    many = pod(asks(2, memory=30_000), asks(2, memory=30_000, name="b"), asks(name="c"))
    assert "NotEnoughShareMemory" == code(it, many)


def test_slots_that_become_instances_are_offered_by_place() -> None:
    """Of the one GPU in slots six of eight slices are free, and no four of them in a row."""
    plain = shared(1)
    instances = tuple(
        MigDevice(
            uuid=DeviceID(f"MIG-{start}"),
            profile="1g.5gb",
            gpu_instance=start,
            compute_instance=0,
            memory=1,
            placement=place(start, 1),
        )
        for start in (1, 5)
    )
    first = msgspec.structs.replace(plain.gpus[0], mig=instances, mig_profiles=A100)
    offer = Offer(resource=GPU, devices=(first.id,), replicas=7, slots=Slots(instances=True))
    it = world(msgspec.structs.replace(plain, gpus=(first, *plain.gpus[1:]), offers=(offer,)))

    assert "" == code(it, pod(asks(memory=6 * 1024)))
    assert "" != code(it, pod(asks(memory=11 * 1024)))
    assert "" != code(it, pod(asks()))


@pytest.mark.parametrize(
    "asked_for", [asks(memory=EACH + 1), asks(memory=16 << 30), asks(cores=101), asks(percentage=150), asks(0, cores=5)]
)
def test_bad_amounts_are_refused_alike_by_webhook_filter_and_node(asked_for: ContainerRequest) -> None:
    it, bad = world(shared()), pod(asked_for)
    it.view.renew()

    found = []
    for check in (lambda: it.scheduler.checks.check(bad), lambda: code(it, bad)):
        with pytest.raises(InvalidShare) as caught:
            check()
        found.append((caught.value.finding, caught.value.remedy))

    refusal = refused(node(shared()), bad, RULES)
    assert [(refusal.finding, refusal.remedy)] * 2 == found
    assert refusal.finding.startswith("spec.containers[0].resources.limits[nvidia.com/gpu")


def test_a_node_is_not_offered_where_its_alignment_leads_to_full_gpus() -> None:
    """Both GPUs of the first NUMA node are nearly full, and a kubelet that aligns slots counts them all the same."""
    it = world(shared(terms=WITH_NUMA_NODES))
    held = {gpu: Amount(cores=70, memory=100 * MIB) for gpu in ("GPU-0::0", "GPU-1::0")}
    it.view.reserve(NODE, [reserved("first", held)])

    assert "ShareSplit" == code(it, pod(asks(1, memory=100, cores=40)))
    assert "" == code(it, pod(asks(1, memory=100, cores=20)))


def test_a_node_is_offered_where_it_has_such_gpus() -> None:
    """GPU-7 is another node's."""
    it = world(shared())
    others = msgspec.structs.replace(machine().gpus[0], id=DeviceID("GPU-7"))
    it.view.offers.note(NodeName("other"), Topology(gpus=(others,)))

    def said(annotations: dict[str, str]) -> str:
        return code(it, pod(asks(1, memory=100), annotations=annotations))

    assert "" == said({UUIDS: "GPU-1,GPU-7"}) == said({})
    assert "NoGpuAccepted" == said({UUIDS: "GPU-7"}) == said({"nvidia.com/use-gputype": "B200"})


def test_a_pod_for_gpus_that_no_node_has_is_denied() -> None:
    """By webhook and filter alike, as by `what-if`; one that some node has is enough."""
    it = world(shared())
    it.view.renew()
    denied = pod(asks(1, memory=100), annotations={UUIDS: "GPU-7,GPU-8"})
    allowed = msgspec.structs.replace(denied, annotations={UUIDS: "GPU-7,GPU-1"})

    for check in (it.scheduler.checks.check, lambda request: code(it, request)):
        with pytest.raises(InvalidShare, match="use-gpuuuid]: 'GPU-7', 'GPU-8': no node has such a GPU"):
            check(denied)
        check(allowed)
    refusal = refused(node(shared()), denied, RULES)

    assert "NoGpuAccepted" == refusal.code
    assert "4 not among the uuids (nvidia.com/use-gpuuuid" in refusal.finding
    it.scheduler.checks.check(pod(container(cpus=1), annotations={UUIDS: "GPU-7"}))


def test_a_node_that_is_to_come_has_none_of_the_gpus_that_are_known() -> None:
    """Else an autoscaler would add nodes without end for a pod that waits for one GPU."""
    it = world(shared())
    it.view.renew()
    kind = it.view.nodes[NODE].kind
    assert kind is not None

    def said(annotations: dict[str, str]) -> str:
        request = pod(asks(1, memory=100), annotations=annotations)
        classes = PodClasses()
        return DecisionCache(it.view, classes).judge_empty(classes.of(asked(request)), kind)

    assert "NoGpuAccepted" == said({UUIDS: "GPU-1"})
    assert "" == said({"nvidia.com/nouse-gpuuuid": "GPU-0,GPU-1,GPU-2,GPU-3"}) == said({})


def test_a_pod_for_a_gpu_that_is_in_use_may_wait_for_it() -> None:
    """The node has the GPU that the annotation names; it fits once the pod that holds it has ended."""
    it = world(shared())
    held = {gpu: Amount(cores=0, memory=EACH * MIB) for gpu in ("GPU-0::0", "GPU-1::0")}
    it.view.reserve(NODE, [reserved("first", held)])
    request = pod(asks(1, memory=100), annotations={UUIDS: "GPU-1"})
    never = pod(asks(2, memory=100), annotations={UUIDS: "GPU-1"})
    refused = [it.scheduler.filter(asked(each), (NODE,)).refused[NODE] for each in (request, never)]

    assert [None, Resolvability.NEVER] == [each.resolvability for each in refused]


def test_nodes_with_other_models_or_elsewhere_are_of_another_kind() -> None:
    def key(names: str, nodes: str) -> bytes:
        gpus = zip(shared().gpus, names, nodes, strict=True)
        placed = [msgspec.structs.replace(gpu, name=name, numa_affinity=(int(at),)) for gpu, name, at in gpus]
        return machine_key(msgspec.structs.replace(shared(), gpus=tuple(placed)))

    assert len({key("AAAA", "0011"), key("ABAB", "0011"), key("ABAB", "0101")}) == 3


def test_a_pod_of_another_scheduler_is_expected_to_hold_an_equal_part() -> None:
    """Its node knows no amounts of it, whatever it asks for."""
    it = world(shared(1))
    it.view.expect(NODE, asked(pod(asks(1, memory=100, cores=80), name="foreign")))

    assert "" == code(it, pod(asks(1, memory=100, cores=90)))
    assert "NotEnoughShareCores" == code(it, pod(asks(1, memory=100, cores=91)))


def test_a_pod_for_a_gpu_fits_nodes_in_slots_and_others_after_the_webhook() -> None:
    """Nodes without slots have no resource of amounts; only pods that name one are for slots alone."""
    it, plain = world(shared()), world(machine())
    plain.view.renew()
    plain.view.offers.note(NodeName("in-slots"), shared())

    def made(request: PodRequest) -> PodRequest:
        return with_defaults(request, plain.view.offers.left_out(request))

    whole, percentage = made(pod(asks(1))), made(pod(asks(1, percentage=100)))
    assert ("", "") == (code(it, whole), code(plain, whole))
    assert 100 == percentage.containers[0].limits[CORES]
    assert ("", "UnknownResource") == (code(it, percentage), code(plain, percentage))


def reserved(name: str, held: dict[str, Amount]) -> Reservation:
    slots = {DeviceID(slot): amount for slot, amount in held.items()}
    part = {"container": "main", "devices": {GPU: tuple(slots)}, "slots": slots}
    return msgspec.convert(
        {
            "pod_uid": f"uid-{name}",
            "namespace": "default",
            "pod": name,
            "containers": [msgspec.to_builtins(part)],
            "seconds_left": 30.0,
        },
        Reservation,
    )


def test_a_node_without_slots_has_no_amounts_whatever_others_offer() -> None:
    """Names of its own are known where some node has slots by them, and those of HAMi always."""
    it, plain, own = world(shared()), world(machine()), ResourceName("example.com/mib")

    assert "" == code(it, pod(asks(1, memory=100)))
    assert {MEMORY, PERCENTAGE, CORES} <= it.view.offers.names
    assert "UnknownResource" == code(plain, pod(asks(1, memory=100)))
    assert "" == code(plain, pod(container("main", gpus=1, others={own: 100})))
    plain.view.offers.names |= {own}
    assert "UnknownResource" == code(plain, pod(container("main", gpus=1, others={own: 101})))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 4_000), (1, 4_000), False),
        ((1, 4_000), (1, 5_000), True),
        ((1, 4_000), (2, 5_000), False),
        ((2, 4_000), (2, 0), True),
    ],
)
def test_pods_are_mistakable_by_as_many_slots(one: tuple[int, int], other: tuple[int, int], expected: bool) -> None:
    def pending_pod(gpus: int, memory: int) -> PendingPod:
        return PendingPod((gpus, memory), read_pod(pod(asks(gpus, memory=memory)), AdmissionRules()), True)

    assert expected is are_ambiguous(shared(), pending_pod(*one), pending_pod(*other))
    assert not are_ambiguous(machine(), pending_pod(*one), pending_pod(*other))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, False),
        ({UUIDS: "GPU-1"}, {}, True),
        ({UUIDS: "GPU-1"}, {UUIDS: "GPU-1"}, False),
        ({UUIDS: "GPU-1"}, {UUIDS: "GPU-1,GPU-2"}, True),
        ({"nvidia.com/numa-bind": "false"}, {}, False),
    ],
)
def test_pods_are_mistakable_by_what_they_say_of_gpus(
    one: dict[str, str], other: dict[str, str], expected: bool
) -> None:
    """The last one has changed its annotations since it was reserved."""

    def pending_pod(annotations: dict[str, str]) -> PendingPod:
        asked_for = pod(asks(1, memory=100), annotations=annotations)
        return PendingPod(str(annotations), read_pod(asked_for, AdmissionRules()), True)

    assert expected is are_ambiguous(shared(), pending_pod(one), pending_pod(other))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("annotations", "policy", "terms", "expected"),
    [
        ({UUIDS: "GPU-0,GPU-2"}, Policy.RESTRICTED, WITH_NUMA_NODES, False),
        ({"hami.io/gpu-scheduler-policy": "mutex"}, Policy.BEST_EFFORT, WITH_NUMA_NODES, False),
        ({UUIDS: "GPU-0,GPU-2"}, Policy.NONE, WITH_NUMA_NODES, True),
        ({"hami.io/gpu-scheduler-policy": "spread"}, Policy.RESTRICTED, WITH_NUMA_NODES, True),
        ({UUIDS: "GPU-0,GPU-2"}, Policy.RESTRICTED, PLAIN, True),
    ],
)
async def test_who_comes_first_is_aligned_alike_if_it_limits_its_gpus(
    annotations: dict[str, str], policy: Policy, terms: Slots, expected: bool
) -> None:
    """The first has CPUs of NUMA node 0, and GPU-2 of node 1 is reserved for the second, wherever a kubelet aligns slots."""
    rules = msgspec.structs.replace(RULES, policy=policy, cpu_manager="static", reserved_cpus="0")

    def pending_pod(name: str, gpus: int, says: dict[str, str]) -> PendingPod:
        one = asks(gpus, memory=100)
        with_cpus = {**one.limits, CPU: 4_000, ResourceName("memory"): 1_000}
        made = pod(msgspec.structs.replace(one, limits=with_cpus, requests=with_cpus), name=name)
        return PendingPod(name, read_pod(msgspec.structs.replace(made, annotations=says), rules), True)

    comers = [pending_pod("second", 1, annotations), pending_pod("first", 2, {})]

    assert expected is await all_fit(node(shared(terms=terms)), comers, TaskTurns(ManualClock()))


@pytest.fixture
async def site() -> Site:
    return Site(hardware=shared())


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Registry]:
    bus = MemoryBus()
    one = Registry(site, bus)
    async with running(site, bus, one):
        yield one


@pytest.mark.anyio
async def test_a_bind_reserves_slots_with_their_amounts(site: Site, registry: Registry) -> None:
    shown = shown_pod("a", gpus=2)
    limits = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "5000", "nvidia.com/gpucores": "30"}
    shown["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits}
    uid = str(site.cluster.add_pod(shown)["metadata"]["uid"])

    await registry.bind("a", uid)

    (found,) = registry.reservations.held(NodeName("node-1"))
    assert "node-1" == site.node_of("a")
    assert {DeviceID("GPU-0::0"), DeviceID("GPU-1::0")} == found.containers[0].slots.keys()
    assert {(30, 5_000)} == {(each.cores, each.memory // MIB) for each in found.containers[0].slots.values()}
    assert found.containers[0].may_move


@pytest.mark.anyio
async def test_a_bind_reserves_the_gpus_that_annotations_choose(site: Site, registry: Registry) -> None:
    shown = shown_pod("a", gpus=1)
    shown["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "5000"
    shown["metadata"]["annotations"] = {UUIDS: "GPU-2"}
    uid = str(site.cluster.add_pod(shown)["metadata"]["uid"])

    await registry.bind("a", uid)

    (found,) = registry.reservations.held(NodeName("node-1"))
    assert {DeviceID("GPU-2::0")} == found.containers[0].slots.keys()
    assert not found.containers[0].may_move
