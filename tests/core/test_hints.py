"""Each provider's hints against a walk over every subset of NUMA nodes, as the rules are told."""

from collections.abc import Callable
from itertools import combinations

import msgspec
import pytest
from decision_support import GIB, asking, container, machine, node, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.hints.cpu import cpu_hints
from topoalign.core.hints.device_hints import device_hints
from topoalign.core.hints.memory_hints import MemoryNode, memory_hints
from topoalign.core.hints.providers import PROVIDERS, answer_hint_request, request_of_question, to_hint_question
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation, MemoryUse, Owner
from topoalign.core.model.hints import HintRule, Hints, TopologyHint
from topoalign.core.model.ids import (
    CPU,
    GPU,
    MEMORY,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.device_sets import OfferedDevices
from topoalign.core.numa_sets.subsets import TooManyNumaNodes, hints_of_rule, subsets
from topoalign.core.state.fold import NodeState

PAGES = ResourceName("hugepages-2Mi")
MODES = st.sampled_from(Mode)
MORE = st.sampled_from([(), tuple(range(10, 17))])
"""NUMA nodes with nothing of interest; with them the machine has so many that hints come as a rule."""


def said(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> dict[str, dict[ResourceName, Hints]]:
    """What each provider says."""
    return answer_hint_request(asking(state, pod, container, rules)).providers


def in_full(hints: Hints) -> list[TopologyHint]:
    return list(hints_of_rule(hints) if isinstance(hints, HintRule) else hints or ())


def expected_hints(
    nodes: tuple[int, ...], could: Callable[[set[int]], bool], fits: Callable[[set[int]], bool], mode: Mode
) -> list[TopologyHint]:
    """Every subset by size and position; preferred where nothing smaller could (or, in mode best, does) fit."""
    sets = [set(chosen) for size in range(1, len(nodes) + 1) for chosen in combinations(nodes, size)]
    judged = [each for each in sets if (could if mode is Mode.KUBELET else fits)(each)]
    least = min((len(each) for each in judged), default=len(nodes))
    return [TopologyHint(node_mask(each), len(each) == least) for each in sets if fits(each)]


@st.composite
def devices_at_nodes(draw: st.DrawFn) -> dict[DeviceID, tuple[int, ...] | None]:
    nodes = st.sampled_from([None, (), (0,), (0,), (3,), (3,), (70,), (0, 3), (5,), (-1,)])
    return {DeviceID(f"d{i}"): draw(nodes) for i in range(draw(st.integers(1, 7)))}


@given(devices_at_nodes(), st.data(), MODES, MORE)
def test_device_hints_are_the_subsets_with_enough_devices(
    devices: dict[DeviceID, tuple[int, ...] | None], data: st.DataObject, mode: Mode, more: tuple[int, ...]
) -> None:
    """No opinion where no device has a topology; in mode best only if there are enough of them."""
    machine_nodes = (0, 3, *more, 70)
    available = data.draw(st.lists(st.sampled_from(sorted(devices)), unique=True))
    reusable = (
        data.draw(st.lists(st.sampled_from(sorted({*devices} - {*available})), unique=True))
        if len(available) < len(devices)
        else []
    )
    requested = data.draw(st.integers(0, 5))
    bearing = tuple(n for n in machine_nodes if any(n in (near or ()) for near in devices.values())) or machine_nodes

    def at(wanted: list[DeviceID], inside: set[int]) -> int:
        return sum(1 for device in wanted if set(devices[device] or ()) & inside)

    def fits(inside: set[int]) -> bool:
        must = [device for device in reusable if devices[device] is not None]
        return at(must, inside) == len(must) and at(available, inside) + at(reusable, inside) >= requested

    got = device_hints(OfferedDevices(devices), available, reusable, requested, machine_nodes, mode)

    few = len(available) + len(reusable) < requested
    if not any(devices.values()) and not (few and mode is Mode.BEST):
        assert got is None
    elif few:
        assert () == got
    else:
        expected = expected_hints(bearing, lambda inside: at(list(devices), inside) >= requested, fits, mode)
        assert expected == in_full(got)
        assert bool(more and expected) == isinstance(got, HintRule)


@given(st.data(), MODES, MORE)
def test_cpu_hints_are_the_subsets_with_enough_cpus_and_all_reusable_ones(
    data: st.DataObject, mode: Mode, more: tuple[int, ...]
) -> None:
    cpus = machine(nodes=3, cores=2).cpu_topology
    some = st.sets(st.sampled_from(sorted(cpus.node_of)))
    available = data.draw(some)
    reusable = data.draw(some) - available
    requested = data.draw(st.integers(1, 12))

    def at(wanted: set[int], inside: set[int]) -> int:
        return sum(1 for cpu in wanted if cpus.node_of[cpu] in inside)

    def fits(inside: set[int]) -> bool:
        return at(reusable, inside) == len(reusable) and at(available | reusable, inside) >= requested

    expected = expected_hints((0, 1, 2), lambda inside: at({*cpus.node_of}, inside) >= requested, fits, mode)

    assert expected == in_full(cpu_hints(cpus, available, reusable, requested, mode, machine=3 + len(more)))


@given(st.data(), MODES, MORE)
def test_memory_hints_are_sufficient_subsets_of_no_other_group(
    data: st.DataObject, mode: Mode, more: tuple[int, ...]
) -> None:
    """Memory hints are the sets of NUMA nodes that have enough memory and share no node with another group."""
    ids = (0, 2, 5)
    amount = st.integers(0, 4)
    groups = st.sampled_from([None, None, (0, 2), (0, 2, 5)])
    nodes = {}
    for each in ids:
        allocatable = {MEMORY: data.draw(amount), PAGES: data.draw(amount)}
        free = {name: data.draw(st.integers(0, most)) for name, most in allocatable.items()}
        group = data.draw(groups) or (each,)
        nodes[each] = MemoryNode(allocatable, free, node_mask(group), data.draw(st.booleans()))
    request = {MEMORY: data.draw(st.integers(1, 6)), PAGES: data.draw(st.integers(0, 3))}
    reusable = {(node_mask((0, 2)), MEMORY): data.draw(amount), (node_mask((5,)), PAGES): data.draw(amount)}

    def total(kind: str, name: ResourceName, inside: set[int]) -> int:
        return sum(getattr(nodes[each], kind)[name] for each in inside)

    def could(inside: set[int]) -> bool:
        return all(total("allocatable", name, inside) >= size for name, size in request.items())

    def fits(inside: set[int]) -> bool:
        mask = node_mask(inside)
        if len(inside) == 1 and any(nodes[each].group.bit_count() > 1 for each in inside):
            return False
        if len(inside) > 1 and any(nodes[each].used and nodes[each].group != mask for each in inside):
            return False
        return could(inside) and all(
            total("free", name, inside) + reusable.get((mask, name), 0) >= size for name, size in request.items()
        )

    not_offered = {each: MemoryNode({}, {}, 1 << each, False) for each in more}

    got = memory_hints({**nodes, **not_offered}, ids, request, reusable, mode)

    assert expected_hints(ids, could, fits, mode) == in_full(got)


def test_preferred_is_measured_on_an_empty_machine_or_on_the_machine_now() -> None:
    """
    A preferred hint is as narrow as an empty machine allows in mode `kubelet`, and as narrow as possible now in `best`.
    One GPU is free on each node: two GPUs need both nodes; on an empty machine one node would be enough.
    """
    devices = {DeviceID("a"): (0,), DeviceID("b"): (0,), DeviceID("c"): (1,), DeviceID("d"): (1,)}
    free = [DeviceID("a"), DeviceID("c")]

    assert (TopologyHint(0b11, False),) == device_hints(OfferedDevices(devices), free, [], 2, (0, 1), Mode.KUBELET)
    assert (TopologyHint(0b11, True),) == device_hints(OfferedDevices(devices), free, [], 2, (0, 1), Mode.BEST)


def test_nodes_without_cpus_are_offered_by_the_kubelet_alone() -> None:
    """A GPU's own memory as a NUMA node is not memory for a container, except to the kubelet's memory manager."""
    state = node(machine(nodes=1, bare_nodes=1, memory=8 * GIB))
    one = pod(container(cpus=1, gib=4))

    best = said(state, one, ContainerName("main"), AdmissionRules(mode=Mode.BEST))
    kubelet = said(state, one, ContainerName("main"), AdmissionRules(mode=Mode.KUBELET))

    assert {CPU: (TopologyHint(0b01, True),)} == best["cpu"] == kubelet["cpu"]
    assert {MEMORY: (TopologyHint(0b01, True),)} == best["memory"]
    assert {MEMORY: (TopologyHint(0b01, True), TopologyHint(0b11, False))} == kubelet["memory"]


def test_memory_that_fits_nowhere_is_no_opinion_or_cannot_be_met() -> None:
    """Memory that fits nowhere is no opinion in mode `kubelet`, and a request that cannot be met in mode `best`."""
    state, big = node(machine()), pod(container(cpus=1, gib=1000))

    assert {} == said(state, big, None, AdmissionRules(mode=Mode.KUBELET))["memory"]
    assert {MEMORY: ()} == said(state, big, None, AdmissionRules(mode=Mode.BEST))["memory"]


def test_an_answer_from_the_question_alone_is_the_answer_from_the_state() -> None:
    """Nothing but the topology is known to a hinting service, and it says the same."""
    state = node(machine(), unhealthy=["GPU-1"])
    asked = pod(container(gpus=2, cpus=2, gib=1))
    rules = AdmissionRules(policy=Policy.RESTRICTED)
    assert state.topology is not None

    here = asking(state, asked, ContainerName("main"), rules)

    given_answer = answer_hint_request(request_of_question(to_hint_question(here, asked), state.topology))

    assert answer_hint_request(here) == given_answer
    assert list(PROVIDERS) == list(given_answer.providers)
    assert (TopologyHint(0b10, True), TopologyHint(0b11, False)) == given_answer.providers["device"][GPU]


def test_a_container_that_has_its_cpus_is_told_where_they_are() -> None:
    """It is asked about again after a restart: its two CPUs are on node 1, and those of the other container on node 0."""
    state = node(machine(cores=4, threads=1))
    main, other = (
        Owner(namespace=Namespace("default"), pod=PodName("pod-1"), container=ContainerName(name))
        for name in ("main", "other")
    )
    for owner, cpus in ((other, "0-1"), (main, "4-5")):
        state = state.holding(Allocation(id=AllocationID(owner.container), owner=owner, cpus=cpus))

    hints = said(state, pod(container(cpus=2)), ContainerName("main"), AdmissionRules())
    of_another_number = said(state, pod(container(cpus=1)), ContainerName("main"), AdmissionRules())

    assert [0b10, 0b11] == [hint.affinity for hint in in_full(hints["cpu"][CPU])]
    assert {CPU: ()} == of_another_number["cpu"], "kubelet v1.36.3: it cannot be aligned"


def test_what_init_containers_left_moves_no_container_that_has_cpus() -> None:
    """Kubelet v1.36.3: its hints are those of its own CPUs. An init container left two more on node 0."""
    state = node(machine(cores=4, threads=1))
    init, main = (
        Allocation(
            id=AllocationID(name),
            owner=Owner(namespace=Namespace("default"), pod=PodName("pod-1"), container=ContainerName(name)),
            role="init" if name == "init" else "app",
            cpus=cpus,
        )
        for name, cpus in (("init", "0-1"), ("main", "4-5"))
    )
    asked = pod(container(cpus=2), init=(container("init", cpus=2),))

    hints = said(state.holding(init).holding(main), asked, ContainerName("main"), AdmissionRules())
    anew = said(state.holding(init), asked, ContainerName("main"), AdmissionRules())

    assert [0b10, 0b11] == [hint.affinity for hint in in_full(hints["cpu"][CPU])]
    assert [0b01, 0b11] == [hint.affinity for hint in in_full(anew["cpu"][CPU])]


def test_a_question_about_a_container_that_is_not_in_the_pod_is_refused() -> None:
    with pytest.raises(InvalidField, match="no container"):
        said(node(machine()), pod(container()), ContainerName("other"), AdmissionRules())


def test_a_question_with_malformed_sets_is_refused_by_name() -> None:
    """A question comes from the network: it gets an answer or an error that says what is wrong, never a traceback."""
    state = node(machine())
    assert state.topology is not None
    asked = pod(container(cpus=1, gib=1))
    odd = msgspec.structs.replace(state, memory={0: MemoryUse(cells=(-1,))})
    sound = to_hint_question(asking(state, asked, None, AdmissionRules()), asked)
    odd_rules = msgspec.structs.replace(sound, rules=AdmissionRules(reserved_cpus="?"))
    odd_use = to_hint_question(asking(odd, asked, None, AdmissionRules()), asked)

    with pytest.raises(InvalidField, match="reserved_cpus"):
        request_of_question(odd_rules, state.topology)
    with pytest.raises(InvalidField, match="question"):
        answer_hint_request(request_of_question(odd_use, state.topology))


def test_subsets_of_more_than_twelve_nodes_are_never_listed() -> None:
    """They are 2^n. A rule says the same in a line."""
    with pytest.raises(TooManyNumaNodes):
        subsets(tuple(range(13)))
    assert 4095 == len(subsets(tuple(range(12))).order)

    state = node(machine(nodes=64, gpus=range(64)))
    hints = said(state, pod(container(gpus=2, cpus=12, gib=96)), ContainerName("main"), AdmissionRules())

    rules = {name: each for answer in hints.values() for name, each in answer.items() if isinstance(each, HintRule)}
    assert {GPU: 2, CPU: 2, MEMORY: 2} == {name: rule.least for name, rule in rules.items()}


def test_memory_in_use_counts_against_a_node() -> None:
    state = node(machine(memory=8 * GIB))
    used = {0: MemoryUse(reserved={MEMORY: 6 * GIB}, cells=(0,), assignments=1)}
    busy = msgspec.structs.replace(state, memory=used)

    hints = said(busy, pod(container(gib=4)), ContainerName("main"), AdmissionRules())

    assert {MEMORY: (TopologyHint(0b10, True),)} == hints["memory"]


def test_what_is_near_no_node_is_supply_of_no_rule() -> None:
    """Neither for a request of nothing where every node is in use, nor for devices near nodes that the machine lacks."""
    nodes = {i: MemoryNode(allocatable={MEMORY: GIB}, free={MEMORY: 0}, group=1 << i, used=True) for i in range(10)}
    devices = {DeviceID("a"): (0,), DeviceID("b"): (77,), DeviceID("c"): (), DeviceID("d"): (-1, 1, 77)}

    memory = memory_hints(nodes, tuple(nodes), {MEMORY: 0}, {}, Mode.KUBELET)
    near = device_hints(OfferedDevices(devices), list(devices), [], 2, tuple(range(10)), Mode.BEST)

    assert isinstance(memory, HintRule) and isinstance(near, HintRule)
    assert (0, tuple(1 << i for i in range(10))) == (memory.nodes, memory.besides)
    assert [{}] == [need.supply for need in memory.needs]
    assert [{0b01: 1, 0b10: 1}] == [need.supply for need in near.needs]


def test_memory_is_not_offered_with_a_group_that_reaches_beyond() -> None:
    """Two nodes are in use as one group, and only one of them may be offered: neither it alone nor the group is."""
    grouped = MemoryNode({MEMORY: 8}, {MEMORY: 8}, 0b11, True)

    assert () == memory_hints({0: grouped, 1: grouped}, (0,), {MEMORY: 1}, {}, Mode.BEST)
    assert memory_hints({0: grouped, 1: grouped}, (0, 1), {MEMORY: 1}, {}, Mode.BEST)
