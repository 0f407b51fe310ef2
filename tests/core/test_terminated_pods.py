"""The facts of a node without what pods have that are gone: known by their UIDs, and by their names where it has no UID."""

import msgspec
import pytest
from decision_support import GIB, machine
from view_support import NODE, RULES, Says

from topoalign.core.model.events import Allocation, ContainerUsage, MemoryBlock, MemoryUse, Owner, UsageObserved
from topoalign.core.model.ids import GPU, MEMORY, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.state.fold import NodeState
from topoalign.core.state.terminated_pods import has_anything_of, without_pods

NAMES = {(Namespace("ml"), PodName("a"))}
OTHERS = [("u-b", "ml", "a"), ("u-b", "ml", "b"), ("", "ml", "b"), ("", "other", "a")]
"""UID, namespace and name of pods that are not the one which is gone: `u-a`, `ml/a`."""


def owner(namespace: str, name: str) -> Owner:
    return Owner(namespace=Namespace(namespace), pod=PodName(name), container=ContainerName("main"))


def block(node: int, gib: int) -> MemoryBlock:
    return MemoryBlock(resource=MEMORY, nodes=(node,), size=gib * GIB, taken=(gib * GIB,))


def given(uid: str, namespace: str, name: str) -> NodeState:
    """A node of which the record shows one GPU, CPU 1 and memory with this pod."""
    held = Allocation(
        id=AllocationID("held"),
        owner=owner(namespace, name),
        pod_uid=uid,
        devices={GPU: (DeviceID("GPU-0"),)},
        cpus="1",
        memory=(block(0, 3),),
    )
    return NodeState(node=NODE).holding(held)


def listed(*entries: CheckpointEntry, containers: tuple[ContainerUsage, ...] = ()) -> NodeState:
    """A node of which the kubelet's files show these."""
    says = Says(NODE, machine(), RULES)
    says.entries = entries
    usage = says.usage()
    assert isinstance(usage, UsageObserved)
    return NodeState(node=NODE).apply(msgspec.structs.replace(usage, containers=containers))


def entry(uid: str, node: int, gib: int) -> CheckpointEntry:
    return CheckpointEntry(pod_uid=uid, container=ContainerName("main"), memory=(block(node, gib),))


@pytest.mark.parametrize("uid", ["u-a", ""])
def test_what_the_record_has_for_a_pod_that_is_gone_is_free(uid: str) -> None:
    state = given(uid, "ml", "a")
    left = without_pods(state, {"u-a"}, NAMES)

    assert has_anything_of(state, "u-a", NAMES)
    assert ({}, {}) == (left.allocations, left.memory)


@pytest.mark.parametrize(("uid", "namespace", "name"), OTHERS)
def test_what_the_record_has_for_another_pod_stays(uid: str, namespace: str, name: str) -> None:
    """Also where it has the name of the one that is gone, as of a StatefulSet."""
    state = given(uid, namespace, name)

    assert not has_anything_of(state, "u-a", NAMES)
    assert state.allocations == without_pods(state, {"u-a"}, NAMES).allocations


def test_what_checkpoints_list_for_a_pod_that_is_gone_is_free() -> None:
    state = listed(entry("u-a", 0, 3), entry("u-b", 0, 2), entry("u-a", 1, 1))
    left = without_pods(state, {"u-a"}, NAMES)
    assert left.usage is not None and left.usage.kubelet is not None

    assert has_anything_of(state, "u-a", NAMES)
    assert ["u-b"] == [each.pod_uid for each in left.usage.kubelet.entries]
    assert {0: MemoryUse(reserved={MEMORY: 2 * GIB}, cells=(0,), assignments=1)} == left.usage.kubelet.memory
    assert not has_anything_of(left, "u-a", NAMES)


def test_of_what_podresources_shows_what_has_the_name_goes() -> None:
    """It has no UIDs."""
    shown = tuple(
        ContainerUsage(owner=owner(namespace, name), devices={GPU: (DeviceID(gpu),)})
        for namespace, name, gpu in (("ml", "a", "GPU-0"), ("ml", "b", "GPU-1"), ("other", "a", "GPU-2"))
    )
    left = without_pods(listed(containers=shown), {"u-a"}, NAMES)

    assert left.usage is not None
    assert shown[1:] == left.usage.containers


def test_of_a_node_that_shows_nothing_nothing_is_left_out() -> None:
    nothing = NodeState(node=NODE)

    assert nothing == without_pods(nothing, {"u-a"}, NAMES)
    assert not has_anything_of(nothing, "u-a", NAMES)
