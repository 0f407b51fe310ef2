"""A prediction stands on what a node has said, and tells what it does not know."""

import msgspec
import pytest
from decision_support import container, machine, node, pod

from topoalign.core.admission.admit import admit
from topoalign.core.admission.prediction import (
    KubeletUnknown,
    admission_rules,
    describe_unconfirmed_record,
    predict,
    to_kubelet_rules,
)
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation, ContainerUsage, MemoryBlock, Owner, UsageObserved
from topoalign.core.model.ids import (
    GPU,
    MEMORY,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules, ListedDevices
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, CpuOption, Mode, Placement, Policy, Scope
from topoalign.core.state.fold import NodeState

FPGA, VPU = ResourceName("example.com/fpga"), ResourceName("example.com/vpu")
RESTRICTED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, reserved_cpus="0")
RULES = to_kubelet_rules(RESTRICTED)
STATE = node(machine())
GIB = 1 << 30


def told(kubelet: KubeletObserved | None, *containers: ContainerUsage, known: bool = True) -> NodeState:
    """A node of two NUMA nodes with two GPUs and eight CPUs each that has said this."""
    usage = UsageObserved(
        node=STATE.node, epoch=1, revision=1, containers=containers, containers_known=known, kubelet=kubelet
    )
    return STATE.apply(usage)


def listed(*devices: tuple[str, tuple[int, ...] | None]) -> tuple[ListedDevices, ...]:
    return tuple(ListedDevices(nodes=nodes, ids=(DeviceID(name),)) for name, nodes in devices)


def used(cpus: str = "", *memory: MemoryBlock) -> ContainerUsage:
    owner = Owner(namespace=Namespace("default"), pod=PodName("db"), container=ContainerName("main"))
    return ContainerUsage(owner=owner, cpus=cpus, memory=memory)


def test_a_node_that_has_said_nothing_of_its_kubelet_is_not_predicted() -> None:
    """An earlier version, or a node without a kubelet: its policy is not guessed."""
    for state in (STATE, told(None)):
        with pytest.raises(KubeletUnknown, match="has not published it"):
            predict(state, pod(container("main", gpus=1)), 0)


@pytest.mark.parametrize(("rule", "word"), [("policy", "balanced"), ("compat", "borg")])
def test_a_rule_of_a_later_version_is_not_predicted(rule: str, word: str) -> None:
    """A policy of a later kubelet, or answers that a later agent gives."""
    later = msgspec.structs.replace(RULES, **{rule: word})

    with pytest.raises(KubeletUnknown, match=word):
        predict(told(KubeletObserved(rules=later)), pod(container("main", gpus=1)), 0)


def test_rules_come_back_from_the_bus_as_they_were() -> None:
    """All of them: a rule that the wire forgets makes listeners predict otherwise than the node."""
    rules = AdmissionRules(
        policy=Policy.SINGLE_NUMA_NODE,
        scope=Scope.POD,
        mode=Mode.KUBELET,
        placement=Placement.SIMPLE,
        compat="gaia",
        prefer_closest_numa_nodes=True,
        max_allowable_numa_nodes=12,
        cpu_manager="none",
        reserved_cpus="0-1",
        reserved_cpu_count=3,
        cpu_options=frozenset(CpuOption),
        memory_manager="None",
        reserved_memory={1: {MEMORY: GIB}},
    )
    said = msgspec.json.decode(msgspec.json.encode(to_kubelet_rules(rules, "why")), type=KubeletRules)

    assert rules == admission_rules(said, STATE.node)
    changed = {
        name for name in AdmissionRules.__struct_fields__ if getattr(rules, name) != getattr(AdmissionRules(), name)
    }
    assert {*AdmissionRules.__struct_fields__} == changed, "each rule is tried here"


def test_devices_of_other_plugins_take_part_in_the_alignment() -> None:
    """FPGAs are on NUMA node 1, so the GPU comes from there; without them it comes from node 0."""
    asked = pod(container("main", gpus=1, others={FPGA: 1}))
    kubelet = KubeletObserved(rules=RULES, devices={FPGA: listed(("f-0", (1,)), ("f-1", (1,)))})
    decision = predict(told(kubelet), asked, 0)
    alone = predict(told(kubelet), pod(container("main", gpus=1)), 0)

    assert isinstance(decision, Admission) and isinstance(alone, Admission)
    assert ((1,), (0,)) == (decision.allocations[0].affinity, alone.allocations[0].affinity)
    assert {"GPU-2", "f-0"} == decision.allocations[0].device_ids


def test_devices_of_other_plugins_that_are_in_use_are_held() -> None:
    """The record has none of them; the checkpoint counts, whether or not a volume of the pod is mounted."""
    held = CheckpointEntry(pod_uid="u", container=ContainerName("c"), devices={FPGA: (DeviceID("f-0"),)})
    kubelet = KubeletObserved(rules=RULES, devices={FPGA: listed(("f-0", (0,)))}, entries=(held,))
    decision = predict(told(kubelet), pod(container("main", others={FPGA: 1})), 0)

    assert isinstance(decision, Refusal)


def holding(state: NodeState, name: str, *gpus: str) -> NodeState:
    owner = Owner(namespace=Namespace("default"), pod=PodName(name), container=ContainerName("main"))
    devices = {GPU: tuple(map(DeviceID, gpus))}
    return state.holding(Allocation(id=AllocationID(name), owner=owner, devices=devices))


def having_dropped(*gpus: str) -> KubeletObserved:
    """A kubelet whose checkpoint lists these of the allocation `old` for pods that are gone."""
    return KubeletObserved(rules=RULES, dropped={AllocationID("old"): {GPU: tuple(map(DeviceID, gpus))}})


def test_what_was_given_anew_is_held_whatever_was_dropped() -> None:
    """An older reading and a newer allocation of the same devices, as a listener of two streams may have them."""
    state = told(having_dropped("GPU-0", "GPU-1"))
    before, after = (
        predict(holding(state, *held), pod(container("main", gpus=4)), 0)
        for held in (
            ("old", "GPU-0", "GPU-1"),
            ("new", "GPU-0", "GPU-1"),
        )
    )

    assert isinstance(before, Admission) and isinstance(after, Refusal)


def test_of_an_allocation_that_was_dropped_in_part_the_rest_is_held() -> None:
    state = holding(told(having_dropped("GPU-1")), "old", "GPU-0", "GPU-1")
    three, four = (predict(state, pod(container("main", gpus=gpus)), 0) for gpus in (3, 4))

    assert isinstance(three, Admission) and isinstance(four, Refusal)
    assert {"GPU-1", "GPU-2", "GPU-3"} == three.allocations[0].device_ids


def test_what_several_ended_containers_had_is_free_though_it_is_listed() -> None:
    """The checkpoint lists it for a pod with a mounted volume, which was written before they ended."""
    listed_still = CheckpointEntry(
        pod_uid="u",
        container=ContainerName("c"),
        devices={GPU: (DeviceID("GPU-0"), DeviceID("GPU-1"), DeviceID("GPU-2"))},
        mounted=True,
    )
    ended = (AllocationID("a"), AllocationID("b"), AllocationID("never"))
    state = told(KubeletObserved(rules=RULES, entries=(listed_still,), ended=ended))
    state = holding(holding(state, "a", "GPU-0"), "b", "GPU-1")
    three, four = (predict(state, pod(container("main", gpus=gpus)), 0) for gpus in (3, 4))

    assert isinstance(three, Admission) and isinstance(four, Refusal)
    assert {"GPU-0", "GPU-1", "GPU-3"} == three.allocations[0].device_ids


def test_known_devices_are_known_whatever_else_is_not() -> None:
    """Why nothing of the files is known is no reason to doubt what the plugins list."""
    kubelet = KubeletObserved(rules=RULES, devices={}, registered=(), unknown="too slow", devices_unknown="")
    notes = predict(told(kubelet), pod(container("main", others={FPGA: 1})), 0).explanation.notes

    assert any(note.startswith("nobody lists example.com/fpga") for note in notes)


def test_names_that_nobody_serves_are_named_where_all_devices_are_known() -> None:
    """Where it is not known what other plugins list, or one lists them, nothing is found."""
    asked = pod(container("main", gpus=1, others={FPGA: 1}))
    every: tuple[dict[ResourceName, tuple[ListedDevices, ...]] | None, ...] = ({}, None, {FPGA: listed(("0", (0,)))})
    nobody, unknown, somebody = (
        predict(told(KubeletObserved(rules=RULES, devices=devices)), asked, 0).explanation.unserved for devices in every
    )

    assert ((FPGA,), (), ()) == (nobody, unknown, somebody)


@pytest.mark.parametrize("unknown", ["its socket is not there", ""])
def test_a_resource_is_passed_over_only_where_its_absence_is_known(unknown: str) -> None:
    kubelet = KubeletObserved(rules=RULES, devices=None if unknown else {}, devices_unknown=unknown, registered=())
    (note,) = predict(told(kubelet), pod(container("main", others={FPGA: 1})), 0).explanation.notes

    assert bool(unknown) == note.startswith("whether a plugin lists example.com/fpga is not known")


def test_a_known_resource_without_healthy_devices_is_not_predicted() -> None:
    kubelet = KubeletObserved(rules=RULES, devices={}, registered=(FPGA,))

    with pytest.raises(InvalidField, match="fpga"):
        predict(told(kubelet), pod(container("main", others={FPGA: 1})), 0)


def test_a_resource_that_is_offered_here_stays_as_discovery_announces_it() -> None:
    """The kubelet's list may be older than a card that has just gone, and knows no links."""
    kubelet = KubeletObserved(rules=RULES, devices={GPU: listed(("GPU-9", (0,)))})
    decision = predict(told(kubelet), pod(container("main", gpus=1)), 0)

    assert isinstance(decision, Admission)
    assert {"GPU-0"} == decision.allocations[0].device_ids


def test_what_podresources_showed_counts_only_once_it_has_answered() -> None:
    """Six of the seven free CPUs of NUMA node 0 are shown as held where no checkpoint tells."""
    kubelet = KubeletObserved(rules=RULES, cpus_unknown="there is no file")
    asked = pod(container("main", cpus=4, gib=1))
    shown, silent = (predict(told(kubelet, used("1-3,8-10"), known=known), asked, 0) for known in (True, False))

    assert isinstance(shown, Admission) and isinstance(silent, Admission)
    assert ((1,), (0,)) == (shown.allocations[0].affinity, silent.allocations[0].affinity)
    assert ("there is no file; what PodResources showed last counts instead",) == shown.explanation.notes
    assert ("there is no file",) == silent.explanation.notes


@pytest.mark.parametrize("known", ["cpus", "memory", "devices"])
def test_what_podresources_showed_counts_only_for_what_is_unknown(known: str) -> None:
    """It showed a container with all CPUs, memory and FPGAs; the checkpoints tell of one kind that nothing is held."""
    unknown = {
        f"{'checkpoint' if kind == 'devices' else kind}_unknown": "" if kind == known else "gone" for kind in KINDS
    }
    kubelet = msgspec.structs.replace(KubeletObserved(rules=RULES, devices={FPGA: listed(("f-0", (0,)))}), **unknown)
    shown = used("0-15", MemoryBlock(resource=MEMORY, nodes=(0, 1), size=128 * GIB, taken=(64 * GIB, 64 * GIB)))
    shown = msgspec.structs.replace(shown, devices={FPGA: (DeviceID("f-0"),)})
    state = told(kubelet, shown)

    fits = {
        "cpus": predict(state, pod(container("main", cpus=15, gib=1)), 0, {"memory_manager": "None", "policy": "none"}),
        "memory": predict(state, pod(container("main", cpus=1, gib=100)), 0, {"cpu_manager": "none", "policy": "none"}),
        "devices": predict(state, pod(container("main", others={FPGA: 1})), 0),
    }

    assert [known] == [kind for kind, decision in fits.items() if isinstance(decision, Admission)]


KINDS = ("cpus", "memory", "devices")


def test_of_an_unknown_kubelet_what_podresources_showed_counts() -> None:
    """
    Not read in time, or too large for a message: six CPUs of NUMA node 0, 60 of its 64 GiB and a device are shown as held,
    and they do not count as free.
    """
    memory = MemoryBlock(resource=MEMORY, nodes=(0,), size=60 * GIB, taken=(60 * GIB,))
    shown = msgspec.structs.replace(used("1-3,8-10", memory), devices={FPGA: (DeviceID("f-0"),)})
    devices = {FPGA: listed(("f-0", (0,)))}
    state = told(KubeletObserved(rules=RULES, devices=devices, unknown="late"), shown)
    cpus, ram, fpga = (
        predict(state, pod(container("main", **asked)), 0)
        for asked in ({"cpus": 4, "gib": 1}, {"cpus": 1, "gib": 8}, {"others": {FPGA: 1}})
    )

    assert isinstance(cpus, Admission) and isinstance(ram, Admission)
    assert ((1,), (1,)) == (cpus.allocations[0].affinity, ram.allocations[0].affinity)
    assert isinstance(fpga, Refusal)
    assert ("late; what PodResources showed last counts instead",) == cpus.explanation.notes


def test_where_nothing_of_a_kubelet_is_known_nothing_is_predicted() -> None:
    """Neither the files nor PodResources: an empty node would be a guess."""
    with pytest.raises(KubeletUnknown, match="late, and PodResources has not answered"):
        predict(told(KubeletObserved(rules=RULES, unknown="late"), known=False), pod(container("main", gpus=1)), 0)


def test_another_version_of_the_kubelet_is_noted() -> None:
    notes = {
        version: predict(
            told(KubeletObserved(rules=RULES, version=version)), pod(container("main", gpus=1)), 0
        ).explanation.notes
        for version in ("", "v1.36.3", "v1.35.1")
    }

    assert [0, 0, 1] == [len(each) for each in notes.values()]
    assert "v1.35.1" in notes["v1.35.1"][0]


def test_a_kubelet_that_has_just_started_is_noted_until_it_has_settled() -> None:
    state = told(KubeletObserved(rules=RULES, started=1000.0, settle_seconds=120))
    notes = [predict(state, pod(container("main", gpus=1)), now).explanation.notes for now in (999, 1005, 1120)]

    assert [0, 1, 0] == [len(each) for each in notes]
    assert "started 5 s ago" in notes[1][0]


def test_a_record_in_doubt_is_noted() -> None:
    """As the node's own answer says it: something may be held that no event tells of."""
    kubelet = KubeletObserved(rules=RULES, record_doubt="line 3 is not whole")
    notes = predict(told(kubelet), pod(container("main", gpus=1)), 0).explanation.notes

    assert (describe_unconfirmed_record("line 3 is not whole"),) == notes


def test_rules_of_the_question_go_before_those_of_the_kubelet() -> None:
    state, asked = told(KubeletObserved(rules=RULES)), pod(container("main", gpus=3))
    single = predict(state, asked, 0, {"policy": "single-numa-node"})

    assert isinstance(single, Refusal)
    assert admit(state, asked, RESTRICTED) == predict(state, asked, 0)


def test_notes_on_the_pod_come_before_a_doubt_about_the_record() -> None:
    """The note on what nobody lists comes before the one on a damaged journal, whatever the rules of the question are."""
    kubelet = KubeletObserved(rules=RULES, registered=(), record_doubt="line 7")
    asked = pod(ContainerRequest(name=ContainerName("main"), limits={FPGA: 0}))

    for changes in ({}, {"mode": "best"}):
        *_, nobody, doubt = predict(told(kubelet), asked, 0, changes).explanation.notes
        assert (True, True) == (nobody.startswith("nobody lists"), "line 7" in doubt)


def test_a_pod_that_cannot_be_meant_is_refused_before_anything_is_asked() -> None:
    """The pod comes first, then the node, then the rules."""
    wrong, sound = pod(container("main", gpus=-1)), pod(container("main", gpus=1))
    unknown, known = told(None), told(KubeletObserved(rules=RULES))

    with pytest.raises(InvalidField, match="requests"):
        predict(unknown, wrong, 0, {"policy": "odd"})
    with pytest.raises(KubeletUnknown):
        predict(unknown, sound, 0, {"policy": "odd"})
    with pytest.raises(InvalidField, match="rules"):
        predict(known, sound, 0, {"policy": "odd"})
