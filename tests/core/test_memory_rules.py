"""The memory manager's settings are judged by sign and by machine; what the kubelet panics over is no admission."""

from collections.abc import Mapping

import msgspec
import pytest
from decision_support import GIB, admitted, container, machine, node, pod, refused

from topoalign.core.admission.admit import admit
from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import MEMORY, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.model.topology.model import Topology

PAGES = ResourceName("hugepages-1Gi")


def paged(*pages: Mapping[ResourceName, int]) -> Topology:
    """Two NUMA nodes with 64 GiB each, and these hugepages of it."""
    bare = machine()
    nodes = [
        msgspec.structs.replace(each, hugepages=dict(given)) for each, given in zip(bare.nodes, pages, strict=True)
    ]
    return msgspec.structs.replace(bare, nodes=tuple(nodes))


@pytest.mark.parametrize(("resource", "size"), [(MEMORY, -1), (PAGES, -GIB), (ResourceName("cpu"), 1)])
def test_amounts_that_cannot_be_kept_are_named_by_their_path(resource: ResourceName, size: int) -> None:
    with pytest.raises(InvalidField, match=rf"rules\.reserved_memory\[1\]\[{resource}\]") as caught:
        check_rules(AdmissionRules(reserved_memory={0: {MEMORY: 1}, 1: {resource: size}}))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("reserved", "finding"),
    [
        ({7: {MEMORY: GIB}}, "NUMA node 7, which the machine does not have"),
        ({0: {MEMORY: GIB}, 1: {MEMORY: 65 * GIB}}, "of NUMA node 1, which has"),
        ({1: {MEMORY: 65 * GIB}, 0: {MEMORY: 66 * GIB}}, "of NUMA node 0, which has"),
        ({0: {PAGES: 5 * GIB}}, "hugepages-1Gi of NUMA node 0"),
    ],
)
def test_no_kubelet_runs_that_keeps_what_the_machine_does_not_have(
    reserved: dict[int, dict[ResourceName, int]], finding: str
) -> None:
    state = node(paged({PAGES: 4 * GIB}, {PAGES: 4 * GIB}))
    rules = AdmissionRules(mode=Mode.KUBELET, reserved_memory=reserved)

    refusal = refused(admit(state, pod(container(cpus=1, gib=1)), rules))

    assert "KubeletWouldNotStart" == refusal.code
    assert finding in refusal.finding
    assert admitted(admit(state, pod(container(cpus=1, gib=1)), msgspec.structs.replace(rules, memory_manager="None")))


def test_all_memory_of_a_node_may_be_reserved_and_none_of_a_missing_node() -> None:
    """All memory of a node may be reserved, and none of a node that does not exist."""
    rules = AdmissionRules(mode=Mode.KUBELET, reserved_memory={0: {MEMORY: 64 * GIB}, 9: {MEMORY: 0}})

    assert admitted(admit(node(machine()), pod(container(cpus=1, gib=1)), rules))


@pytest.mark.parametrize(
    ("mode", "other", "code"),
    [
        (Mode.KUBELET, {}, "HugepagesUnevenlyKnown"),
        (Mode.KUBELET, {PAGES: 0}, None),
        (Mode.BEST, {}, None),
    ],
)
def test_a_pod_over_which_the_kubelet_panics_is_never_admitted_for_it(
    mode: Mode, other: dict[ResourceName, int], code: str | None
) -> None:
    state = node(paged({PAGES: 4 * GIB}, other))
    asked = pod(container(cpus=1, gib=1, others={PAGES: GIB}))

    decision = admit(state, asked, AdmissionRules(mode=mode))

    if code is None:
        assert admitted(decision)
    else:
        assert code == refused(decision).code
        assert "NUMA nodes 1" in refused(decision).finding


def test_the_kubelet_does_not_panic_where_its_memory_manager_does_not_look() -> None:
    state = node(paged({PAGES: 4 * GIB}, {}))
    burstable = container(gib=1, others={PAGES: GIB})

    assert admitted(admit(state, pod(burstable), AdmissionRules(mode=Mode.KUBELET)))
    guaranteed = pod(container(cpus=1, gib=1, others={PAGES: GIB}))
    assert admitted(admit(state, guaranteed, AdmissionRules(mode=Mode.KUBELET, memory_manager="None")))


def with_ids(*ids: int) -> Topology:
    """A machine whose NUMA nodes have these ids in place of 0, 1, …"""
    topology = machine()
    return msgspec.structs.replace(
        topology,
        nodes=tuple(msgspec.structs.replace(each, id=number) for each, number in zip(topology.nodes, ids, strict=True)),
        cpus=tuple(msgspec.structs.replace(cpu, node=ids[cpu.node]) for cpu in topology.cpus),
        gpus=tuple(msgspec.structs.replace(gpu, numa_affinity=(ids[gpu.numa_affinity[0]],)) for gpu in topology.gpus),
        nics=(),
        links=(),
    )


@pytest.mark.parametrize(
    ("ids", "rules", "asked", "code"),
    [
        ((2, 3), {}, container(cpus=2, gib=1), "NumaIdsSparse"),
        ((0, 2), {}, container(cpus=2, gib=1), "NumaIdsSparse"),
        ((2, 3), {"policy": Policy.RESTRICTED}, container(gpus=1), "NumaIdsSparse"),
        ((0, 1), {}, container(cpus=2, gib=1), None),
        ((2, 3), {"policy": Policy.SINGLE_NUMA_NODE}, container(cpus=2, gib=1), None),
        ((2, 3), {"policy": Policy.NONE}, container(cpus=2, gib=1), None),
        ((2, 3), {"prefer_closest_numa_nodes": False}, container(cpus=2, gib=1), None),
        ((2, 3), {"mode": Mode.BEST}, container(cpus=2, gib=1), None),
        ((2, 3), {"cpu_manager": "none", "memory_manager": "None"}, container(cpus=2, gib=1), None),
        ((2, 3), {}, container(), None),
    ],
)
def test_a_kubelet_that_looks_up_distances_that_are_not_there_panics(
    ids: tuple[int, ...], rules: dict[str, object], asked: ContainerRequest, code: str | None
) -> None:
    """Under prefer-closest-numa-nodes the kubelet panics over gaps in the ids of the NUMA nodes, for pods with hints."""
    usual = AdmissionRules(mode=Mode.KUBELET, policy=Policy.BEST_EFFORT, prefer_closest_numa_nodes=True)
    decision = admit(node(with_ids(*ids)), pod(asked), msgspec.structs.replace(usual, **rules))

    assert code == (decision.code if isinstance(decision, Refusal) else None)
