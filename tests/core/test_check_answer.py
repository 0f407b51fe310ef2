"""What another process says of hints is used only if the providers here could have said it."""

from collections.abc import Mapping

import msgspec
import pytest
from decision_support import GIB, NODE, asking, container, machine, node, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import answer_to, iterate_decision_for_request
from topoalign.core.hints.answer_checks import MOST_HINTS, check_answer
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.providers import answer_hint_request
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation, AllocationGranted, MemoryBlock, MemoryUse, Owner
from topoalign.core.model.hints import HintAnswer, HintRule, Hints, ResourceNeed, TopologyHint
from topoalign.core.model.ids import CPU, GPU, MEMORY, AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy, Scope
from topoalign.core.model.topology.model import PluginDevice
from topoalign.core.state.fold import NodeState

MAIN = ContainerName("main")
FPGA = ResourceName("example.com/fpga")
WIDE = 64
ALL = (1 << WIDE) - 1
ASKED = pod(container(gpus=2, cpus=4, gib=1))


def asked_and_answered(state: NodeState, rules: AdmissionRules) -> tuple[HintRequest, HintAnswer]:
    asked = asking(state, ASKED, MAIN, rules)
    return asked, answer_hint_request(asked)


def with_hints(answered: HintAnswer, provider: str, resources: Mapping[ResourceName, Hints]) -> HintAnswer:
    return HintAnswer(providers={**answered.providers, provider: dict(resources)})


@st.composite
def odd_devices(draw: st.DrawFn) -> tuple[PluginDevice, ...]:
    """Near nodes that the machine lacks, near none, near several, or without topology."""
    near = st.sampled_from([None, (), (0,), (1,), (0, 1), (-1,), (77,), (1, 77)])
    return tuple(
        PluginDevice(id=DeviceID(f"f{i}"), resource=FPGA, nodes=draw(near)) for i in range(draw(st.integers(0, 5)))
    )


@given(
    st.sampled_from([2, 10]),
    odd_devices(),
    st.lists(st.sampled_from(["free", "used", "grouped"]), min_size=2, max_size=2),
    st.integers(0, 3),
    st.integers(0, 40),
    st.builds(
        AdmissionRules,
        mode=st.sampled_from(Mode),
        scope=st.sampled_from(Scope),
        policy=st.just(Policy.BEST_EFFORT),
        memory_manager=st.sampled_from(["None", "Static"]),
        max_allowable_numa_nodes=st.just(16),
    ),
)
def test_what_the_providers_here_say_is_never_refused(
    nodes: int, others: tuple[PluginDevice, ...], uses: list[str], fpgas: int, gib: int, rules: AdmissionRules
) -> None:
    """For each question of a pod whose init containers leave devices, CPUs and memory to the others."""
    has = machine(nodes=nodes, cores=2, gpus=[i % nodes for i in range(2 * nodes)], memory=16 * GIB, others=others)
    memory = {
        i: MemoryUse(reserved={MEMORY: GIB}, cells=(i,) if use == "used" else (0, 1), assignments=1)
        for i, use in enumerate(uses * (nodes // 2))
        if use == "used" or (use == "grouped" and i < 2)
    }
    state = msgspec.structs.replace(node(has), memory=memory)
    each = {str(FPGA): fpgas}
    init = [container(f"init-{i}", gpus=1, cpus=2, gib=gib, others=each, sidecar=i == 1) for i in range(3)]
    steps = iterate_decision_for_request(state, pod(container(gpus=1, cpus=2, gib=gib, others=each), init=init), rules)
    asked = 0
    try:
        wanted = next(steps)
        while True:
            reply = answer_to(wanted, state, rules)
            if isinstance(wanted, HintRequest) and isinstance(reply, HintAnswer):
                check_answer(wanted, reply)
                asked += 1
            wanted = steps.send(reply)
    except StopIteration:
        assert asked or (rules.mode is Mode.BEST and not others and fpgas), "only an unknown resource needs no hints"


def test_a_rule_that_offers_only_groups_in_use_is_one_that_can_be_meant() -> None:
    """No node is free, so the rule has no nodes of its own: the memory of an init container is all there is."""
    used = {i: MemoryUse(reserved={MEMORY: GIB}, cells=(i,), assignments=1) for i in range(WIDE)}
    state = msgspec.structs.replace(wide(), memory=used)
    asked, answered = asked_and_answered(state, AdmissionRules())

    rule = answered.providers["memory"][MEMORY]
    assert isinstance(rule, HintRule)
    assert 0 == rule.nodes
    check_answer(asked, answered)


def wide() -> NodeState:
    return node(machine(nodes=WIDE, cores=2, gpus=range(WIDE)))


SPREAD = {1 << i: 1 for i in range(WIDE)}
SOUND = HintRule(nodes=ALL, needs=(ResourceNeed(2, SPREAD),), least=2)


def changed(**fields: object) -> HintRule:
    return msgspec.structs.replace(SOUND, **fields)


def test_a_sound_rule_is_taken() -> None:
    state = wide()
    asked, answered = asked_and_answered(state, AdmissionRules())

    check_answer(asked, with_hints(answered, "device", {GPU: SOUND}))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("rule", "finding"),
    [
        pytest.param(changed(needs=(ResourceNeed(2, SPREAD),) * 300), "larger than any", id="300 needs"),
        pytest.param(
            changed(needs=(ResourceNeed(2, SPREAD),) * 3), "larger than any", id="needs of a pod that left something"
        ),
        pytest.param(
            changed(needs=(ResourceNeed(2, {3 << i: 1 for i in range(WIDE - 1)} | SPREAD),)),
            "larger than any",
            id="supply",
        ),
        pytest.param(changed(besides=(1, 2)), "larger than any", id="devices are offered nowhere besides"),
        pytest.param(changed(nodes=ALL | 1 << 70), "do not exist", id="a node that is none"),
        pytest.param(changed(nodes=-1), "do not exist", id="all nodes there could be"),
        pytest.param(changed(needs=(ResourceNeed(2, {0: 5, 1: 3}),)), "near none", id="supply near no node"),
        pytest.param(changed(needs=(ResourceNeed(2, {-1: 5}),)), "near none", id="supply of a negative mask"),
        pytest.param(
            changed(needs=(ResourceNeed(2, {1 << 70: 5, 1: 3}),)), "near none", id="supply near a node that is none"
        ),
        pytest.param(
            changed(nodes=0b11, needs=(ResourceNeed(2, {0b100: 5, 1: 3}),)), "near none", id="supply near another"
        ),
        pytest.param(changed(needs=(ResourceNeed(-1, SPREAD),)), "below 0", id="an amount below 0"),
        pytest.param(changed(needs=(ResourceNeed(1, {1: 3, 2: -1}),)), "below 0", id="a supply below 0"),
        pytest.param(changed(needs=(ResourceNeed(0, SPREAD),)), "needs nothing", id="nothing is needed"),
        pytest.param(changed(needs=()), "needs nothing", id="no needs"),
        pytest.param(changed(least=0), "prefers 0", id="least 0"),
        pytest.param(changed(least=WIDE + 1), "prefers 65", id="least beyond the machine"),
        pytest.param(changed(needs=(ResourceNeed(3, {1: 1}),)), "do not meet", id="needs that are not met"),
        pytest.param(None, "no opinion", id="no opinion"),
        pytest.param((TopologyHint(1, True),) * (MOST_HINTS + 1), "are listed", id="a long list"),
        pytest.param((TopologyHint(None, True),), "names no NUMA nodes", id="a hint for any node"),
        pytest.param((TopologyHint(0, True),), "do not exist", id="a hint for no node"),
        pytest.param((TopologyHint(1 << 70, True),), "do not exist", id="a hint for a node that is none"),
    ],
)
def test_what_no_provider_here_would_say_is_refused_by_name(mode: Mode, rule: Hints, finding: str) -> None:
    state = wide()
    asked, answered = asked_and_answered(state, AdmissionRules(mode=mode, max_allowable_numa_nodes=WIDE))

    with pytest.raises(InvalidField, match=finding) as caught:
        check_answer(asked, with_hints(answered, "device", {GPU: rule}))

    assert "providers.device[nvidia.com/gpu]" == caught.value.field


@pytest.mark.parametrize(
    ("rule", "finding"),
    [
        (changed(besides=tuple(range(1, 2 * WIDE + 2))), "larger than any"),
        (changed(besides=(2, 1)), "do not ascend"),
        (changed(besides=(1, 1)), "do not ascend"),
        (changed(besides=(0, 1)), "do not exist"),
        (changed(besides=(1, 1 << 70)), "do not exist"),
        (changed(needs=(ResourceNeed(2, SPREAD),) * 3), "larger than any"),
    ],
)
def test_groups_of_memory_that_cannot_be_are_refused(rule: HintRule, finding: str) -> None:
    state = wide()
    asked, answered = asked_and_answered(state, AdmissionRules())

    with pytest.raises(InvalidField, match=finding):
        check_answer(asked, with_hints(answered, "memory", {MEMORY: rule}))


def test_a_rule_where_hints_would_be_listed_is_refused() -> None:
    state = node(machine())
    asked, answered = asked_and_answered(state, AdmissionRules())
    rule = HintRule(nodes=0b11, needs=(ResourceNeed(2, {1: 2, 2: 2}),), least=1)

    with pytest.raises(InvalidField, match="are listed"):
        check_answer(asked, with_hints(answered, "device", {GPU: rule}))


ANYWHERE = (TopologyHint(0b01, True),)


@pytest.mark.parametrize(
    ("provider", "mode", "resources"),
    [
        ("memory", Mode.BEST, {}),
        ("memory", Mode.BEST, {CPU: ANYWHERE}),
        ("memory", Mode.BEST, {MEMORY: ANYWHERE, ResourceName("hugepages-2Mi"): ANYWHERE}),
        ("memory", Mode.KUBELET, {CPU: ANYWHERE}),
        ("cpu", Mode.BEST, {}),
        ("cpu", Mode.BEST, {CPU: None}),
        ("memory", Mode.BEST, {MEMORY: None}),
        ("device", Mode.BEST, {}),
        ("device", Mode.KUBELET, {GPU: ANYWHERE, FPGA: ANYWHERE}),
    ],
)
def test_a_provider_that_leaves_out_a_resource_or_adds_one_is_refused(
    provider: str, mode: Mode, resources: dict[ResourceName, Hints]
) -> None:
    """
    The answer of a provider that leaves out a requested resource, or adds another, is refused. What is left out reads
    as no opinion, and the pod would be admitted unaligned.
    """
    state = node(machine())
    asked, answered = asked_and_answered(state, AdmissionRules(mode=mode))
    check_answer(asked, answered)

    with pytest.raises(InvalidField, match=r"asked for|no opinion"):
        check_answer(asked, with_hints(answered, provider, resources))


def test_memory_may_be_left_out_in_kubelet_mode_and_when_held() -> None:
    """
    Memory may be left out in mode `kubelet`, and for a container that holds some. To the kubelet what fits nowhere is
    no opinion; so is in every mode a request that differs from what is held.
    """
    asked, answered = asked_and_answered(node(machine()), AdmissionRules(mode=Mode.KUBELET))
    check_answer(asked, with_hints(answered, "memory", {}))

    block = MemoryBlock(resource=MEMORY, nodes=(0,), size=2 * GIB, taken=(2 * GIB,))
    held = Allocation(
        id=AllocationID("1"), owner=Owner(namespace=ASKED.namespace, pod=ASKED.name, container=MAIN), memory=(block,)
    )
    state = node(machine())
    state = state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=held))
    asked, answered = asked_and_answered(state, AdmissionRules())

    assert {} == answered.providers["memory"]
    check_answer(asked, answered)


def test_no_opinion_on_devices_of_which_no_node_is_known_is_one() -> None:
    state = node(machine(gpus=(None, None)))
    asked, answered = asked_and_answered(state, AdmissionRules())

    assert {GPU: None} == answered.providers["device"]
    check_answer(asked, answered)
