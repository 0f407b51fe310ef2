"""Pod-level resources: the kubelet leaves its CPUs and memory alone, and gives out devices as ever."""

from random import Random

import msgspec
import pytest
from decision_support import GIB, admitted, container, granted, machine, node, pod

from topoalign.core.admission.admit import admit
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY, ResourceName, is_native
from topoalign.core.model.requests import (
    AdmissionRules,
    ContainerRequest,
    Mode,
    PodLevelResources,
    PodRequest,
    Policy,
    Qos,
    Scope,
)
from topoalign.core.scoring.numa import numa_need

EIGHT = {CPU: 8_000, MEMORY: 16 * GIB}
PAGES = ResourceName("hugepages-2Mi")


def with_resources(pod: PodRequest, resources: PodLevelResources) -> PodRequest:
    return msgspec.structs.replace(pod, resources=resources)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("policy", list(Policy))
def test_such_a_pod_gets_its_devices_and_no_cpus_or_memory(policy: Policy, scope: Scope, mode: Mode) -> None:
    """Also in a Guaranteed pod whose container alone would get exclusive CPUs and memory."""
    rules = AdmissionRules(policy=policy, scope=scope, mode=mode)
    asked = pod(container(gpus=2, cpus=4, gib=8))
    alone = admitted(admit(node(machine()), asked, rules))["main"]

    got = admitted(admit(node(machine()), with_resources(asked, PodLevelResources(limits=EIGHT)), rules))["main"]

    assert (alone.devices, "", ()) == (got.devices, got.cpus, got.memory)
    assert alone.cpus and alone.memory
    assert Qos.GUARANTEED is with_resources(asked, PodLevelResources(limits=EIGHT)).qos


def test_cpus_and_memory_refuse_no_such_pod() -> None:
    """A container that asks for more CPUs than the machine has is admitted: it runs in the shared pool."""
    whole = {CPU: 64_000, MEMORY: 512 * GIB}
    asked = with_resources(pod(container(cpus=64, gib=512)), PodLevelResources(limits=whole))

    assert isinstance(admit(node(machine()), asked, AdmissionRules(mode=Mode.KUBELET)), Admission)


def told(decision: Decision) -> object:
    if isinstance(decision, Admission):
        return [(each.owner, each.devices, each.cpus, each.memory, each.affinity) for each in decision.allocations]
    return (decision.reason, decision.code, decision.container, decision.provider)


def devices_alone(pod: PodRequest) -> PodRequest:
    """The reference: the same pod whose containers ask for devices alone."""

    def less(container: ContainerRequest) -> ContainerRequest:
        requests, limits = (
            {name: amount for name, amount in some.items() if not is_native(name)}
            for some in (container.requests, container.limits)
        )
        return msgspec.structs.replace(container, requests=requests, limits=limits)

    return msgspec.structs.replace(
        pod,
        init_containers=tuple(map(less, pod.init_containers)),
        containers=tuple(map(less, pod.containers)),
        resources=PodLevelResources(),
    )


@pytest.mark.parametrize("seed", range(200))
def test_it_is_decided_as_a_pod_that_asks_for_its_devices_alone(seed: int) -> None:
    chance = Random(seed)
    rules = AdmissionRules(
        mode=Mode.KUBELET, policy=chance.choice(list(Policy)), scope=chance.choice(list(Scope)), reserved_cpus="0"
    )
    state = node(machine())
    for number in range(4):
        app, early = (
            [
                container(f"{group}{i}", gpus=chance.randrange(3), cpus=chance.randrange(4), gib=chance.randrange(3))
                for i in range(chance.randrange(least, 3))
            ]
            for group, least in (("app", 1), ("init", 0))
        )
        asked = pod(*app, init=early, name=f"pod-{number}")
        whole = {CPU: 12_000, MEMORY: 8 * GIB}
        asked = with_resources(asked, PodLevelResources(limits=whole) if chance.random() < 0.8 else PodLevelResources())
        decision = admit(state, asked, rules)
        if asked.has_pod_level_resources:
            assert told(admit(state, devices_alone(asked), rules)) == told(decision)
        if isinstance(decision, Admission):
            state = granted(state, decision)


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        (PodLevelResources(limits=EIGHT), Qos.GUARANTEED),
        (PodLevelResources(limits=EIGHT, requests=EIGHT), Qos.GUARANTEED),
        (PodLevelResources(limits=EIGHT, requests={**EIGHT, CPU: 7_000}), Qos.BURSTABLE),
        (PodLevelResources(limits={CPU: 8_000}), Qos.BURSTABLE),
        (PodLevelResources(requests={MEMORY: GIB}), Qos.BURSTABLE),
        (PodLevelResources(limits={PAGES: 2 << 20}), Qos.BEST_EFFORT),
        (PodLevelResources(limits={CPU: 0, MEMORY: 0}), Qos.BEST_EFFORT),
    ],
)
def test_the_qos_class_follows_from_them(resources: PodLevelResources, qos: Qos) -> None:
    """Its containers do not count: neither one without CPUs, nor one of a Guaranteed pod."""
    for asked in (pod(container(gpus=1)), pod(container(gpus=1, others={PAGES: 2 << 20}))):
        assert qos is validate_pod(with_resources(asked, resources)).qos


def test_a_request_that_is_left_out_is_that_of_the_containers_or_the_limit() -> None:
    """With a container that requests 3 CPUs, and none that requests memory, limits of 8 CPUs and 16 GiB."""
    asked = pod(ContainerRequest(name=container().name, requests={CPU: 3_000}))
    filled = validate_pod(with_resources(asked, PodLevelResources(limits=EIGHT)))

    assert {CPU: 3_000, MEMORY: 16 * GIB} == filled.resources.requests
    assert Qos.BURSTABLE is filled.qos
    assert {CPU: 4_000} == validate_pod(
        with_resources(asked, PodLevelResources(requests={CPU: 4_000}))
    ).resources.requests


@pytest.mark.parametrize(
    ("resources", "field", "finding"),
    [
        (PodLevelResources(limits={GPU: 1}), "pod.resources.limits[nvidia.com/gpu]", "only cpu, memory"),
        (
            PodLevelResources(requests={CPU: 4_000}, limits={CPU: 3_000}),
            "pod.resources.requests[cpu]",
            "above the limit 3000",
        ),
        (PodLevelResources(limits={CPU: -1}), "pod.resources.limits[cpu]", "-1 is outside 0 to 2^63-1"),
        (PodLevelResources(requests={PAGES: 2 << 20}), "pod.resources.requests[hugepages-2Mi]", "has no limit"),
        (
            PodLevelResources(requests={CPU: 1_000}),
            "pod.resources.requests[cpu]",
            "less than the 2000 that the containers",
        ),
        (
            PodLevelResources(requests={MEMORY: 2 * GIB}, limits={MEMORY: GIB}),
            "pod.resources.requests[memory]",
            "above",
        ),
        (PodLevelResources(limits={MEMORY: GIB - 1}), "pod.resources.limits[memory]", "that the containers request"),
    ],
)
def test_resources_that_no_api_server_takes_are_refused_by_name(
    resources: PodLevelResources, field: str, finding: str
) -> None:
    asked = with_resources(pod(container(cpus=2, gib=1)), resources)
    with pytest.raises(InvalidField) as caught:
        validate_pod(asked)

    assert field == caught.value.field
    assert finding in caught.value.finding
    assert caught.value.remedy


def test_a_containers_limit_is_at_most_that_of_its_pod() -> None:
    above = ContainerRequest(name=container().name, requests={CPU: 1_000}, limits={CPU: 9_000})
    with pytest.raises(
        InvalidField, match=r"pod.containers\[0\].limits\[cpu\]: 9000 is above the limit 8000 of the pod"
    ):
        validate_pod(with_resources(pod(above), PodLevelResources(limits=EIGHT)))


def test_nodes_are_not_scored_by_cpus_that_nobody_aligns() -> None:
    asked = pod(container(gpus=2, cpus=4, gib=8))
    needs = [
        numa_need(read_pod(each, AdmissionRules()))
        for each in (asked, with_resources(asked, PodLevelResources(limits=EIGHT)))
    ]

    assert [True, False] == [need.guaranteed for need in needs]
