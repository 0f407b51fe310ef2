"""The bus's way in: what the hinting service says is used if it fits, and a request cannot take what the node keeps."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from decision_support import knapsack_machine
from e2e_support import allocate, pod, release
from unit_support import in_units

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.service import refuse_duplicate_agent
from topoalign.core import wire
from topoalign.core.hints.providers import answer_hint_request, request_of_question
from topoalign.core.model.decisions import Admission, Explained, Refusal
from topoalign.core.model.errors import (
    NotFound,
    RemoteBadRequest,
    RemoteNoFit,
    RemoteUnavailable,
    StateFault,
    Unavailable,
)
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion, TopologyHint
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import CPU, GPU, NIC, ContainerName, NodeName, PodName, ResourceName
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ContainerRequest,
    ExplainRequest,
    NodeRequest,
    PodRequest,
    Policy,
)
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.core.ports import Endpoint
from topoalign.machines import load_machine
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")


class Node:
    """An allocator on a memory bus; the test plays its hinting service."""

    def __init__(self, machine: str | Topology = "hgx-h100", rules: AdmissionRules | None = None) -> None:
        self.bus = MemoryBus()
        self.journal = MemoryJournal()
        self.ledger = Ledger(NODE, self.journal, ManualClock())
        topology = load_machine(machine).topology if isinstance(machine, str) else machine
        self.topology = TopologyDiscovered(
            node=NODE, epoch=1, revision=1, boot_id="b", source="described: test", topology=topology
        )
        healthy = DeviceHealth(state=HealthState.HEALTHY)
        devices = dict.fromkeys((*topology.gpu_by_id, *topology.nic_by_id), healthy)
        self.health = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=devices)
        self.admissions = Admissions(
            self.ledger, self.bus, rules or AdmissionRules(policy=Policy.RESTRICTED), kubelet_owns_devices=False
        )

    @asynccontextmanager
    async def serving(self, *, known: bool = True) -> AsyncIterator["Node"]:
        if known:
            self.ledger.take_reading(self.topology)
            self.ledger.take_reading(self.health)
        async with self.bus.serve("topoalign-allocator", self.admissions.endpoints()):
            yield self

    @asynccontextmanager
    async def hinting(self, reply: HintAnswer | None) -> AsyncIterator[list[HintQuestion]]:
        """A hinting service that always says this, or, with None, what is right; yields the questions it got."""
        asked: list[HintQuestion] = []

        async def hints(question: HintQuestion) -> HintAnswer:
            asked.append(question)
            return reply or answer_hint_request(request_of_question(question, self.topology))

        endpoint = Endpoint(name="hints", subject=wire.hints_subject(NODE), answer=answer_with(HintQuestion, hints))
        async with self.bus.serve("topoalign-hinting", [endpoint]):
            yield asked


async def test_hints_come_from_the_hinting_service() -> None:
    """Hints come from the hinting service, and the question carries the allocations to it."""
    node = Node()
    async with node.serving(), node.hinting(None) as asked:
        first = await allocate(node.bus, NODE, pod("first", gpus=4))
        second = await allocate(node.bus, NODE, pod("second", gpus=4))

    assert isinstance(first, Admission) and isinstance(second, Admission)
    assert [0, 1] == [len(question.allocations) for question in asked]
    assert first.allocations[0].device_ids.isdisjoint(second.allocations[0].device_ids)
    assert 0 == node.admissions.hint_fallbacks


@pytest.mark.parametrize(
    "reply",
    [
        HintAnswer(providers={}),
        HintAnswer(providers={"device": {}, "cpu": {}, "memory": {}}),
        HintAnswer(providers={"device": {"nvidia.com/gpu": (TopologyHint(0, True),)}, "cpu": {}, "memory": {}}),  # type: ignore[dict-item]  # names as a foreign service would send them
        HintAnswer(providers={"device": {"nvidia.com/gpu": (TopologyHint(-1, True),)}, "cpu": {}, "memory": {}}),  # type: ignore[dict-item]  # as above
        HintAnswer(providers={"device": {"nvidia.com/gpu": (TopologyHint(1 << 40, True),)}, "cpu": {}, "memory": {}}),  # type: ignore[dict-item]  # as above
        HintAnswer(
            providers={"device": {GPU: (TopologyHint(1, True),)}, "cpu": {CPU: (TopologyHint(1, True),)}, "memory": {}}
        ),
    ],
)
async def test_an_incomplete_answer_or_one_with_unknown_nodes_is_not_used(reply: HintAnswer) -> None:
    """
    An answer that leaves something out or names unknown NUMA nodes is not used. A provider that is missing would read as
    one that does not care, and six GPUs on two nodes would be admitted.
    """
    node = Node()
    async with node.serving(), node.hinting(reply):
        decision = await allocate(node.bus, NODE, pod("wide", gpus=6, cpus=8, memory=8), policy="single-numa-node")

    assert isinstance(decision, Refusal)
    assert "TopologyAffinityError" == decision.reason
    assert 1 == node.admissions.hint_fallbacks


class CountingBus(MemoryBus):
    """Counts the questions that are put to it, answered or not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        self.asked.append(subject)
        return await super().ask(subject, body, within)


async def test_a_service_that_never_answers_is_asked_once_for_a_pod() -> None:
    """
    A service that never answers is asked once for a pod, however many containers the pod has. Others wait for the decision:
    twenty time-outs would be five seconds of theirs.
    """
    node, bus = Node(), CountingBus()
    node.admissions = Admissions(
        node.ledger, bus, AdmissionRules(policy=Policy.RESTRICTED), kubelet_owns_devices=False, hint_seconds=0.01
    )
    node.ledger.take_reading(node.topology)
    node.ledger.take_reading(node.health)
    one = pod("many", cpus=1).containers[0]
    containers = tuple(msgspec.structs.replace(one, name=ContainerName(f"c{i}")) for i in range(20))
    asked = PodRequest(name=PodName("many"), containers=containers)

    async def never(question: HintQuestion) -> HintAnswer:
        await anyio.sleep_forever()
        raise AssertionError("it slept for ever")

    endpoint = Endpoint(name="hints", subject=wire.hints_subject(NODE), answer=answer_with(HintQuestion, never))
    async with bus.serve("topoalign-hinting", [endpoint]):
        for name in ("first", "second"):
            request = AllocateRequest(node=NODE, pod=msgspec.structs.replace(asked, name=PodName(name)))
            decision = await node.admissions.allocate(request)
            assert isinstance(decision, Admission)
            assert 20 == len(decision.allocations)

    assert [wire.hints_subject(NODE)] * 2 == bus.asked, "once for each pod"
    assert 40 == node.admissions.hint_fallbacks


@pytest.mark.parametrize(
    "table", [(), ((10, 20),), ((10,), (20,)), ((10, 20, 30), (20, 10, 30)), ((10, 20), (20, 10), ())]
)
async def test_distances_that_do_not_fit_the_nodes_are_said_to_be_unknown(table: tuple[tuple[int, ...], ...]) -> None:
    """Readers of machines refuse such a table; heard on the bus, it is refused where it would count."""
    delivery = msgspec.structs.replace(load_machine("hgx-h100").topology, distances=table)
    node = Node(delivery)
    async with node.serving(), node.hinting(None):
        closest = await allocate(node.bus, NODE, pod("a", gpus=2))
        blind = await allocate(node.bus, NODE, pod("b", gpus=2), mode="kubelet")
        unaligned = await allocate(node.bus, NODE, pod("c", gpus=2), policy="none")

    assert isinstance(closest, Refusal) and isinstance(blind, Admission) and isinstance(unaligned, Admission)
    assert "DistancesUnknown" == closest.code
    assert "not a table of 2 rows of 2" in closest.finding


async def test_without_a_hinting_service_the_decision_is_the_same() -> None:
    decisions = []
    for served in (True, False):
        node = Node()
        async with node.serving():
            if served:
                async with node.hinting(None):
                    decisions.append(await allocate(node.bus, NODE, pod("train", gpus=2, nics=2, cpus=8, memory=8)))
            else:
                decisions.append(await allocate(node.bus, NODE, pod("train", gpus=2, nics=2, cpus=8, memory=8)))

    assert decisions[0] == decisions[1]


async def test_a_request_cannot_take_the_cpus_that_the_node_keeps_for_itself() -> None:
    node = Node(rules=AdmissionRules(reserved_cpus="0-3"))
    async with node.serving():
        with pytest.raises(RemoteBadRequest, match="reserved_cpus: is the node's own"):
            await allocate(node.bus, NODE, pod("greedy", cpus=2), reserved_cpus="")
        decision = await allocate(node.bus, NODE, pod("modest", cpus=8, memory=1))

    assert isinstance(decision, Admission)
    assert parse_cpuset(decision.allocations[0].cpus).isdisjoint({0, 1, 2, 3})


async def test_a_resource_that_the_node_lacks_is_refused_in_every_mode() -> None:
    """The kubelet passes over it because a scheduler has counted before; here there is none."""
    node = Node("cpu-only")
    async with node.serving():
        for mode in ("best", "kubelet"):
            try:
                decision = await allocate(node.bus, NODE, pod(f"in-{mode}", gpus=2), mode=mode)
                assert isinstance(decision, Refusal)
            except RemoteNoFit as refused:
                assert "UnknownResource" == refused.failure.code

    assert {} == node.ledger.state.allocations


async def test_before_the_hardware_is_known_nothing_is_decided() -> None:
    """Before the hardware is known nothing is decided and nothing is recorded."""
    node = Node()
    async with node.serving(known=False):
        with pytest.raises(RemoteUnavailable, match="not known yet"):
            await allocate(node.bus, NODE, pod("early", gpus=1))

    assert 1 == node.ledger.state.seq


async def test_asking_again_for_a_pod_gives_the_same_allocation() -> None:
    """Asking again for a pod gives the same allocation, and another request under its name is refused."""
    node = Node()
    async with node.serving():
        first = await allocate(node.bus, NODE, pod("train", gpus=2, cpus=8, memory=8))
        again = await allocate(node.bus, NODE, pod("train", gpus=2, cpus=8, memory=8))
        with pytest.raises(RemoteBadRequest) as refused:
            await allocate(node.bus, NODE, pod("train", gpus=4))

    assert isinstance(first, Admission) and isinstance(again, Admission)
    assert first.allocations == again.allocations
    assert "PodAlreadyAllocated" == refused.value.failure.code


async def test_a_pod_with_a_part_given_back_does_not_hold_what_it_asks_for() -> None:
    """
    A pod of which a part was given back does not hold what it asks for. Else a container would be told that it has its GPU,
    and the GPU may be another pod's by now.
    """
    node = Node()
    containers = tuple(
        ContainerRequest(name=ContainerName(name), limits={GPU: 1}, requests={GPU: 1}) for name in ("one", "two")
    )
    asked = msgspec.structs.replace(pod("train"), containers=containers)
    async with node.serving():
        first = await allocate(node.bus, NODE, asked)
        assert isinstance(first, Admission)
        await release(node.bus, NODE, first.allocations[1].id)
        with pytest.raises(RemoteBadRequest) as refused:
            await allocate(node.bus, NODE, asked)

    assert "PodAlreadyAllocated" == refused.value.failure.code


async def test_asking_again_for_a_pod_with_an_init_container() -> None:
    """
    Asking again for a pod with an init container gives the same allocations. The app container takes over the memory of its
    init container, whose record then has less than was asked for.
    """
    node = Node()
    like = pod("train", gpus=1, cpus=4, memory=8)
    init = msgspec.structs.replace(like.containers[0], name=ContainerName("prepare"))
    asked = msgspec.structs.replace(like, init_containers=(init,))
    async with node.serving():
        first = await allocate(node.bus, NODE, asked)
        again = await allocate(node.bus, NODE, asked)

    assert isinstance(first, Admission) and isinstance(again, Admission)
    assert first.allocations == again.allocations


async def test_a_pod_asked_for_again_after_a_reboot_is_not_stale_any_more() -> None:
    """A pod that is asked for again after a reboot does not count as one from before the reboot any more."""
    node = Node()
    async with node.serving():
        first = await allocate(node.bus, NODE, pod("train", gpus=2))
        await allocate(node.bus, NODE, pod("gone", gpus=2))
    node.topology = msgspec.structs.replace(node.topology, epoch=2, boot_id="another boot")
    async with node.serving():
        stale = len(node.ledger.state.stale)
        again = await allocate(node.bus, NODE, pod("train", gpus=2))

    assert isinstance(first, Admission) and isinstance(again, Admission)
    assert [held.devices for held in first.allocations] == [held.devices for held in again.allocations]
    assert ["another boot"] == [held.boot for held in again.allocations]
    assert (2, 1) == (stale, len(node.ledger.state.stale))


async def test_a_pod_asked_for_twice_at_once_gets_one_allocation() -> None:
    """
    A pod that is asked for twice at the same time gets one allocation. As when the first answer was given up as lost and
    the request is repeated.
    """
    node = Node()
    decisions = []
    async with node.serving(), node.hinting(None), anyio.create_task_group() as tasks:

        async def ask() -> None:
            decisions.append(await node.admissions.allocate(AllocateRequest(node=NODE, pod=pod("train", gpus=2))))

        for _ in range(3):
            tasks.start_soon(ask)

    (held,) = node.ledger.state.allocations.values()
    assert [(held,)] * 3 == [decision.allocations for decision in decisions if isinstance(decision, Admission)]


async def test_with_a_kubelet_nothing_is_given_or_released_over_the_bus() -> None:
    """On a node with a kubelet nothing is given or taken back over the bus."""
    node = Node()
    async with node.serving():
        await allocate(node.bus, NODE, pod("train", gpus=2))
    node.admissions = Admissions(node.ledger, node.bus, AdmissionRules(), kubelet_owns_devices=True)
    before = node.ledger.state
    async with node.serving():
        for deed in (allocate(node.bus, NODE, pod("more", gpus=1)), release(node.bus, NODE, "default/train")):
            with pytest.raises(RemoteBadRequest) as refused:
                await deed
            assert "KubeletOwnsDevices" == refused.value.failure.code

    assert before.allocations == node.ledger.state.allocations


async def test_two_requests_at_the_same_time_never_get_the_same_device() -> None:
    node = Node()
    decisions = []
    async with node.serving(), node.hinting(None), anyio.create_task_group() as tasks:

        async def ask(name: str) -> None:
            decisions.append(await allocate(node.bus, NODE, pod(name, gpus=3)))

        for number in range(4):
            tasks.start_soon(ask, f"pod-{number}")

    held = [device for a in node.ledger.state.allocations.values() for device in a.device_ids]
    assert 4 == len(decisions)
    assert len(set(held)) == len(held)


async def test_a_health_report_that_comes_while_hints_are_awaited_is_heeded() -> None:
    """The decision was made on a state that is gone: it is made anew, and the GPU that was lost is not given."""
    node = Node()

    async def late(question: HintQuestion) -> HintAnswer:
        lost = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
        devices = {**node.health.devices, **dict.fromkeys(list(node.health.devices)[:4], lost)}
        node.ledger.take_reading(msgspec.structs.replace(node.health, revision=2, devices=devices))
        return answer_hint_request(request_of_question(question, node.topology))

    endpoint = Endpoint(name="hints", subject=wire.hints_subject(NODE), answer=answer_with(HintQuestion, late))
    async with node.serving(), node.bus.serve("topoalign-hinting", [endpoint]):
        decision = await allocate(node.bus, NODE, pod("train", gpus=2))

    assert isinstance(decision, Admission)
    assert all(node.ledger.state.health_of(device).usable for device in decision.allocations[0].device_ids)


async def test_a_prediction_changes_nothing() -> None:
    node = Node()
    async with node.serving():
        before = node.ledger.state
        request = AllocateRequest(node=NODE, pod=pod("maybe", gpus=8), rules={"reserved_cpus": "0"})
        body = await node.bus.ask(wire.admission_subject(NODE, "what-if"), msgspec.json.encode(request), 5)

    assert isinstance(wire.decode_answer(body, Admission), Admission)
    assert before == node.ledger.state


async def test_a_prediction_names_what_the_node_does_not_serve() -> None:
    """Of a node without a kubelet, whose own answer is a refusal."""
    node, typo = Node(), ResourceName("nvidia.com/gpus")
    asked = PodRequest(
        name=PodName("p"), containers=(ContainerRequest(name=ContainerName("main"), limits={typo: 1, GPU: 1}),)
    )
    async with node.serving():
        decision = await node.admissions.predictions.what_if(AllocateRequest(node=NODE, pod=asked))

    assert isinstance(decision, Refusal)
    assert (typo,) == decision.explanation.unserved


async def test_a_decision_is_explained_by_pod_name_and_allocation_id() -> None:
    """A decision is explained by the name of the pod and by the id of the allocation."""
    node = Node()
    async with node.serving():
        decision = await allocate(node.bus, NODE, pod("train", gpus=2))
        assert isinstance(decision, Admission)
        told = []
        for target in ("default/train", decision.allocations[0].id):
            question = msgspec.json.encode(ExplainRequest(node=NODE, target=target))
            body = await node.bus.ask(wire.admission_subject(NODE, "explain"), question, 5)
            told.append(wire.decode_answer(body, Explained))

    assert [decision, decision] == [explained.decision for explained in told]


async def test_explain_of_a_pod_that_the_kubelet_refused_names_the_kubelet() -> None:
    """Where the kubelet decides, whoever asks for a refused pod is sent to the kubelet's reason."""
    node = Node()
    admissions = Admissions(node.ledger, node.bus, AdmissionRules(), kubelet_owns_devices=True)

    with pytest.raises(NotFound) as unknown:
        await admissions.explain(ExplainRequest(node=NODE, target="default/refused"))

    assert "`kubectl describe pod` has its reason" in unknown.value.remedy


async def test_a_second_allocator_of_the_same_node_is_refused() -> None:
    node = Node()
    await refuse_duplicate_agent(node.bus, NODE)
    async with node.serving():
        with pytest.raises(StateFault, match="another allocator answers"):
            await refuse_duplicate_agent(node.bus, NODE)
        with pytest.raises(Unavailable):
            await refuse_duplicate_agent(node.bus, NODE)
    await refuse_duplicate_agent(node.bus, NODE)


async def test_hints_beyond_the_limit_on_work_make_a_refusal() -> None:
    """
    Hints that are not found within the limit on work make a refusal and not a failure. The hinting service says so, the
    allocator tries for itself, and the pod gets an answer that says why.
    """
    hostile, amounts = knapsack_machine()
    asked = ContainerRequest(name=ContainerName("main"), requests=amounts, limits=amounts)
    node = Node(hostile)
    async with node.serving(), node.hinting(None):
        decision = await allocate(node.bus, NODE, PodRequest(name=PodName("greedy"), containers=(asked,)))

    assert isinstance(decision, Refusal)
    assert ("TooMuchWork", None) == (decision.code, decision.provider)


def together(name: str, *, vf: bool = False, gpus: int = 0, nics: int = 0) -> PodRequest:
    hints = {"scheduling.koordinator.sh/device-allocate-hint": json.dumps({"rdma": {"vfSelector": {}}})} if vf else {}
    said = json.dumps({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})
    annotations = {"scheduling.koordinator.sh/device-joint-allocate": said, **hints}
    return msgspec.structs.replace(pod(name, gpus=gpus, nics=nics), annotations=annotations)


async def test_a_jointly_decided_pod_with_more_nics_may_be_asked_for_again() -> None:
    """A pod that is decided jointly may be asked for again although it got more NICs than it asked for."""
    node = Node()
    async with node.serving(), node.hinting(None):
        first = await allocate(node.bus, NODE, together("train", gpus=4, nics=1))
        again = await allocate(node.bus, NODE, together("train", gpus=4, nics=1))
        with pytest.raises(RemoteBadRequest, match="already holds"):
            await allocate(node.bus, NODE, together("train", gpus=3, nics=1))
        with pytest.raises(RemoteBadRequest, match="already holds"):
            await allocate(node.bus, NODE, pod("train", gpus=4, nics=1))
        with pytest.raises(RemoteBadRequest, match="already holds"):
            await allocate(node.bus, NODE, together("train", gpus=4, nics=1, vf=True))

    assert isinstance(first, Admission) and isinstance(again, Admission)
    assert {GPU: 4, NIC: 4} == {name: len(ids) for name, ids in first.allocations[0].devices.items()}
    assert first.allocations == again.allocations
    assert 0 == node.admissions.hint_fallbacks


async def test_pods_share_a_nic_by_its_functions_over_the_bus() -> None:
    """Pods share a NIC by its functions over the bus, and each gets its own again."""
    topology = load_machine("two-socket-8xpcie").topology
    functions = tuple(VirtualFunction(pci=f"0000:0c:00.{i}") for i in (1, 2))
    nics = (msgspec.structs.replace(topology.nics[0], virtual_functions=functions), *topology.nics[1:])
    node = Node(msgspec.structs.replace(topology, nics=nics))
    async with node.serving(), node.hinting(None):
        got = [await allocate(node.bus, NODE, together(name, nics=1, vf=True)) for name in ("a", "b", "a")]
        full = await allocate(node.bus, NODE, together("c", nics=1, vf=True))

    held = [each.allocations[0].virtual_functions for each in got if isinstance(each, Admission)]
    assert [{"mlx5_0": ("0000:0c:00.1",)}, {"mlx5_0": ("0000:0c:00.2",)}, {"mlx5_0": ("0000:0c:00.1",)}] == held
    assert isinstance(full, Refusal)
    assert 2 == len(node.ledger.state.allocations)
    assert 0 == node.admissions.hint_fallbacks


async def test_contradictory_annotations_are_refused() -> None:
    """Annotations that cannot be meant are refused, and nothing is recorded."""
    node = Node()
    odd = msgspec.structs.replace(pod("odd", gpus=1), annotations={"topoalign.io/nonsense": "x"})
    async with node.serving():
        with pytest.raises(RemoteBadRequest, match="nonsense"):
            await allocate(node.bus, NODE, odd)
        with pytest.raises(RemoteBadRequest, match="koordinatr"):
            await allocate(node.bus, NODE, together("train", gpus=1), compat="koordinatr")

    assert {} == node.ledger.state.allocations


async def test_an_unconfirmed_record_gives_nothing_new_out() -> None:
    """
    While the record is unconfirmed nothing new is given out, until somebody confirms it. No kubelet can tell here what else
    is held. What is known goes on: the same answer again, and releases.
    """
    node = Node()
    async with node.serving():
        held = await allocate(node.bus, NODE, pod("held", gpus=2))
        await allocate(node.bus, NODE, pod("ends", gpus=2))
        node.journal.unconfirmed = "line 7 cannot be decoded"
        with pytest.raises(RemoteUnavailable) as refused:
            await allocate(node.bus, NODE, pod("new", gpus=1))
        foreseen = await node.admissions.predictions.what_if(AllocateRequest(node=NODE, pod=pod("new", gpus=1)))
        again = await allocate(node.bus, NODE, pod("held", gpus=2))
        await release(node.bus, NODE, "default/ends")
        before = len(node.ledger.state.allocations)
        question = msgspec.json.encode(NodeRequest(node=NODE))
        answers = [
            wire.decode_answer(await node.bus.ask(wire.admission_subject(NODE, "trust"), question, 1), str | None)  # type: ignore[arg-type]  # a union is a type to msgspec, not to mypy
            for _ in range(2)
        ]
        new = await allocate(node.bus, NODE, pod("new", gpus=1))

    assert ("StateFault", True) == (refused.value.failure.code, "topoalign trust" in refused.value.remedy)
    assert (refused.value.failure.finding,) == foreseen.explanation.notes
    assert isinstance(held, Admission) and isinstance(again, Admission) and isinstance(new, Admission)
    assert held.allocations == again.allocations
    assert 1 == before
    assert ["line 7 cannot be decoded", None] == answers
    assert None is node.journal.unconfirmed


async def test_a_bus_request_first_ensures_that_the_health_is_fresh() -> None:
    """Before anything is given out over the bus, `ensure_fresh` confirms what is known of the devices."""
    node = Node()

    async def ensure_fresh() -> None:
        sick = DeviceHealth(state=HealthState.UNHEALTHY, reason="XID 79")
        devices = dict.fromkeys(node.health.devices, sick)
        node.ledger.take_reading(msgspec.structs.replace(node.health, revision=2, devices=devices))

    node.admissions = Admissions(
        node.ledger,
        node.bus,
        AdmissionRules(policy=Policy.RESTRICTED),
        kubelet_owns_devices=False,
        ensure_fresh=ensure_fresh,
    )
    async with node.serving():
        decision = await allocate(node.bus, NODE, pod("first", gpus=1))

    assert isinstance(decision, Refusal)


async def test_pods_share_a_gpu_by_its_units_over_the_bus() -> None:
    """Two halves by Koordinator's names are all of the GPU, also after a restart; what one gives back another gets."""

    def half(name: str, hundredths: int = 50) -> PodRequest:
        limits = {ResourceName("koordinator.sh/gpu"): hundredths}
        container = ContainerRequest(name=ContainerName("main"), requests=limits, limits=limits)
        annotations = {"scheduling.koordinator.sh/device-allocate-hint": "{}"}
        return msgspec.structs.replace(pod(name), containers=(container,), annotations=annotations)

    node = Node(in_units(load_machine("dgx-a100").topology, gpus=1))
    async with node.serving(), node.hinting(None):
        got = [await allocate(node.bus, NODE, half(name)) for name in ("a", "b", "a")]
        full = await allocate(node.bus, NODE, half("c"))
        for other in (half("a", 51), half("a", 100), pod("a", gpus=1)):
            with pytest.raises(RemoteBadRequest, match="already holds"):
                await allocate(node.bus, NODE, other)
        restarted = Ledger(NODE, node.journal, ManualClock())
        held = dict(restarted.state.allocations)
        await release(node.bus, NODE, "default/a")
        last = await allocate(node.bus, NODE, half("c"))

    assert all(isinstance(each, Admission) for each in (*got, last)) and isinstance(full, Refusal)
    first, _, again = (each.allocations for each in got if isinstance(each, Admission))
    assert first == again
    (gpu,) = node.topology.topology.gpus[:1]
    assert [Amount(cores=50, memory=20 << 30)] * 2 == [each.amounts[gpu.id] for each in held.values()]
    assert not frozenset.intersection(*(each.device_ids for each in held.values()))
    assert 2 == len(node.ledger.state.allocations)
