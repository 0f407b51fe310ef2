"""
The health of whole devices, shares, MIG instances and virtual functions is derived in one place.

Hints, placement, the listing to the kubelet, the registry's view, the command line and predictions agree with a reference
that reads the rule off the facts, one device at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import msgspec
import pytest
from decision_support import NODE, asking, container, machine, pod
from e2e_support import allocate, answering, in_one_process
from e2e_support import pod as asked
from fact_support import mig_device
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet_files_support import write_files

from topoalign.allocator.device_plugin.listing import DeviceListing
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.admissions import Admissions
from topoalign.cli import gpu
from topoalign.cli.link import AnnouncedNode
from topoalign.core.admission.admit import admit
from topoalign.core.hints.providers import answer_hint_request, request_of_question, to_hint_question
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.events import (
    Allocation,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.model.holdings import base_of, handed_out
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Nic, Topology, VirtualFunction
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files.node_state import node_state
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.registry import api_views
from topoalign.registry.cluster_nodes import ClusterNode
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

MIXED, SHARED = ResourceName("x.io/mixed"), ResourceName("x.io/shared")
NAMES = st.sampled_from([GPU, MIXED, SHARED])
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
TOLD = st.sampled_from(
    [
        HEALTHY,
        HEALTHY,
        HEALTHY,
        DeviceHealth(state=HealthState.HEALTHY, cordoned=True),
        DeviceHealth(state=HealthState.UNKNOWN, reason="NVML does not answer"),
        DeviceHealth(state=HealthState.UNHEALTHY, reason="XID 79"),
    ]
)


@dataclass(frozen=True)
class Case:
    """What a node has, offers, is told of it, and has given away."""

    topology: Topology
    told: Mapping[DeviceID, DeviceHealth]
    held: Sequence[tuple[ResourceName, DeviceID]]

    @property
    def state(self) -> NodeState:
        found = TopologyDiscovered(
            node=NODE, epoch=1, revision=1, boot_id="b", source="described: test", topology=self.topology
        )
        health = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=dict(self.told))
        owner = partial(Owner, namespace=Namespace(""), container=ContainerName("main"))
        live = tuple(
            Allocation(id=AllocationID(f"a{i}"), owner=owner(pod=PodName(f"uid-{i}")), devices={resource: (device,)})
            for i, (resource, device) in enumerate(self.held)
        )
        snapshot = AllocationsSnapshot(node=NODE, epoch=1, seq=1, allocations=live, digest="")
        return NodeState(node=NODE).apply(found).apply(health).apply(snapshot)

    def usable(self, device: DeviceID) -> bool:
        """Straight from the words: all that is told of it, of what it is a part of and of its own parts is good."""
        base = DeviceID(device.split("::")[0])
        parents = {mig.uuid: gpu.id for gpu in self.topology.gpus for mig in gpu.mig or ()}
        parents |= {DeviceID(vf.pci): nic.id for nic in self.topology.nics for vf in nic.virtual_functions}
        parts = [part for part, card in parents.items() if card == base]
        named = {device, base, parents.get(base, base)}
        said = [self.told[name] for name in named if name in self.told]
        said += [self.told[part] for part in parts if part in self.told] if said else []
        return bool(said) and all(each.state is HealthState.HEALTHY and not each.cordoned for each in said)

    def listed(self, resource: ResourceName) -> dict[DeviceID, int | None]:
        """Handed-out id -> its NUMA node."""
        near = {gpu.id: gpu.numa_affinity for gpu in self.topology.gpus}
        near |= {nic.id: nic.numa_affinity for nic in self.topology.nics}
        near |= {mig.uuid: gpu.numa_affinity for gpu in self.topology.gpus for mig in gpu.mig or ()}
        near |= {DeviceID(vf.pci): nic.numa_affinity for nic in self.topology.nics for vf in nic.virtual_functions}
        return {
            DeviceID(base if offer.replicas == 1 else f"{base}::{n}"): next(iter(near[base]), None)
            for offer in self.topology.offers or ()
            if offer.resource == resource
            for base in offer.devices
            for n in range(offer.replicas)
        }

    def free(self, resource: ResourceName) -> list[DeviceID]:
        held = {device for _, device in self.held}
        return [device for device in self.listed(resource) if self.usable(device) and device not in held]

    def admits(self, resource: ResourceName, amount: int, policy: Policy, mode: Mode) -> bool:
        """The kubelet's rule for one resource; mode `best` judges by what is free now where the kubelet takes all."""
        listed, free = self.listed(resource), self.free(resource)
        if amount > len(free):
            return False
        if policy in (Policy.NONE, Policy.BEST_EFFORT) or all(node is None for node in listed.values()):
            return True
        bearing = sorted({node for node in listed.values() if node is not None})

        def narrow(devices: Sequence[DeviceID]) -> list[int]:
            """Sizes of the sets of NUMA nodes that have enough of these."""
            return [
                size
                for size in range(1, len(bearing) + 1)
                for nodes in combinations(bearing, size)
                if sum(listed[device] in nodes for device in devices) >= amount
            ]

        now, best = narrow(free), narrow(free if mode is Mode.BEST else list(listed))
        preferred = bool(now) and min(now) == min(best)
        return preferred and (policy is Policy.RESTRICTED or min(now) == 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes = st.sampled_from([0, 0, 1, 1, None])
    plain = machine(gpus=[draw(nodes) for _ in range(3)], nics=[draw(nodes) for _ in range(2)])
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    divided: dict[tuple[ResourceName, int], list[DeviceID]] = {}
    for card in plain.gpus:
        instances = tuple(
            MigDevice(
                uuid=DeviceID(f"MIG-{card.index}-{i}"), profile="1g.10gb", gpu_instance=i, compute_instance=0, memory=1
            )
            for i in range(draw(st.integers(0, 2)))
        )
        gpus.append(msgspec.structs.replace(card, mig=instances or None))
        whole = draw(st.booleans()) or not instances
        offered = (card.id,) if whole else tuple(instance.uuid for instance in instances)
        divided.setdefault((draw(NAMES), draw(st.integers(1, 3))), []).extend(offered)
    for nic in plain.nics:
        functions = tuple(VirtualFunction(pci=f"0000:9{nic.index}:00.{i}") for i in range(draw(st.integers(0, 2))))
        nics.append(msgspec.structs.replace(nic, virtual_functions=functions))
        whole = draw(st.booleans()) or not functions
        offered = (nic.id,) if whole else tuple(DeviceID(each.pci) for each in functions)
        divided.setdefault((draw(NAMES), draw(st.integers(1, 2))), []).extend(offered)
    topology = msgspec.structs.replace(
        plain,
        gpus=tuple(gpus),
        nics=tuple(nics),
        offers=tuple(
            Offer(resource=resource, devices=tuple(devices), replicas=replicas)
            for (resource, replicas), devices in divided.items()
        ),
    )
    validate(topology)
    handed = [
        (offer.resource, device)
        for offer in topology.offered
        for base in offer.devices
        for device in handed_out(base, offer.replicas)
    ]
    cards = [*topology.gpu_by_id, *topology.nic_by_id]
    told = {card: draw(TOLD) for card in cards if draw(st.integers(0, 9))}
    some = st.sampled_from([*topology.parents, *(device for _, device in handed)])
    told |= draw(st.dictionaries(some, TOLD, max_size=3))
    held = draw(st.lists(st.sampled_from(handed), max_size=3, unique_by=lambda each: each[1]))
    return Case(topology, told, held)


@settings(max_examples=80)
@given(cases())
def test_what_is_healthy_is_the_same_wherever_it_is_asked(case: Case) -> None:
    state = case.state
    for resource, devices in case.topology.devices.items():
        expected = [device for device in devices if case.usable(device)]
        seen = state.apply(
            DeviceHealthChanged(
                node=NODE,
                epoch=9,
                revision=1,
                devices={
                    device: HEALTHY if case.usable(device) else DeviceHealth(state=HealthState.UNHEALTHY)
                    for device in devices
                },
            )
        )

        assert list(case.listed(resource)) == list(devices)
        assert expected == [device for device in devices if state.health_of(device).usable]
        assert expected == list(state.healthy(resource))
        assert case.free(resource) == list(state.ownership.free(resource)) == list(seen.ownership.free(resource))
        assert expected == listed_healthy(state, resource)
        status = AnnouncedNode(NODE, case.topology, tuple(state.allocations.values()), case.told)
        assert expected == [device for device in devices if status.health_of(device).usable]
        shown = api_views.detail(ClusterNode(state=state), ())
        assert expected == [device for device in devices if shown.health[device].usable]
        assert len(case.free(resource)) == shown.summary.resources[resource].free


def listed_healthy(state: NodeState, resource: ResourceName) -> list[DeviceID]:
    """As the kubelet reads it."""
    said = v1beta1.ListAndWatchResponse.parse(anyio.run(DeviceListing(resource).of, state).SerializeToString())
    return [DeviceID(device.id) for device in said.devices if device.health == "Healthy"]


def test_an_ill_instance_leaves_its_card_as_it_is() -> None:
    """
    An ill instance that is handed out by itself leaves its card as it is. Its card, cordoned, keeps all instances back;
    `topoalign gpu list` shows both.
    """
    instances = tuple(mig_device(f"MIG-{i}", i, memory=1) for i in range(2))
    plain = machine(gpus=[0], nics=[])
    card = msgspec.structs.replace(plain.gpus[0], mig=instances)
    apart = Offer(resource=MIXED, devices=(instances[0].uuid, instances[1].uuid))
    ill = DeviceHealth(state=HealthState.UNHEALTHY, reason="XID 94")
    cordoned = DeviceHealth(state=HealthState.HEALTHY, cordoned=True)

    def listed(told: dict[DeviceID, DeviceHealth], offer: Offer) -> dict[str, str]:
        topology = msgspec.structs.replace(plain, gpus=(card,), offers=(offer,))
        return {
            device: gpu.format_state(health)
            for device, health in gpu.list_health(AnnouncedNode(NODE, topology, (), told))
        }

    assert {"GPU-0": "healthy", "MIG-1": "unhealthy"} == listed({card.id: HEALTHY, instances[1].uuid: ill}, apart)
    assert {"GPU-0": "healthy, cordoned", "MIG-1": "unhealthy, cordoned"} == listed(
        {card.id: cordoned, instances[1].uuid: ill}, apart
    )
    whole = Offer(resource=GPU, devices=(card.id,))
    assert {"GPU-0": "unhealthy", "MIG-1": "unhealthy"} == listed({card.id: HEALTHY, instances[1].uuid: ill}, whole)


@settings(max_examples=80)
@given(cases(), st.sampled_from(list(Policy)), st.sampled_from(list(Mode)), st.data())
def test_a_decision_on_what_is_offered_is_the_rule_applied_to_what_is_free(
    case: Case, policy: Policy, mode: Mode, data: st.DataObject
) -> None:
    rules = AdmissionRules(policy=policy, mode=mode)
    state = case.state
    resource = data.draw(st.sampled_from(sorted(case.topology.devices)))
    amount = data.draw(st.integers(1, len(case.topology.devices[resource])))
    wanted = pod(container(others={resource: amount}))

    decision = admit(state, wanted, rules)

    assert case.admits(resource, amount, policy, mode) == isinstance(decision, Admission), decision
    if isinstance(decision, Admission):
        assert {*decision.allocations[0].devices[resource]} <= {*case.free(resource)}


@settings(max_examples=25)
@given(cases(), st.sampled_from(list(Policy)), st.data())
def test_allocate_what_if_and_a_prediction_from_files_decide_alike(
    case: Case, policy: Policy, data: st.DataObject
) -> None:
    resource = data.draw(st.sampled_from(sorted(case.topology.devices)))
    amount = data.draw(st.integers(1, len(case.topology.devices[resource])))
    wanted = pod(container(others={resource: amount}))

    expected = case.admits(resource, amount, policy, Mode.KUBELET)

    predicted = from_files(case, wanted, AdmissionRules(policy=policy, mode=Mode.KUBELET))
    assert expected == isinstance(predicted, Admission), predicted
    for verb in ("what_if", "allocate"):
        decided = anyio.run(asked_over_the_bus, case, verb, wanted, AdmissionRules(policy=policy, mode=Mode.KUBELET))
        assert expected == isinstance(decided, Admission), decided


def from_files(case: Case, wanted: PodRequest, rules: AdmissionRules) -> Decision:
    """All cards are healthy, and the kubelet's file says what its plugins listed as such."""
    state = case.state
    assert state.topology is not None and state.health is not None
    well = dict.fromkeys((*case.topology.gpu_by_id, *case.topology.nic_by_id), HEALTHY)
    with TemporaryDirectory() as root:
        write_files(Path(root), state, rules)
        found = node_state(state.topology, msgspec.structs.replace(state.health, devices=well), Path(root), rules)
    return admit(found.state, wanted, rules)


async def asked_over_the_bus(case: Case, verb: str, wanted: PodRequest, rules: AdmissionRules) -> Decision:
    state = case.state
    ledger = Ledger(NODE, MemoryJournal(), ManualClock())
    assert state.topology is not None and state.health is not None
    ledger.take_reading(state.topology)
    ledger.take_reading(state.health)
    ledger.grant(tuple(state.allocations.values()))
    admissions = Admissions(ledger, MemoryBus(), rules, kubelet_owns_devices=False)
    ask = {"allocate": admissions.allocate, "what_if": admissions.predictions.what_if}[verb]
    return await ask(AllocateRequest(node=NODE, pod=wanted))


@settings(max_examples=40)
@given(cases())
def test_a_hint_question_carries_all_that_its_answer_needs_of_health(case: Case) -> None:
    """The question to a hint provider carries all that its answer needs of health."""
    state = case.state
    assert state.topology is not None
    for resource in case.topology.devices:
        wanted = pod(container(others={resource: 1}))
        asked = to_hint_question(asking(state, wanted, None, AdmissionRules(policy=Policy.RESTRICTED)), wanted)

        assert sorted(asked.unusable) == sorted(
            device for devices in case.topology.devices.values() for device in devices if not case.usable(device)
        )
        hints = answer_hint_request(request_of_question(asked, state.topology)).providers["device"][resource]
        listed, free = case.listed(resource), case.free(resource)
        if any(node is not None for node in listed.values()):
            assert bool(hints) == any(listed[device] is not None for device in free)
        else:
            assert (None if free else ()) == hints


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
async def test_a_share_in_time_is_given_on_numa_node_0_while_all_shares_are_free(tmp_path: Path, policy: str) -> None:
    """F02: four shares of each of eight GPUs, and every pod was refused."""
    config = tmp_path / "config.yaml"
    config.write_text("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n")
    node, bus = NodeName("node-1"), MemoryBus()
    settings = {
        "TOPOALIGN_NODE": node,
        "TOPOALIGN_MACHINE": "hgx-h100",
        "TOPOALIGN_POLICY": policy,
        "TOPOALIGN_CONFIG": str(config),
        "TOPOALIGN_STATE_DIR": str(tmp_path),
    }
    async with in_one_process(bus, settings):
        await answering(bus, node)
        decision = await allocate(bus, node, asked("train", gpus=1))

    assert isinstance(decision, Admission), decision
    assert "GPU-0" == base_of(decision.allocations[0].devices[GPU][0])
    assert (0,) == decision.allocations[0].affinity
