"""The whole decision, on machines made by hand."""

from collections.abc import Mapping
from itertools import combinations

import msgspec
import pytest
from decision_support import (
    GIB,
    NODE,
    admitted,
    container,
    granted,
    knapsack_machine,
    machine,
    node,
    pod,
    refused,
)
from hypothesis import given
from hypothesis import strategies as st
from merge_reference import knapsack

from topoalign.core.admission.admit import admit, answer_to, iterate_decision_for_request
from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.decisions import Admission, PreferenceQuestion, Refusal
from topoalign.core.model.errors import DriverFault, InvalidField
from topoalign.core.model.hints import HintAnswer
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, CpuOption, Mode, PodRequest, Policy, Scope
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import PluginDevice, Topology
from topoalign.core.state.fold import NodeState

BEST = AdmissionRules()
RESTRICTED = AdmissionRules(policy=Policy.RESTRICTED)
SINGLE = AdmissionRules(policy=Policy.SINGLE_NUMA_NODE)
PER_POD = AdmissionRules(policy=Policy.RESTRICTED, scope=Scope.POD)
UNALIGNED = AdmissionRules(policy=Policy.NONE)
KUBELET = AdmissionRules(mode=Mode.KUBELET)


def with_ids(topology: Topology, ids: Mapping[int, int]) -> Topology:
    """The same machine, its NUMA nodes named otherwise."""
    return msgspec.structs.replace(
        topology,
        cpus=tuple(msgspec.structs.replace(cpu, node=ids[cpu.node]) for cpu in topology.cpus),
        nodes=tuple(msgspec.structs.replace(each, id=ids[each.id]) for each in topology.nodes),
        gpus=tuple(
            msgspec.structs.replace(g, numa_affinity=tuple(ids[n] for n in g.numa_affinity)) for g in topology.gpus
        ),
        nics=tuple(
            msgspec.structs.replace(n, numa_affinity=tuple(ids[i] for i in n.numa_affinity)) for n in topology.nics
        ),
    )


def test_everything_of_a_container_comes_from_one_numa_node() -> None:
    """GPU-0 is in use elsewhere, so two GPUs, and with them CPUs, memory and the NIC, come from node 1."""
    state = node(machine())
    state = granted(state, admit(state, pod(container(gpus=1), name="other"), BEST))

    got = admitted(admit(state, pod(container(gpus=2, cpus=4, gib=8, nics=1)), SINGLE))["main"]

    assert {GPU: ("GPU-2", "GPU-3"), NIC: ("mlx5_1",)} == got.devices
    assert "4-5,12-13" == got.cpus
    assert [(MEMORY, (1,), 8 * GIB, (8 * GIB,))] == [(b.resource, b.nodes, b.size, b.taken) for b in got.memory]
    assert (1,) == got.affinity


def test_pods_one_after_the_other_never_share_a_device_or_a_cpu() -> None:
    state = node(machine())
    seen: set[str] = set()
    for i in range(4):
        decision = admit(state, pod(container(gpus=1, cpus=4, gib=1), name=f"pod-{i}"), BEST)
        got = admitted(decision)["main"]
        mine = {*got.devices[GPU], *map(str, parse_cpuset(got.cpus))}
        assert not mine & seen
        seen |= mine
        state = granted(state, decision)

    last = refused(admit(state, pod(container(gpus=1), name="last"), BEST))

    assert ("UnexpectedAdmissionError", "NotEnoughDevices", "device") == (last.reason, last.code, last.provider)


def test_a_container_sees_what_earlier_ones_of_its_pod_got() -> None:
    two = pod(container("a", gpus=2, cpus=2), container("b", gpus=2, cpus=2))

    got = admitted(admit(node(machine()), two, SINGLE))

    assert [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")] == [got["a"].devices[GPU], got["b"].devices[GPU]]
    assert [(0,), (1,)] == [got["a"].affinity, got["b"].affinity]


def test_devices_of_init_containers_are_reused_those_of_sidecars_are_not() -> None:
    """A later container reuses the devices that an init container held, and gets none that a sidecar holds."""
    staged = pod(
        container("app", gpus=2, cpus=4, gib=6),
        init=[container("load", gpus=2, cpus=4, gib=4), container("proxy", gpus=1, cpus=2, gib=1, sidecar=True)],
    )

    got = admitted(admit(node(machine()), staged, BEST))

    assert ["init", "sidecar", "app"] == [got[name].role for name in ("load", "proxy", "app")]
    assert set(got["proxy"].devices[GPU]) < set(got["load"].devices[GPU]), (
        "the sidecar takes over from the init container"
    )
    assert not set(got["app"].devices[GPU]) & set(got["proxy"].devices[GPU])
    assert set(got["app"].devices[GPU]) & set(got["load"].devices[GPU])
    assert not parse_cpuset(got["app"].cpus) & parse_cpuset(got["proxy"].cpus)


def test_reused_memory_is_accounted_for_once_and_folds_to_the_same_state() -> None:
    """The app container takes over 4 GiB of the init container and 2 GiB anew; released, nothing is left."""
    state = node(machine(memory=8 * GIB))
    staged = pod(container("app", cpus=2, gib=6), init=[container("load", cpus=2, gib=4)])

    decision = admit(state, staged, SINGLE)
    got = admitted(decision)
    after = granted(state, decision)

    assert [0, 6 * GIB] == [got[name].memory[0].size for name in ("load", "app")]
    assert [(0,), (6 * GIB,)] == [got[name].memory[0].taken for name in ("load", "app")]
    assert 6 * GIB == after.memory[0].reserved[MEMORY]
    for name in list(after.allocations):
        after = after.without(name)
    assert {} == after.memory


def test_in_scope_pod_one_alignment_serves_all_containers() -> None:
    """Each container alone fits node 0, both together need 4 GPUs and with them both nodes."""
    two = pod(container("a", gpus=2), container("b", gpus=2))

    decision = admit(node(machine()), two, PER_POD)

    assert isinstance(decision, Admission)
    assert [None] == [alignment.container for alignment in decision.explanation.alignments]
    assert [(0, 1), (0, 1)] == [each.affinity for each in decision.allocations]
    assert 4 == len({gpu for each in decision.allocations for gpu in each.devices[GPU]})


def test_the_policy_decides_about_what_fits_on_no_single_node() -> None:
    wide = pod(container(gpus=3))

    assert (0, 1) == admitted(admit(node(machine()), wide, BEST))["main"].affinity
    assert (0, 1) == admitted(admit(node(machine()), wide, RESTRICTED))["main"].affinity
    refusal = refused(admit(node(machine()), wide, SINGLE))
    assert ("TopologyAffinityError", "NotAligned", None) == (refusal.reason, refusal.code, refusal.provider)
    assert "main" == refusal.container


def test_mode_best_admits_under_restricted_what_fits_as_well_as_it_can_now() -> None:
    """One GPU is free on each node; the kubelet compares with an empty machine and refuses for ever."""
    state = node(machine(gpus=(0, 0, 1, 1)), unhealthy=["GPU-1", "GPU-3"])
    two = pod(container(gpus=2))

    assert ("GPU-0", "GPU-2") == admitted(admit(state, two, RESTRICTED))["main"].devices[GPU]
    kubelet = refused(admit(state, two, msgspec.structs.replace(RESTRICTED, mode=Mode.KUBELET)))
    assert "not preferred" in kubelet.finding


def test_policy_none_asks_nobody_and_gives_what_is_lowest() -> None:
    steps = iterate_decision_for_request(node(machine()), pod(container(gpus=4, cpus=2, gib=1)), UNALIGNED)

    asked = next(steps)

    assert isinstance(asked, PreferenceQuestion)
    assert ("GPU-0", "GPU-1", "GPU-2", "GPU-3") == tuple(asked.available)


def test_nics_are_chosen_near_the_gpus_of_the_container() -> None:
    """Not only by NUMA node: without any alignment the NIC on the GPU's switch is taken before the first one."""
    got = admitted(admit(node(machine(gpus=(1,), nics=(0, 1))), pod(container(gpus=1, nics=1)), UNALIGNED))["main"]

    assert {GPU: ("GPU-0",), NIC: ("mlx5_1",)} == got.devices


def test_the_explanation_names_the_chosen_set_first() -> None:
    """The explanation names the chosen set first and then the best others."""
    decision = admit(node(machine()), pod(container(gpus=2)), BEST, explain=True)

    assert isinstance(decision, Admission)
    first, *others = decision.explanation.considered
    assert (True, ("GPU-0", "GPU-1"), 50) == (first.chosen, first.devices, first.score)
    assert ("GPU-2", "GPU-3") == others[0].devices
    assert all(not each.chosen and each.why for each in others)
    assert [each.score for each in others] == sorted((each.score for each in others), reverse=True)
    assert 6 == len(decision.explanation.considered)


@pytest.mark.parametrize("asked", [container(gpus=2, nics=1), container(gpus=3, cpus=2, gib=1)])
@pytest.mark.parametrize("mode", Mode)
def test_sets_are_compared_only_for_who_asks_and_change_nothing(mode: Mode, asked: ContainerRequest) -> None:
    """Without `explain` the decision is the same but for the sets that were considered."""
    state, rules = node(machine()), AdmissionRules(mode=mode)
    plain, explained = (admit(state, pod(asked), rules, explain=explain) for explain in (False, True))

    assert () == plain.explanation.considered != explained.explanation.considered
    without = msgspec.structs.replace(explained.explanation, considered=())
    assert plain == msgspec.structs.replace(explained, explanation=without)


@pytest.mark.parametrize(
    ("state", "asked", "rules", "code"),
    [
        pytest.param(NodeState(node=NODE), pod(container()), BEST, "TopologyUnknown", id="nothing discovered yet"),
        pytest.param(
            node(machine()), pod(container(others={"a.com/x": 1})), BEST, "UnknownResource", id="unknown resource"
        ),
        pytest.param(
            node(machine()), pod(container(others={"hugepages-1Gi": GIB})), BEST, "UnknownResource", id="unknown pages"
        ),
        pytest.param(node(machine(memory=None)), pod(container(gib=1)), BEST, "MemoryUnknown", id="memory unknown"),
        pytest.param(
            node(machine(memory=None)),
            pod(container(cpus=1, gib=1)),
            KUBELET,
            "MemoryUnknown",
            id="memory unknown to the kubelet's manager",
        ),
        pytest.param(node(machine()), pod(container(gib=999)), UNALIGNED, "NotEnoughMemory", id="too much memory"),
        pytest.param(node(machine()), pod(container(gpus=1, gib=999)), BEST, "NotEnoughMemory", id="beside a GPU"),
        pytest.param(
            node(machine()),
            pod(container(gpus=1, cpus=1, gib=999)),
            KUBELET,
            "MemoryNotExtendable",
            id="around a GPU",
        ),
        pytest.param(node(machine()), pod(container(cpus=99)), BEST, "NotEnoughCpus", id="too many CPUs"),
        pytest.param(node(machine()), pod(container(gpus=9)), BEST, "NotEnoughDevices", id="too many GPUs"),
        pytest.param(
            node(machine(gpus=(0,)), unhealthy=["GPU-0"]), pod(container(gpus=1)), BEST, "NoHealthyDevice", id="all bad"
        ),
        pytest.param(node(machine(nodes=9)), pod(container(gpus=1)), KUBELET, "TooManyNumaNodes", id="9 nodes"),
        pytest.param(
            node(with_ids(machine(), {0: 0, 1: 64})),
            pod(container(gpus=1)),
            KUBELET,
            "TooManyNumaNodes",
            id="a node beyond 63",
        ),
        pytest.param(
            node(machine(bare_nodes=1)),
            pod(container()),
            AdmissionRules(prefer_closest_numa_nodes=True),
            "DistancesUnknown",
            id="no distances",
        ),
    ],
)
def test_every_refusal_says_what_to_do(state: NodeState, asked: PodRequest, rules: AdmissionRules, code: str) -> None:
    refusal = refused(admit(state, asked, rules))

    assert code == refusal.code
    assert "UnexpectedAdmissionError" == refusal.reason
    assert refusal.finding
    assert refusal.remedy


def test_a_pod_that_holds_something_already_is_refused() -> None:
    """A second grant under the same names could not be told from the first."""
    state = node(machine())
    state = granted(state, admit(state, pod(container(gpus=1)), BEST))

    assert "PodHasAllocations" == refused(admit(state, pod(container(gpus=1)), BEST)).code


def test_what_no_plugin_registered_is_ignored_by_the_kubelet() -> None:
    got = admitted(admit(node(machine()), pod(container(gpus=1, others={"a.com/x": 1})), KUBELET))["main"]

    assert {GPU: ("GPU-0",)} == got.devices


def test_asking_for_none_of_an_unknown_resource_is_no_fault() -> None:
    zero = container(gpus=1)
    asked = pod(msgspec.structs.replace(zero, limits={**zero.limits, ResourceName("a.com/x"): 0}))

    assert {GPU: ("GPU-0",)} == admitted(admit(node(machine()), asked, BEST))["main"].devices


@pytest.mark.parametrize("nodes", [13, 34, 64])
@pytest.mark.parametrize("option", [None, CpuOption.ALIGN_BY_SOCKET])
def test_no_number_of_numa_nodes_is_too_many_for_mode_best(nodes: int, option: CpuOption | None) -> None:
    """All of which have CPUs and memory; the kubelet, told to allow so many, decides the same."""
    state = node(machine(nodes=nodes, gpus=(3,), nics=()))
    rules = AdmissionRules(policy=Policy.RESTRICTED, cpu_options=frozenset({option} if option else ()))
    asked = pod(container(gpus=1, cpus=8, gib=64))

    got = admitted(admit(state, asked, rules))["main"]

    assert ((3,), (3,)) == (got.affinity, got.memory[0].nodes)
    if option is None:
        kubelet = msgspec.structs.replace(rules, mode=Mode.KUBELET, max_allowable_numa_nodes=64)
        assert (3,) == admitted(admit(state, asked, kubelet))["main"].affinity


def test_node_ids_beyond_63_are_ordinary_in_mode_best() -> None:
    """Each of nine nodes has one free CPU less than asked for, and one GPU: two nodes are taken, the closest first."""
    ids = {position: 37 * position for position in range(9)}
    state = node(with_ids(machine(nodes=9, gpus=range(9), nics=()), ids))

    got = admitted(admit(state, pod(container(gpus=2, cpus=9, gib=1)), RESTRICTED))["main"]

    assert ((0, 37), (0,)) == (got.affinity, got.memory[0].nodes)
    assert ("GPU-0", "GPU-1") == got.devices[GPU]


@pytest.mark.parametrize(
    ("rules", "provider"),
    [
        pytest.param(AdmissionRules(policy=Policy.RESTRICTED), None, id="restricted needs to know"),
        pytest.param(AdmissionRules(policy=Policy.BEST_EFFORT), None, id="best-effort aligns, too"),
        pytest.param(AdmissionRules(policy=Policy.NONE), "memory", id="none does not align"),
        pytest.param(
            AdmissionRules(mode=Mode.KUBELET, max_allowable_numa_nodes=64), None, id="a prediction would be a guess"
        ),
    ],
)
def test_memory_whose_search_takes_too_long_is_refused(rules: AdmissionRules, provider: str | None) -> None:
    """Memory and seven sizes of hugepages are spread so unevenly over 64 nodes that the fewest nodes cannot be told."""
    topology, amounts = knapsack_machine()
    if rules.mode is Mode.KUBELET:
        amounts[CPU] = 1000
    asked = pod(ContainerRequest(name=ContainerName("main"), requests=amounts, limits=amounts))

    decision = admit(node(topology), asked, rules)

    refusal = refused(decision)
    assert ("TooMuchWork", "main", provider) == (refusal.code, refusal.container, refusal.provider)
    assert "limit on work" in refusal.finding


def test_in_mode_best_cpus_lie_on_the_aligned_nodes_whatever_the_sockets() -> None:
    """One socket with two NUMA nodes and the GPU on node 1: align-by-socket would hand out CPUs of node 0."""
    one_socket = machine(gpus=(1,), nics=())
    cpus = tuple(msgspec.structs.replace(cpu, socket=0) for cpu in one_socket.cpus)
    state = node(msgspec.structs.replace(one_socket, cpus=cpus))
    rules = AdmissionRules(policy=Policy.RESTRICTED, cpu_options=frozenset({CpuOption.ALIGN_BY_SOCKET}))

    got = admitted(admit(state, pod(container(gpus=1, cpus=2)), rules))["main"]

    assert (1,) == got.affinity
    assert {1} == {state.hardware.cpu_topology.node_of[cpu] for cpu in parse_cpuset(got.cpus)}


@pytest.mark.parametrize("ids", [{0: 0, 1: 70}, dict(enumerate(range(40)))])
def test_the_memory_manager_has_its_limits_without_a_topology_manager(
    ids: dict[int, int],
) -> None:
    """The kubelet's memory manager keeps its limits where no topology manager runs."""
    state = node(with_ids(machine(nodes=len(ids), gpus=(), nics=()), ids))
    rules = AdmissionRules(policy=Policy.NONE, mode=Mode.KUBELET, max_allowable_numa_nodes=64)

    refusal = refused(admit(state, pod(container(cpus=1, gib=1)), rules))

    assert "TooManyNumaNodes" == refusal.code
    admitted(admit(state, pod(container(gpus=0, cpus=0.5)), rules))


def test_resources_are_given_in_the_order_of_their_names() -> None:
    """
    Resources are given in the order of their names, as the kubelet gives them. Both requests fail; the one whose name
    comes first is what the kubelet reports.
    """
    nic = ResourceName("example.com/nic")
    sick = PluginDevice(id=DeviceID("n0"), resource=nic, nodes=(0,))
    state = node(machine(gpus=(0,), nics=(), others=(sick,)), unhealthy=("n0",))
    asked = pod(container(gpus=2, others={nic: 1}))

    assert "NoHealthyDevice" == refused(admit(state, asked, AdmissionRules(policy=Policy.NONE, mode=Mode.KUBELET))).code


@pytest.mark.parametrize(
    ("policy", "mode"),
    [(Policy.BEST_EFFORT, Mode.BEST), (Policy.RESTRICTED, Mode.BEST), (Policy.BEST_EFFORT, Mode.KUBELET)],
)
def test_an_alignment_that_takes_too_long_is_refused_and_never_guessed(policy: Policy, mode: Mode) -> None:
    state, asked = node(machine(nodes=64)), pod(container(gpus=1))
    rules = AdmissionRules(policy=policy, mode=mode, max_allowable_numa_nodes=64)
    steps = iterate_decision_for_request(state, asked, rules)
    hard = {ResourceName(f"example.com/{i}"): rule for i, rule in enumerate(knapsack())}

    assert isinstance(next(steps), HintRequest)
    with pytest.raises(StopIteration) as end:
        steps.send(HintAnswer(providers={"device": dict(hard), "cpu": {}, "memory": {}}))

    assert "TooMuchWork" == refused(end.value.value).code


def test_a_machine_of_34_numa_nodes_is_decided_in_mode_best() -> None:
    """As on GB200: 2 nodes with CPUs, 32 that are GPU memory or nothing. No 2^34 subsets are looked at."""
    state = node(machine(bare_nodes=32))

    got = admitted(admit(state, pod(container(gpus=2, cpus=4, gib=8, nics=1)), SINGLE))["main"]

    assert (0,) == got.affinity
    assert {GPU: ("GPU-0", "GPU-1"), NIC: ("mlx5_0",)} == got.devices


def test_a_device_plugin_that_fails_refuses_the_pod() -> None:
    state = node(machine())
    steps = iterate_decision_for_request(state, pod(container(gpus=1)), BEST)
    asked = next(steps)
    while isinstance(asked, HintRequest):
        asked = steps.send(answer_to(asked, state, BEST))

    with pytest.raises(StopIteration) as end:
        steps.throw(DriverFault("the plugin hung up", "look at its log"))

    assert isinstance(end.value.value, Refusal)
    assert ("PreferenceFailed", "device") == (end.value.value.code, end.value.value.provider)
    assert "hung up" in end.value.value.finding


@pytest.mark.parametrize(
    ("asked", "rules", "field"),
    [
        pytest.param(PodRequest(name=pod().name, containers=()), BEST, "pod.containers", id="no container"),
        pytest.param(pod(container()), AdmissionRules(reserved_cpus="0-x"), "rules.reserved_cpus", id="not a CPU list"),
        pytest.param(
            pod(container()), AdmissionRules(max_allowable_numa_nodes=4), "rules.max_allowable_numa_nodes", id="4 nodes"
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_the_field(
    asked: PodRequest, rules: AdmissionRules, field: str
) -> None:
    with pytest.raises(InvalidField) as error:
        admit(node(machine()), asked, rules)

    assert field == error.value.field


def test_reserved_cpus_and_memory_are_not_given() -> None:
    rules = AdmissionRules(reserved_cpus="0-3,8", reserved_memory={0: {MEMORY: 60 * GIB}})

    got = admitted(admit(node(machine()), pod(container(cpus=8, gib=8)), rules))["main"]

    assert not parse_cpuset(got.cpus) & {0, 1, 2, 3, 8}
    assert (1,) == got.memory[0].nodes


CONTAINERS = st.builds(
    container,
    st.just("x"),
    gpus=st.integers(0, 3),
    cpus=st.sampled_from([0, 0.5, 1, 2, 3]),
    gib=st.integers(0, 40),
    nics=st.integers(0, 1),
)
FPGA = ResourceName("example.com/fpga")
FPGAS = tuple(PluginDevice(id=f"f{i}", resource=FPGA, nodes=(0, 1) if i else None) for i in range(2))  # type: ignore[arg-type]  # plain text
RULES = st.builds(
    AdmissionRules,
    policy=st.sampled_from(Policy),
    scope=st.sampled_from(Scope),
    mode=st.sampled_from(Mode),
    prefer_closest_numa_nodes=st.booleans(),
    reserved_cpus=st.sampled_from(["", "0,8"]),
)


@given(
    st.lists(st.tuples(st.lists(CONTAINERS, min_size=1, max_size=2), st.lists(CONTAINERS, max_size=2)), max_size=4),
    RULES,
    st.lists(st.booleans(), min_size=2, max_size=2),
)
def test_no_sequence_of_pods_is_given_more_than_there_is(
    pods: list[tuple[list[ContainerRequest], list[ContainerRequest]]], rules: AdmissionRules, sidecars: list[bool]
) -> None:
    """
    Between pods nothing is shared, what is given exists and is healthy, reserved CPUs are not given, memory of a node is
    given once; every refusal has a code and a remedy; deciding again decides the same.
    """
    state = node(machine(nodes=2, others=FPGAS), unhealthy=["GPU-3"])
    for number, (apps, inits) in enumerate(pods):
        init = [
            msgspec.structs.replace(each, name=ContainerName(f"i{i}"), sidecar=sidecars[i])
            for i, each in enumerate(inits)
        ]
        main = [msgspec.structs.replace(each, name=ContainerName(f"c{i}")) for i, each in enumerate(apps)]
        asked = pod(*main, init=init, name=f"pod-{number}")
        decision = admit(state, asked, rules)
        assert decision == admit(state, asked, rules)
        if isinstance(decision, Refusal):
            assert decision.code and decision.remedy and decision.finding
            continue
        for got in admitted(decision).values():
            assert not got.device_ids & state.ownership.holders.keys()
            assert not parse_cpuset(got.cpus) & state.ownership.cpus_in_use
            assert not parse_cpuset(got.cpus) & parse_cpuset(rules.reserved_cpus)
            assert "GPU-3" not in got.device_ids
        for each in (*asked.init_containers, *asked.containers):
            got = admitted(decision)[each.name]
            assert all(len(got.devices.get(name, ())) == each.limits.get(name, 0) for name in (GPU, NIC))
            assert not got.cpus or len(parse_cpuset(got.cpus)) * 1000 == each.limits[CPU]
        running = [admitted(decision)[each.name] for each in asked.containers]
        assert len({d for each in running for d in each.device_ids}) == sum(len(each.device_ids) for each in running)
        state = granted(state, decision)
        for use in state.memory.values():
            assert use.reserved.get(MEMORY, 0) <= 64 * GIB
        sizes = sum(block.size for each in state.allocations.values() for block in each.memory)
        assert sizes == sum(use.reserved.get(MEMORY, 0) for use in state.memory.values())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.data(),
    st.sampled_from([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]),
)
def test_strict_policies_in_mode_best_agree_with_a_walk_over_all_sets(
    nodes: list[int], data: st.DataObject, policy: Policy
) -> None:
    """
    In mode `best` the strict policies decide as a walk over all sets of GPUs does. single-numa-node admits where one
    node has enough free GPUs; restricted always, on as few nodes as possible.
    """
    bad = data.draw(st.sets(st.sampled_from(range(len(nodes)))))
    wanted = data.draw(st.integers(1, 8))
    free = [i for i in range(len(nodes)) if i not in bad]
    spans = [len({nodes[i] for i in chosen}) for chosen in combinations(free, wanted)]
    most = 1 if policy is Policy.SINGLE_NUMA_NODE else 4

    state = node(machine(nodes=4, cores=1, gpus=nodes), unhealthy=[f"GPU-{i}" for i in bad])
    decision = admit(state, pod(container(gpus=wanted)), AdmissionRules(policy=policy))

    assert (bool(spans) and min(spans) <= most) == isinstance(decision, Admission)
    if isinstance(decision, Admission):
        given_gpus = admitted(decision)["main"].devices[GPU]
        assert min(spans) == len({nodes[int(gpu.removeprefix("GPU-"))] for gpu in given_gpus})
