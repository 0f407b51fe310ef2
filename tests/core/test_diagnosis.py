"""The answer of a whole cluster is the decision of each of its kubelets, and each change that it names makes the pod fit."""

from random import Random
from typing import Any

import msgspec
import pytest
from decision_support import container, machine, pod
from diagnosis_support import RULES, TIME, cluster, machines, node_with
from feasibility_support import some_pod

from topoalign.core.admission.prediction import predict, prediction_basis
from topoalign.core.admission.resolvability import asking_for
from topoalign.core.diagnosis.cluster_answer import ClusterAnswer
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, fold_record
from topoalign.core.model.decisions import Admission, Resolvability
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import NO_CHANGES, ContainerRequest, PodRequest, Policy, RuleChanges, Scope
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name

SCORER = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
BARE = machine(gpus=(), nics=())


def answer(
    record: ClusterRecord, *containers: ContainerRequest, pods: int = 1, changes: RuleChanges = NO_CHANGES
) -> ClusterAnswer:
    return diagnose(Nodes(record), pod(*containers, name="asked"), SCORER, changes, pods)


def used(name: str, *gpus: int, **rules: object) -> NodeRecord:
    """A node of two NUMA nodes with two GPUs each, and a pod for each number that holds so many."""
    pods = [pod(container(gpus=size), name=f"{name}-{i}") for i, size in enumerate(gpus)]
    return node_with(name, *pods, rules=msgspec.structs.replace(RULES, **rules))


def test_each_node_is_counted_as_its_kubelet_decides() -> None:
    """Random machines, rules, held resources and pods: the same codes as of one prediction after another."""
    chance = Random(3)
    seen: set[str] = set()
    for _ in range(60):
        rules = msgspec.structs.replace(RULES, policy=chance.choice([*Policy]), scope=chance.choice([*Scope]))
        hardware = machine(gpus=chance.choice([(0, 0, 1, 1), (0, 1), (0, 0, 0, 1)]), nics=(0, 1))
        full = [pod(container(gpus=1, cpus=2, gib=4), name=f"p{i}") for i in range(3)]
        record = cluster(
            *(node_with(f"n{i}", *full[: chance.randrange(3)], topology=hardware, rules=rules) for i in range(3))
        )
        asked = msgspec.structs.replace(some_pod(chance, hardware), name=PodName("asked"))

        expected = {}
        for each in record.nodes:
            decision = predict(fold_record(each), asked, TIME)
            expected[each.node] = "" if isinstance(decision, Admission) else decision.code
        found = diagnose(Nodes(record), asked, SCORER)

        assert {name for name, code in expected.items() if not code} == {each.node for each in found.admitting}
        for code in {code for code in expected.values() if code}:
            nodes = sum(each.nodes for each in found.reasons if each.code == code)
            assert [*expected.values()].count(code) == nodes
        seen.update(expected.values())
    assert len(seen) > 3


def test_the_reason_of_nodes_that_are_full_comes_before_that_of_others() -> None:
    """One node is full, one is not known, and three have no GPUs at all."""
    record = cluster(
        used("full", 2, 2),
        NodeRecord(node=NodeName("silent")),
        *(node_with(f"cpu-{i}", topology=BARE) for i in range(3)),
    )

    found = answer(record, container(gpus=1))

    assert ["NotEnoughDevices", "NodeNotWhole", "UnknownResource"] == [each.code for each in found.reasons]
    assert [Resolvability.IN_USE, Resolvability.NOT_KNOWN, Resolvability.MISSING] == [
        each.resolvability for each in found.reasons
    ]
    assert ([1, 1, 3], 5, 0) == ([each.nodes for each in found.reasons], found.nodes, found.fit)
    assert found.reason == found.reasons[0] and ("full",) == found.reason.examples
    assert "hardware, health, allocations" in found.reasons[1].finding


def test_nodes_that_admit_are_ranked_by_score_then_name() -> None:
    found = answer(cluster(used("b"), used("c", 1), used("a")), container(gpus=1))

    assert ["c", "a", "b"] == [each.node for each in found.admitting]
    assert found.reason is None and () == found.changes and 1 == found.fit


def test_less_of_a_resource_is_the_most_that_a_node_has() -> None:
    record = cluster(used("a", 2, 1), used("b", 1))

    found = answer(record, container(gpus=4, cpus=2, gib=4))

    (change,) = [each for each in found.changes if GPU in each.asked]
    assert {GPU: 2} == change.asked and 0.5 == change.cost
    assert "ask for 2 instead of 4 nvidia.com/gpu" == change.text
    assert 1 == answer(record, container(gpus=2, cpus=2, gib=4)).fit
    assert 0 == answer(record, container(gpus=3, cpus=2, gib=4)).fit


@pytest.mark.parametrize(
    ("asked", "resource", "amount", "text"),
    [
        (container(gpus=1, cpus=200, gib=4), CPU, 8000, "ask for 8 instead of 200 CPUs"),
        (container(gpus=1, cpus=2, gib=900), MEMORY, 64 << 30, "ask for 64 instead of 900 GiB of memory"),
    ],
)
def test_less_cpus_and_memory_are_looked_for_by_halves(
    asked: ContainerRequest, resource: str, amount: int, text: str
) -> None:
    found = answer(cluster(used("a")), asked)

    assert [({resource: amount}, text)] == [(dict(each.asked), each.text) for each in found.changes if each.asked]


def test_the_strictest_policy_that_suffices_is_named() -> None:
    """Each NUMA node has one GPU; under `none` and `best-effort` the pod would fit as well."""
    rules = msgspec.structs.replace(RULES, policy=Policy.SINGLE_NUMA_NODE)
    record = cluster(*(node_with(name, topology=machine(gpus=(0, 1)), rules=rules) for name in "ab"))

    found = answer(record, container(gpus=2))

    assert ["ask for 1 instead of 2 nvidia.com/gpu"] == [each.text for each in found.changes if each.asked]
    (change,) = [each for each in found.changes if each.rules]
    assert ({"policy": "restricted"}, 2, "a") == (change.rules, change.nodes, change.example)
    assert "policy restricted instead of single-numa-node in the kubelet's configuration" == change.text
    assert found.changes[-1] == change


def test_rules_are_compared_with_those_that_were_asked_for() -> None:
    """The kubelet has `restricted`; asked is what `single-numa-node` would say."""
    record = cluster(node_with("a", topology=machine(gpus=(0, 1))))

    found = answer(record, container(gpus=2), changes={"policy": "single-numa-node"})

    assert ["policy restricted instead of single-numa-node in the kubelet's configuration"] == [
        each.text for each in found.changes if each.rules
    ]


def test_a_limit_above_the_request_stays() -> None:
    """A pod that is not Guaranteed may use more CPUs than it asks for; of its GPUs limit and request are the same."""
    asked = pod(msgspec.structs.replace(container(gpus=4, cpus=2), limits={GPU: 4, CPU: 8000}))

    less = asking_for(asking_for(asked, asked.containers[0].name, CPU, 1000), asked.containers[0].name, GPU, 2)

    assert {GPU: 2, CPU: 8000} == less.containers[0].limits
    assert {GPU: 2, CPU: 1000} == less.containers[0].requests


def test_the_pod_that_holds_least_has_to_move() -> None:
    """On `a` the last pod holds one GPU beside a free one; each pod of `b` holds two."""
    record = cluster(used("a", 1, 1, 1), used("b", 2, 2))

    found = answer(record, container(gpus=2))

    moves = [each for each in found.changes if each.moved]
    assert [("a", 2, 0.5)] == [(each.example, each.nodes, each.cost) for each in moves]
    assert "move default/a-2 (1 nvidia.com/gpu) from a" == moves[0].text
    assert 1 == answer(cluster(used("a", 1, 1)), container(gpus=2)).fit


def test_no_pod_has_to_move_in_vain() -> None:
    """Pods `a` and `z` have the GPUs of one NUMA node, `b` and `c` those of the other: by name, `a` would go first."""
    pods = [pod(container(gpus=1), name=name) for name in ("a", "z", "b", "c")]

    (move,) = [each for each in answer(cluster(node_with("n", *pods)), container(gpus=2)).changes if each.moved]

    assert ["default/b", "default/c"] == [each.pod for each in move.moved]
    assert 1.0 == move.cost


def test_several_pods_fill_nodes_until_each_refuses_one_more() -> None:
    record = cluster(used("a"), used("b", 1), used("c", 2, 2))

    assert 7 == answer(record, container(gpus=1), pods=9).fit
    assert 3 == answer(record, container(gpus=2), pods=9).fit
    some = answer(record, container(gpus=1), pods=5)
    assert 5 == some.fit == sum(some.placed.values()) and some.reason is None


def test_pods_that_would_not_be_aligned_do_not_count() -> None:
    """Of three GPUs on each NUMA node two pods take two each; the two that are left are apart."""
    record = cluster(node_with("a", topology=machine(gpus=(0, 0, 0, 1, 1, 1))))

    assert 2 == answer(record, container(gpus=2), pods=3).fit


def test_some_of_several_pods_say_what_is_full() -> None:
    found = answer(cluster(used("a"), used("b", 2, 2)), container(gpus=2), pods=3)

    assert (2, {"a": 2}) == (found.fit, found.placed)
    assert found.reason is not None and ("FullWithThese", 1) == (found.reason.code, found.reason.nodes)
    assert ["FullWithThese", "NotEnoughDevices"] == [each.code for each in found.reasons]


def test_what_is_reserved_is_held_and_cannot_be_moved() -> None:
    reserved = ReservedContainer(
        container=ContainerName("main"), devices={GPU: tuple(DeviceID(f"GPU-{i}") for i in range(4))}
    )
    reservation = Reservation(
        pod_uid="u", namespace=Namespace("ml"), pod=PodName("next"), containers=(reserved,), seconds_left=5.0
    )
    record = msgspec.structs.replace(used("a"), reserved=(reservation,))

    found = answer(cluster(record), container(gpus=1))

    assert (0, ()) == (found.fit, found.changes)


def test_what_is_planned_for_a_gang_comes_first() -> None:
    """A pod with one GPU would have room on NUMA node 1, and its kubelet would take one of the three of node 0."""
    planned = ReservedContainer(
        container=ContainerName("main"),
        devices={GPU: tuple(DeviceID(f"GPU-{i}") for i in range(3))},
        cpus="1,2",
    )
    reservation = Reservation(
        pod_uid="u",
        namespace=Namespace("ml"),
        pod=PodName("next"),
        containers=(planned,),
        seconds_left=5.0,
        gang="ml/g",
    )
    bare = node_with("a", topology=machine(gpus=(0, 0, 0, 1, 1)))
    both = [
        answer(cluster(msgspec.structs.replace(bare, reserved=(each,))), container(gpus=1))
        for each in (reservation, msgspec.structs.replace(reservation, planned=True))
    ]
    reason = both[1].reason

    assert [1, 0] == [each.fit for each in both]
    assert reason is not None
    assert ("GangFirst", Resolvability.IN_USE, 1) == (reason.code, reason.resolvability, reason.nodes)
    assert "wait until they run" in reason.remedy


def test_a_pod_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"pod.containers"):
        diagnose(Nodes(cluster(used("a"))), PodRequest(name=PodName("p"), containers=()), SCORER)
    with pytest.raises(InvalidField, match="rules"):
        answer(cluster(used("a")), container(gpus=1), changes={"policy": "balanced"})


@pytest.mark.parametrize("wrong", ["negative", "twice", "far"])
def test_a_node_whose_hardware_cannot_be_does_not_end_the_answer(wrong: str) -> None:
    first, second = machine().nodes
    changes: dict[str, dict[str, Any]] = {
        "negative": {"nodes": (msgspec.structs.replace(first, id=-1), second)},
        "twice": {"nodes": (first, second, second)},
        "far": {"cpus": (msgspec.structs.replace(machine().cpus[0], id=1_000_000), *machine().cpus[1:])},
    }
    impossible = msgspec.structs.replace(machine(), **changes[wrong])

    found = answer(cluster(node_with("forged", topology=impossible), used("a")), container(gpus=1))

    assert (["a"], ["InvalidField"]) == ([each.node for each in found.admitting], [each.code for each in found.reasons])


def test_a_resource_that_no_node_lists_is_passed_over() -> None:
    """As the kubelet does; one that another node lists is missing on this one."""
    fpga = container(gpus=1, others={"example.com/fpga": 1})

    assert 1 == answer(cluster(used("a")), fpga).fit


def test_machines_with_other_uuids_are_of_one_kind() -> None:
    nodes = Nodes(cluster(*(node_with(f"n{i}", topology=machines(machine(), i)) for i in range(3))))

    assert 1 == len({id(node.kind) for node in nodes.asked})
    assert 12 == diagnose(nodes, pod(container(gpus=1)), SCORER, pods=20).fit


def test_a_record_folds_to_the_state_that_it_was_made_of() -> None:
    record = used("a", 1, 1)

    decoded = msgspec.json.decode(msgspec.json.encode(record), type=NodeRecord)

    assert prediction_basis(fold_record(record), TIME) == prediction_basis(fold_record(decoded), TIME)
    with pytest.raises(msgspec.ValidationError, match="another node"):
        msgspec.json.decode(msgspec.json.encode(record).replace(b'{"node":"a"', b'{"node":"b"', 1), type=NodeRecord)
