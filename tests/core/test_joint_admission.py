"""Pods with device annotations through the whole decision: what they get, where they are aligned, why they are refused."""

import json
from itertools import combinations

import msgspec
import pytest
from decision_support import GIB, admitted, asking, container, granted, machine, node, pod, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.admission.pipeline import BY_RESERVATION
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION, PARTITION_ANNOTATION
from topoalign.core.deviceshare.node_devices import ContainerDevices, joint_devices
from topoalign.core.hints import joint_hints as jointly
from topoalign.core.hints.joint_hints import asked_for, joint_hints, nodes_within
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import InvalidField, NoFit, TooMuchWork
from topoalign.core.model.events import Allocation
from topoalign.core.model.hints import Hints
from topoalign.core.model.ids import GPU, MEMORY, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Placement, PodRequest, Policy, Scope
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.state.fold import NodeState
from topoalign.machines import catalogue

BEST = AdmissionRules()
RESTRICTED = AdmissionRules(policy=Policy.RESTRICTED)
SINGLE = AdmissionRules(policy=Policy.SINGLE_NUMA_NODE)
PER_POD = AdmissionRules(policy=Policy.RESTRICTED, scope=Scope.POD)
UNALIGNED = AdmissionRules(policy=Policy.NONE)

TOGETHER = {"deviceTypes": ["gpu", "rdma"]}
SAME_PCIE = {**TOGETHER, "requiredScope": "SamePCIe"}


def joint(
    *containers: ContainerRequest,
    said: object = SAME_PCIE,
    hints: object = None,
    init: tuple[ContainerRequest, ...] = (),
    name: str = "pod-1",
) -> PodRequest:
    both = {JOINT_ANNOTATION: said, HINT_ANNOTATION: hints}
    annotations = {key: json.dumps(value) for key, value in both.items() if value is not None}
    return pod(*containers, init=init, name=name, annotations=annotations)


def holding(state: NodeState, *devices: str) -> NodeState:
    gpus = tuple(DeviceID(each) for each in devices if each.startswith("GPU"))
    nics = tuple(DeviceID(each) for each in devices if not each.startswith("GPU"))
    return state.holding(Allocation(id=AllocationID("held"), devices={GPU: gpus, NIC: nics}))


def compat(rules: AdmissionRules) -> AdmissionRules:
    return msgspec.structs.replace(rules, compat="koordinator")


def test_all_that_goes_together_is_on_one_numa_node_with_the_cpus() -> None:
    """One NIC is asked for; the four GPUs are on four switches, so there are four."""
    state = holding(node(catalogue.machine("hgx-h100")), "GPU-1")

    got = admitted(admit(state, joint(container(gpus=4, nics=1, cpus=8, gib=8)), RESTRICTED))["main"]

    assert {GPU: ("GPU-4", "GPU-5", "GPU-6", "GPU-7"), NIC: ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")} == got.devices
    assert (1,) == got.affinity == got.memory[0].nodes
    assert {} == got.virtual_functions


def test_koordinator_chooses_gpus_without_a_look_at_the_nics_and_refuses() -> None:
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "GPU-0")
    asked = joint(container(gpus=1, nics=1))

    assert ("GPU-2",) == admitted(admit(state, asked, UNALIGNED))["main"].devices[GPU]
    refusal = refused(admit(state, asked, compat(UNALIGNED)))
    assert ("DevicesDoNotFit", "device", "main") == (refusal.code, refusal.provider, refusal.container)
    assert "Joint-Allocate rules violation" in refusal.finding


def test_hints_name_only_the_numa_nodes_with_devices_side_by_side() -> None:
    """
    Hints name only the NUMA nodes on which the devices are found side by side. GPU-1 on node 1 has no NIC beside it,
    GPU-2 on node 2 has one. Koordinator asks the whole machine first.
    """
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "GPU-0")
    asked = joint(container(gpus=1, nics=1))

    assert "rules violation" in refused(admit(state, asked, compat(RESTRICTED))).finding
    for rules in (RESTRICTED, SINGLE, BEST, PER_POD):
        got = admitted(admit(state, asked, rules))["main"]
        assert {GPU: ("GPU-2",), NIC: ("mlx5_1",)} == got.devices
        assert (2,) == got.affinity


def test_what_fits_nowhere_is_refused_with_the_joint_reason() -> None:
    """A request that fits nowhere is refused with the reason that joint allocation gives."""
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "mlx5_0", "mlx5_1")

    for rules in (BEST, RESTRICTED, PER_POD):
        refusal = refused(admit(state, joint(container(gpus=1, nics=1)), rules))
        assert ("DevicesDoNotFit", "device") == (refusal.code, refusal.provider)
        assert "Insufficient rdma devices" in refusal.finding


def test_a_policy_without_alignment_takes_devices_of_other_nodes() -> None:
    """
    A policy that admits without alignment takes devices of other NUMA nodes. Five GPUs are on no one node of hgx-h100.
    """
    state = node(catalogue.machine("hgx-h100"))
    asked = joint(container(gpus=5, nics=1), said=TOGETHER)

    assert 5 == len(admitted(admit(state, asked, BEST))["main"].devices[GPU])
    assert 5 == len(admitted(admit(state, asked, RESTRICTED))["main"].devices[GPU])
    refusal = refused(admit(state, asked, SINGLE))
    assert ("NotAligned", None) == (refusal.code, refusal.provider)


def test_gpus_are_found_beside_nics_where_the_cpus_need_more_nodes() -> None:
    state = holding(node(catalogue.machine("hgx-h100")), "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    half = len(state.hardware.cpus) // 2

    got = admitted(admit(state, joint(container(gpus=1, nics=1, cpus=half + 2)), RESTRICTED))["main"]

    assert {GPU: ("GPU-4",), NIC: ("mlx5_4",)} == got.devices
    assert (0, 1) == got.affinity


def test_apply_for_all_means_the_nodes_on_which_all_can_be_had() -> None:
    """All healthy NICs of both nodes cannot be had, since one is held on node 0; those of node 1 can."""
    state = holding(node(catalogue.machine("hgx-h100")), "mlx5_0")
    half = len(state.hardware.cpus) // 2
    hints = {"rdma": {"allocateStrategy": "ApplyForAll"}}

    got = admitted(admit(state, joint(container(nics=1, cpus=half + 2), said=None, hints=hints), RESTRICTED))["main"]

    nics = state.hardware.devices[NIC]
    assert tuple(nic for nic, near in nics.items() if near == (1,)) == got.devices[NIC]
    assert (0, 1) == got.affinity


def test_a_pod_is_aligned_where_its_containers_fit_one_after_another() -> None:
    """
    A whole pod is aligned where all its containers find their devices one after another. On node 0 there are enough
    GPUs and NICs for both, but not side by side.
    """
    state = holding(node(catalogue.machine("hgx-h100")), "GPU-0", "mlx5_1", "mlx5_2")
    both = joint(container("a", gpus=1, nics=1), container("b", gpus=1, nics=1))

    got = admitted(admit(state, both, PER_POD))

    assert {"a": ("GPU-4",), "b": ("GPU-5",)} == {name: each.devices[GPU] for name, each in got.items()}
    assert {(1,)} == {each.affinity for each in got.values()}


def test_the_devices_of_an_init_container_are_taken_first() -> None:
    state = holding(node(catalogue.machine("hgx-h100")), "GPU-5", "mlx5_5")
    asked = joint(container(gpus=1, nics=1), init=(container("first", gpus=2, nics=2), container("next", gpus=1)))

    for rules in (RESTRICTED, PER_POD, UNALIGNED):
        got = admitted(admit(state, asked, rules))
        first, main = got["first"].devices, got["main"].devices
        assert {*main[GPU]} < {*first[GPU]} and {*main[NIC]} < {*first[NIC]}


def test_where_the_scope_leaves_a_choice_the_device_policy_makes_it() -> None:
    """Three of the four GPUs of a NUMA node of a dgx1-volta: those with the most NVLinks, or the first ones."""
    state = node(catalogue.machine("dgx1-volta"))

    def gpus(rules: AdmissionRules, placement: Placement) -> tuple[DeviceID, ...]:
        rules = msgspec.structs.replace(rules, placement=placement)
        return admitted(admit(state, joint(container(gpus=3), said=TOGETHER), rules))["main"].devices[GPU]

    first, linked = ("GPU-0", "GPU-1", "GPU-2"), ("GPU-0", "GPU-2", "GPU-3")
    assert linked == gpus(RESTRICTED, Placement.TOPOLOGY) == gpus(RESTRICTED, Placement.BEST_EFFORT)
    assert first == gpus(RESTRICTED, Placement.SIMPLE) == gpus(compat(RESTRICTED), Placement.TOPOLOGY)
    assert first == gpus(PER_POD, Placement.TOPOLOGY)


def test_explain_names_how_the_devices_were_chosen() -> None:
    asked = joint(container(gpus=2, nics=1))
    state = node(catalogue.machine("hgx-h100"))

    own, koordinators = (
        admit(state, asked, rules, explain=True).explanation.considered for rules in (RESTRICTED, compat(RESTRICTED))
    )
    assert [GPU, NIC] == [each.resource for each in own if each.chosen]
    assert all(each.why.endswith("as the annotations ask") for each in own)
    assert {"as Koordinator chooses"} == {each.why for each in koordinators}


@pytest.mark.parametrize("key", [JOINT_ANNOTATION, HINT_ANNOTATION, PARTITION_ANNOTATION])
def test_a_prediction_says_that_the_kubelet_reads_no_annotation(key: str) -> None:
    """Any of the three alone is enough for the note: a kubelet reads none of them."""
    plain = pod(container(gpus=1))
    annotated = msgspec.structs.replace(plain, annotations={key: "{}"})
    rules = AdmissionRules(mode=Mode.KUBELET)

    notes = [admit(node(catalogue.machine("hgx-h100")), each, rules).explanation.notes for each in (plain, annotated)]

    assert ((), (BY_RESERVATION,)) == tuple(notes)


def test_annotations_count_under_a_kubelet_as_in_mode_best() -> None:
    """Here its alignment leaves the whole choice, so that both modes choose the same."""
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "GPU-0")
    plain, asked = pod(container(gpus=1, nics=1)), joint(container(gpus=1, nics=1))
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, placement=Placement.SIMPLE)
    best = msgspec.structs.replace(rules, mode=Mode.BEST)

    assert {GPU: ("GPU-1",), NIC: ("mlx5_0",)} == admitted(admit(state, plain, rules))["main"].devices
    assert {GPU: ("GPU-2",), NIC: ("mlx5_1",)} == admitted(admit(state, asked, rules))["main"].devices
    assert {GPU: ("GPU-2",), NIC: ("mlx5_1",)} == admitted(admit(state, asked, best))["main"].devices


def test_the_kubelet_aligns_without_a_look_at_what_goes_together() -> None:
    """It takes the lowest NUMA node with a free GPU, which has no NIC. NICs in the limits would have it look for both."""
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "GPU-0")
    asked = joint(container(gpus=1, others={"koordinator.sh/rdma": 100}))
    kubelet = msgspec.structs.replace(RESTRICTED, mode=Mode.KUBELET)

    assert "DevicesDoNotFit" == refused(admit(state, asked, kubelet)).code
    assert ("mlx5_1",) == admitted(admit(state, joint(container(gpus=1, nics=1)), kubelet))["main"].devices[NIC]
    assert {GPU: ("GPU-2",), NIC: ("mlx5_1",)} == admitted(admit(state, asked, RESTRICTED))["main"].devices


def test_koordinators_own_resources_ask_for_whole_devices() -> None:
    state = node(catalogue.machine("hgx-h100"))
    asked = joint(container(others={"koordinator.sh/gpu": 200, "koordinator.sh/rdma": 100}))

    assert {GPU: ("GPU-0", "GPU-1"), NIC: ("mlx5_0", "mlx5_1")} == admitted(admit(state, asked, RESTRICTED))[
        "main"
    ].devices
    alone = pod(container(others={"koordinator.sh/gpu": 200}))
    assert {GPU: ("GPU-0", "GPU-1")} == admitted(admit(state, alone, RESTRICTED))["main"].devices
    assert "UnknownResource" == refused(admit(state, joint(container(others={"amd.com/gpu": 1})), RESTRICTED)).code


def test_a_key_that_is_not_known_is_refused_with_those_of_its_domain() -> None:
    state = node(catalogue.machine("hgx-h100"))

    for key, known in (("topoalign.io/gangs", "topoalign.io/gang-size"), (f"{JOINT_ANNOTATION}d", JOINT_ANNOTATION)):
        with pytest.raises(InvalidField) as caught:
            admit(state, pod(container(gpus=1), annotations={key: "x"}), BEST)
        assert f"'{known}'" in caught.value.remedy


@pytest.mark.parametrize(
    ("annotations", "where"),
    [
        ({"scheduling.koordinator.sh/device-joint-alocate": "{}"}, r"pod.annotations\[.*joint-alocate\]: is not known"),
        ({"topoalign.io/placement": "simple"}, r"pod.annotations\[topoalign.io/placement\]: is not known"),
        ({JOINT_ANNOTATION: "{"}, "invalid DeviceJointAllocate annotation"),
        ({JOINT_ANNOTATION: '{"deviceTypes": ["gpus"]}'}, r"deviceTypes: 'gpus' is not known"),
        ({HINT_ANNOTATION: '{"gpu": {"requiredTopologyScope": "Numa"}}'}, "requiredTopologyScope: 'Numa'"),
        ({"no key": "x"}, "not a key of annotations"),
        ({"a": "x" * (256 * 1024)}, "1 with 262145 characters"),
        ({f"a{i}": "" for i in range(1_001)}, "1001 with"),
    ],
)
def test_annotations_that_cannot_be_meant_are_refused_by_name(annotations: dict[str, str], where: str) -> None:
    asked = pod(container(gpus=1), annotations=annotations)

    with pytest.raises(InvalidField, match=where):
        admit(node(catalogue.machine("hgx-h100")), asked, BEST)


def test_annotations_that_are_not_requests_are_ignored() -> None:
    """Annotations of other systems, those that Koordinator writes itself, and those for a scheduler are ignored."""
    annotations = {
        "example.com/a": "{",
        "scheduling.koordinator.sh/device-allocated": "x",
        "kubectl.kubernetes.io/b": "",
        "topoalign.io/gang": "g",
        "topoalign.io/gang-size": "2",
    }
    plain = pod(container(gpus=1))
    state = node(catalogue.machine("hgx-h100"))

    assert admit(state, plain, BEST) == admit(state, msgspec.structs.replace(plain, annotations=annotations), BEST)


def test_a_kubelet_believes_no_annotation() -> None:
    """What a pod says it was given, in whoever's words, changes nothing of what its node gives it."""
    forged = {
        "topoalign.io/devices": "GPU-0,GPU-1",
        "scheduling.koordinator.sh/device-allocated": '{"gpu":[{"minor":0}]}',
        JOINT_ANNOTATION: '{"deviceTypes": ["gpu"]}',
    }
    plain = pod(container(gpus=1))
    state = node(catalogue.machine("hgx-h100"))

    rules = AdmissionRules(mode=Mode.KUBELET)

    decided = admit(state, msgspec.structs.replace(plain, annotations=forged), rules)

    assert admitted(admit(state, plain, rules)) == admitted(decided)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["gpu", "rdma", "SamePCIe"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["gpu", "rdma", "deviceTypes", "requiredScope", "selector", "vfSelector", "matchLabels"])
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([JOINT_ANNOTATION, HINT_ANNOTATION, PARTITION_ANNOTATION]) | st.text(max_size=12),
        json_values.map(json.dumps) | st.text(max_size=20),
        max_size=4,
    ),
    st.sampled_from([RESTRICTED, PER_POD, compat(BEST)]),
)
def test_whatever_stands_in_annotations_is_decided_or_refused_by_name(
    annotations: dict[str, str], rules: AdmissionRules
) -> None:
    asked = pod(container(gpus=2, nics=1), annotations=annotations)
    try:
        assert admit(H100, asked, rules).explanation is not None
    except InvalidField as invalid:
        assert "pod.annotations" in invalid.finding


H100 = node(catalogue.machine("hgx-h100"))
MACHINES = {name: node(catalogue.machine(name)) for name in ("hgx-h100", "epyc-nps4-4gpu", "dgx-a100", "dgx1-volta")}


@st.composite
def loaded(draw: st.DrawFn) -> NodeState:
    """A machine on which some devices are held."""
    state = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    devices = [*state.hardware.devices[GPU], *state.hardware.devices[NIC]]
    return holding(state, *draw(st.lists(st.sampled_from(devices), unique=True, max_size=len(devices) // 2)))


requests = st.builds(container, name=st.just("main"), gpus=st.integers(0, 4), nics=st.integers(0, 3)).filter(
    lambda each: bool(each.limits)
)
hints_said = st.sampled_from(
    [
        None,
        {"gpu": {"requiredTopologyScope": "PCIe"}},
        {"gpu": {"requiredTopologyScope": "NUMANode"}},
        {"rdma": {"allocateStrategy": "ApplyForAll"}},
        {"rdma": {"exclusivePolicy": "PCIeLevel"}},
    ]
)


@given(loaded(), requests, st.sampled_from([TOGETHER, SAME_PCIE]), hints_said, st.sampled_from(["", "koordinator"]))
def test_restricted_aligns_to_the_fewest_nodes_and_then_never_fails(
    state: NodeState, asked: ContainerRequest, said: object, hints: object, which: str
) -> None:
    """
    The policy restricted aligns to the fewest nodes that have the devices and never fails after that. The reference
    tries all sets of nodes one by one; with Koordinator no set is enough where the whole machine does not.
    """
    rules = msgspec.structs.replace(RESTRICTED, compat=which)
    request = joint(asked, said=said, hints=hints)
    (demand,) = read_pod(request, rules).containers
    question = asked_for(state, demand)
    near = {near[0] for name in (GPU, NIC) for near in state.hardware.devices[name].values() if near}
    widths = [
        size
        for size in range(1, len(near) + 1)
        for nodes in combinations(sorted(near), size)
        if can_give(question, node_mask(nodes)) and (not which or can_give(question, None))
    ]

    decision = admit(state, request, rules)

    if isinstance(decision, Refusal):
        assert [] == widths
        assert "DevicesDoNotFit" == decision.code
    else:
        got = admitted(decision)["main"]
        assert got.affinity is not None
        assert min(widths) == len(got.affinity)
        assert all(
            state.hardware.devices[name][device][:1][0] in got.affinity  # type: ignore[index]  # all have a known node
            for name, devices in got.devices.items()
            for device in devices
        )
        assert got.device_ids.isdisjoint(state.ownership.holders)


def can_give(question: JointRequest, mask: int | None) -> bool:
    try:
        joint_devices(question, mask)
    except NoFit:
        return False
    return True


@settings(max_examples=60)
@given(loaded(), st.lists(requests, min_size=2, max_size=3), st.sampled_from([TOGETHER, SAME_PCIE]), st.booleans())
def test_containers_of_an_admitted_pod_share_nothing_and_stay_aligned(
    state: NodeState, containers: list[ContainerRequest], said: object, whole: bool
) -> None:
    """The containers of an admitted pod share nothing and stay within its affinity."""
    named = [msgspec.structs.replace(each, name=f"c{i}") for i, each in enumerate(containers)]

    decision = admit(state, joint(*named, said=said), PER_POD if whole else RESTRICTED)

    if isinstance(decision, Refusal):
        assert decision.code in ("DevicesDoNotFit", "NotAligned")
        return
    got = list(admitted(decision).values())
    assert sum(len(each.device_ids) for each in got) == len(frozenset().union(*(each.device_ids for each in got)))
    assert not whole or 1 == len({each.affinity for each in got})
    assert [each.limits.get(GPU, 0) for each in named] == [len(each.devices.get(GPU, ())) for each in got]


def test_devices_of_unknown_place_will_do_wherever_the_cpus_are() -> None:
    topology: Topology = catalogue.machine("two-socket-8xpcie")
    bare = msgspec.structs.replace(
        topology,
        gpus=tuple(msgspec.structs.replace(gpu, numa_affinity=(), bridge=None) for gpu in topology.gpus),
        nics=tuple(msgspec.structs.replace(nic, numa_affinity=(), bridge=None) for nic in topology.nics),
        bridges=(),
        links=(),
    )

    got = admitted(admit(node(bare), joint(container(gpus=1, nics=1, cpus=2), said=TOGETHER), RESTRICTED))["main"]

    assert {GPU: ("GPU-0",), NIC: ("mlx5_0",)} == got.devices


def test_other_resources_of_the_pod_are_decided_as_ever() -> None:
    state = node(catalogue.machine("hgx-h100"))

    got = admitted(admit(state, joint(container(gpus=1, cpus=4, gib=4), container("b", cpus=2)), RESTRICTED))

    assert got["b"].cpus and not got["b"].devices
    assert 4 * GIB == next(block.size for block in got["main"].memory if block.resource == MEMORY)
    assert (
        "UnknownResource"
        == refused(admit(state, joint(container(gpus=1, others={"example.com/x": 1})), RESTRICTED)).code
    )


def test_a_decision_of_all_devices_asks_each_question_once() -> None:
    """What an admission says of a joint pod can be folded like any other."""
    state = node(catalogue.machine("hgx-h100"))
    decision: Decision = admit(state, joint(container(gpus=8, nics=8)), RESTRICTED)

    after = granted(state, decision)
    assert () == tuple(after.ownership.free(GPU))
    assert 2 == len(after.ownership.free(ResourceName(NIC)))


EIGHT_NODES = machine(nodes=8, gpus=[i // 2 for i in range(16)], nics=[i // 2 for i in range(16)])
"""Two GPUs and two NICs near each NUMA node."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The sets of NUMA nodes on which a container's devices were looked for while hints were made."""
    tried: list[int | None] = []

    def look(asked: JointRequest, mask: int | None) -> ContainerDevices:
        tried.append(mask)
        return joint_devices(asked, mask)

    monkeypatch.setattr(jointly, "joint_devices", look)
    return tried


def test_a_pod_is_searched_only_where_all_its_containers_could_be(looks: list[int | None]) -> None:
    """
    A pod is searched on the sets of nodes where all its containers could be, and on no fewer nodes. Seven containers
    with two GPUs each: on any nodes, and on the eight sets of seven.
    """
    asked = joint(*(container(f"c{i}", gpus=2, nics=2) for i in range(7)))

    given = admitted(admit(node(EIGHT_NODES), asked, PER_POD))
    assert 7 == len(given)
    assert 7 * (1 + 8 + 1) == len(looks)  # and once more on the one that the pod is aligned to
    assert {None, *(0xFF & ~(1 << i) for i in range(8))} == {*looks}


def test_an_init_container_is_not_counted_beside_those_after_it(looks: list[int | None]) -> None:
    asked = joint(container(gpus=2, nics=2), init=(container("first", gpus=2, nics=2),))

    assert isinstance(admit(node(EIGHT_NODES), asked, PER_POD), Admission)
    assert {None, *(1 << i for i in range(8))} == {*looks}


def test_more_gpus_than_exist_are_searched_on_the_whole_machine_only(looks: list[int | None]) -> None:
    """A request for more GPUs than exist is searched on the whole machine only."""
    asked = joint(*(container(f"c{i}", gpus=2, nics=2) for i in range(9)))

    assert "DevicesDoNotFit" == refused(admit(node(EIGHT_NODES), asked, PER_POD)).code
    assert {None} == {*looks}


def test_where_the_policy_takes_single_nodes_no_others_are_tried(looks: list[int | None]) -> None:
    """Three NICs are on no single node."""
    refusal = refused(admit(node(EIGHT_NODES), joint(container(gpus=1, nics=3), said=TOGETHER), SINGLE))

    assert "NotAligned" == refusal.code
    assert {None, *(1 << i for i in range(8))} == {*looks}


def named(hints: Hints) -> int:
    assert isinstance(hints, tuple)
    return len(hints)


def test_all_sets_and_containers_have_one_limit_on_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at 32 devices for each of two containers and set: three sets within the limit, or only the whole machine."""
    state, asked = node(EIGHT_NODES), joint(container("a", gpus=1, nics=1), container("b", gpus=1, nics=1))

    for steps, found in ((80, None), (280, 3)):
        monkeypatch.setattr(jointly, "NumaSearchBudget", lambda steps=steps: NumaSearchBudget(steps))
        if found is None:
            with pytest.raises(TooMuchWork):
                joint_hints(asking(state, asked, None, PER_POD))
        else:
            assert found == named(joint_hints(asking(state, asked, None, PER_POD)))


def test_on_many_nodes_not_all_sets_are_named_and_the_pod_is_admitted() -> None:
    """924 sets of six nodes out of twelve will do."""
    state = node(machine(nodes=12, gpus=range(12), nics=range(12)))
    asked = joint(container(gpus=6, nics=6), said=TOGETHER)

    assert jointly.MOST_FOUND == named(joint_hints(asking(state, asked, None, PER_POD)))
    assert isinstance(admit(state, asked, RESTRICTED), Admission)


@given(loaded(), requests, st.integers(1, 7))
def test_devices_are_looked_for_inside_the_alignment_alone(
    state: NodeState, asked: ContainerRequest, affinity: int
) -> None:
    """NUMA nodes outside of what all else is aligned to are not tried, also where the devices would be found there."""
    within = nodes_within(asking(state, joint(asked), None, RESTRICTED), affinity)

    assert 0 == within & ~affinity
