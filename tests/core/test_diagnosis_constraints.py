"""Nodes that Kubernetes keeps a pod off have a reason of their own, and nobody is advised to wait for what never comes."""

from random import Random

import msgspec
import pytest
from decision_support import container, machine, pod
from diagnosis_support import RULES, cluster, node_with
from feasibility_support import demand_of, some_machine, some_pod, some_rules

from topoalign.core.demand.node_filters import Constraints, NodeTraits, Taint, Toleration
from topoalign.core.diagnosis.cluster_answer import ClusterAnswer
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import NodeRecord
from topoalign.core.hints.preconditions import UnknownResource
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import ContainerRequest, Policy
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name

SCORER = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
TAINT = Taint("dedicated", "NoSchedule", "infra")
CORDON = Taint("node.kubernetes.io/unschedulable", "NoSchedule")
POOL_A = Constraints({"pool": "a"})


def why(asked: ContainerRequest, constraints: Constraints | None, *nodes: NodeRecord) -> ClusterAnswer:
    return diagnose(Nodes(cluster(*nodes), constraints), pod(asked, name="asked"), SCORER)


def shown(record: NodeRecord, pool: str = "a", *, taints: tuple[Taint, ...] = (), cordoned: bool = False) -> NodeRecord:
    """The node as Kubernetes has it."""
    traits = NodeTraits(name=record.node, labels={"pool": pool}, taints=taints, unschedulable=cordoned)
    return msgspec.structs.replace(record, traits=traits)


def full(name: str) -> NodeRecord:
    """A node whose four GPUs are in use."""
    return node_with(name, *[pod(container(gpus=2), name=f"{name}-{number}") for number in range(2)])


def test_the_only_node_with_room_does_not_admit_a_pod_that_is_kept_off() -> None:
    """Fault S04: three nodes are full, and the affinity of the pod excludes the one that has room."""
    nodes = [shown(node_with("free"), "b"), *(shown(full(f"full-{number}")) for number in range(3))]

    found = why(container(gpus=1), POOL_A, *nodes)

    assert (0, 4, ()) == (found.fit, found.nodes, found.admitting)
    assert [(Resolvability.IN_USE, 3), (Resolvability.EXCLUDED, 1)] == [
        (each.resolvability, each.nodes) for each in found.reasons
    ]
    assert ("NodeNotAllowed", "excluded by nodeSelector pool=a") == (found.reasons[1].code, found.reasons[1].finding)
    assert "change the pod's nodeSelector, affinity or tolerations, or uncordon the node" == found.reasons[1].remedy


@pytest.mark.parametrize(
    ("node", "finding"),
    [
        (shown(node_with("n"), cordoned=True), "excluded by cordon"),
        (shown(node_with("n"), cordoned=True, taints=(CORDON,)), "excluded by cordon"),
        (shown(node_with("n"), taints=(TAINT,)), "excluded by taint dedicated=infra:NoSchedule"),
        (shown(node_with("n"), taints=(Taint("down", "NoExecute"),)), "excluded by taint down:NoExecute"),
        (
            shown(node_with("n"), "b", taints=(TAINT,), cordoned=True),
            "excluded by taint dedicated=infra:NoSchedule, cordon, nodeSelector pool=a",
        ),
        (node_with("n"), "Kubernetes has no such node"),
    ],
)
def test_the_reason_names_all_that_excludes_a_node(node: NodeRecord, finding: str) -> None:
    other = shown(node_with("other", topology=machine(gpus=(), nics=())))

    found = why(container(gpus=1), POOL_A, node, other)

    assert found.reason is not None
    assert (0, Resolvability.EXCLUDED, finding) == (found.fit, found.reason.resolvability, found.reason.finding)


def test_a_pod_that_tolerates_everything_is_not_kept_off() -> None:
    node = shown(node_with("n"), taints=(TAINT,), cordoned=True)

    assert 1 == why(container(gpus=1), Constraints(tolerations=(Toleration(operator="Exists"),)), node).fit


def test_nodes_are_judged_by_topology_alone_where_kubernetes_was_not_read() -> None:
    """Neither nodes without objects nor a pod without a manifest can be judged by constraints."""
    assert 1 == why(container(gpus=1), POOL_A, node_with("n")).fit
    assert 1 == why(container(gpus=1), None, shown(node_with("n"), cordoned=True)).fit


def test_no_change_is_suggested_for_a_node_that_is_kept_off() -> None:
    """The pod fits on `b` with fewer GPUs, and may not go there; on `a` nothing is left."""
    found = why(container(gpus=3), POOL_A, shown(full("a")), shown(node_with("b"), "b"))

    assert [] == [each.text for each in found.changes if each.asked]
    assert {"a"} == {each.example for each in found.changes}


def test_a_kept_off_node_that_never_fits_is_not_the_main_reason() -> None:
    """A pod too large for every node: the taint of a node without GPUs, or of a small one, is not why it waits."""
    bare = node_with("bare", topology=machine(gpus=(), nics=()))

    found = why(container(gpus=8), POOL_A, shown(node_with("a")), shown(node_with("b"), "b"), shown(bare, "b"))

    assert [Resolvability.NEVER, Resolvability.NEVER, Resolvability.MISSING] == [
        each.resolvability for each in found.reasons
    ]
    assert [1, 1, 1] == [each.nodes for each in found.reasons]
    assert {"NodeNotAllowed"} == {each.code for each in found.reasons if each.examples != ("a",)}


def test_a_node_that_is_kept_off_is_not_called_stale() -> None:
    """What its allocator would answer does not matter."""
    silent = msgspec.structs.replace(shown(node_with("n"), "b"), silent=True)

    assert ["NodeNotAllowed"] == [each.code for each in why(container(gpus=1), POOL_A, silent).reasons]


def test_nobody_is_advised_to_wait_for_a_node_that_never_fits() -> None:
    """Random machines, rules, allocations and pods: a remedy says wait only for a node that would admit the pod empty."""
    never = 0
    for seed in range(150):
        chance = Random(seed)
        hardware = some_machine(chance)
        rules = some_rules(chance, hardware)
        asked = some_pod(chance, hardware, "asked")
        if demand_of(asked, rules) is None:
            continue
        node = node_with("n", topology=hardware, rules=rules)

        found = diagnose(Nodes(cluster(node)), asked, SCORER)

        if found.reason is not None and found.reason.code != UnknownResource.code:
            never += 1
            assert found.reason.resolvability in (Resolvability.NEVER, Resolvability.NOT_KNOWN)
            assert "wait" not in found.reason.remedy
    assert never > 20


def test_a_node_that_never_fits_is_described_as_if_it_were_empty() -> None:
    """Two GPUs of four are in use, on one NUMA node: three are too many now, and not aligned even later."""
    rules = msgspec.structs.replace(RULES, policy=Policy.SINGLE_NUMA_NODE)
    used = node_with("n", pod(container(gpus=2), name="p"), rules=rules)

    found = why(container(gpus=3), None, used)

    assert found.reason is not None and Resolvability.NEVER == found.reason.resolvability
    assert "policy single-numa-node refuses container 'main'" in found.reason.finding
    assert found.reason.finding.endswith("; needed, and free on NUMA nodes 0-1: 3 nvidia.com/gpu (2, 2)")
    assert "the pod never fits on this node: ask for 2 instead of 3 nvidia.com/gpu" in found.reason.remedy
    assert NodeName("n") == found.reason.examples[0]
