"""The CPU manager's options in a decision: what they refuse, and in which order."""

import pytest
from decision_support import admitted, asking, container, granted, machine, node, pod, refused

from topoalign.core.admission.admit import admit
from topoalign.core.hints.cpu import CpuProvider, available_cpus, shared_cpus
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import AllocationGranted, AllocationReleased
from topoalign.core.model.ids import CPU, MEMORY, AllocationID
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode, Policy
from topoalign.core.model.topology.model import Cpu, NumaNode, Topology
from topoalign.core.state.fold import NodeState

WHOLE_CORES = AdmissionRules(mode=Mode.KUBELET, cpu_options=frozenset({CpuOption.FULL_PCPUS_ONLY}))
GUARANTEED = 1
"""GiB: with CPUs and memory requested as they are limited, a pod is Guaranteed."""


def options(*names: CpuOption) -> AdmissionRules:
    return AdmissionRules(mode=Mode.KUBELET, cpu_options=frozenset(names))


def test_a_container_that_would_split_a_core_is_refused() -> None:
    """A container that would split a core is refused with the error of the kubelet."""
    refusal = refused(admit(node(machine()), pod(container(cpus=3, gib=GUARANTEED)), WHOLE_CORES))

    assert ("SMTAlignmentError", "SplitCore") == (refusal.reason, refusal.code)
    assert ("main", "cpu") == (refusal.container, refusal.provider)


def test_whole_cores_are_checked_before_cpus_are_taken_and_after_devices() -> None:
    """Seventeen CPUs are more than there are, but they also split a core; GPUs that are missing are missed first."""
    state = node(machine(), unhealthy=["GPU-3"])

    split = refused(admit(state, pod(container(cpus=17, gib=GUARANTEED)), WHOLE_CORES))
    missing = refused(admit(state, pod(container(cpus=17, gpus=4, gib=GUARANTEED)), WHOLE_CORES))

    assert ("SplitCore", "cpu") == (split.code, split.provider)
    assert ("NotEnoughDevices", "device") == (missing.code, missing.provider)


def test_too_few_cores_without_a_reserved_sibling_refuse_the_container() -> None:
    rules = AdmissionRules(mode=Mode.KUBELET, cpu_options=frozenset({CpuOption.FULL_PCPUS_ONLY}), reserved_cpus="0,1")

    refusal = refused(admit(node(machine()), pod(container(cpus=14, gib=GUARANTEED)), rules))

    assert ("SMTAlignmentError", "NotEnoughCores") == (refusal.reason, refusal.code)


def test_reserved_cpus_stay_shared_unless_reservation_is_strict() -> None:
    """Reserved CPUs stay in the shared pool unless reservation is strict."""
    state = node(machine())
    loose = AdmissionRules(reserved_cpu_count=2)
    strict = AdmissionRules(reserved_cpu_count=2, cpu_options=frozenset({CpuOption.STRICT_RESERVATION}))

    assert {0, 8} == shared_cpus(state, loose) - shared_cpus(state, strict)
    assert available_cpus(state, loose) == available_cpus(state, strict) == set(range(16)) - {0, 8}


def test_cpus_reserved_by_number_are_given_to_nobody() -> None:
    got = admitted(admit(node(machine()), pod(container(cpus=14)), AdmissionRules(reserved_cpu_count=2)))["main"]

    assert "1-7,9-15" == got.cpus


FOUR_NODES = Topology(
    cpus=tuple(Cpu(id=cpu, core=cpu, socket=cpu // 8, node=cpu // 4, uncore=cpu // 4) for cpu in range(16)),
    nodes=tuple(NumaNode(id=i) for i in range(4)),
)
"""Two sockets of two NUMA nodes of four CPUs."""


def test_aligned_by_socket_the_nodes_of_one_socket_are_preferred() -> None:
    """
    With CPUs aligned by socket, all NUMA nodes of one socket are preferred and no others. Two CPUs fit on one node.
    With the option the two nodes of a socket are as good, and two of different sockets not.
    """

    def preferred(rules: AdmissionRules) -> set[int]:
        asked = pod(container(cpus=2, gib=GUARANTEED))
        hints = CpuProvider().hints(asking(node(FOUR_NODES), asked, asked.containers[0].name, rules))[CPU]
        assert isinstance(hints, tuple)
        return {hint.affinity or 0 for hint in hints if hint.preferred}

    assert {0b0001, 0b0010, 0b0100, 0b1000} == preferred(options())
    assert {0b0001, 0b0010, 0b0100, 0b1000, 0b0011, 0b1100} == preferred(options(CpuOption.ALIGN_BY_SOCKET))


@pytest.mark.parametrize(
    ("rules", "field", "what"),
    [
        (options(CpuOption.FULL_PCPUS_ONLY, CpuOption.DISTRIBUTE_ACROSS_CORES), "cpu_options", "both full-pcpus-only"),
        (options(CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.DISTRIBUTE_ACROSS_CORES), "cpu_options", "across-cores"),
        (options(CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_CORES), "cpu_options", "uncorecache"),
        (options(CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_NUMA), "cpu_options", "across-numa"),
        (
            AdmissionRules(policy=Policy.SINGLE_NUMA_NODE, cpu_options=frozenset({CpuOption.ALIGN_BY_SOCKET})),
            "cpu_options",
            "align-by-socket under policy single-numa-node",
        ),
        (AdmissionRules(cpu_manager="none", cpu_options=frozenset({CpuOption.PREFER_UNCORE})), "cpu_options", "none"),
        (AdmissionRules(reserved_cpu_count=-1), "reserved_cpu_count", "-1 is below 0"),
    ],
)
def test_options_that_contradict_are_an_error_that_names_the_field(
    rules: AdmissionRules, field: str, what: str
) -> None:
    """Options that contradict one another are an error that names the field."""
    with pytest.raises(InvalidField, match=what) as error:
        admit(node(machine()), pod(container(cpus=2)), rules)

    assert f"rules.{field}" == error.value.field
    assert error.value.remedy


@pytest.mark.parametrize(
    ("topology", "rules", "finding"),
    [
        (
            machine(),
            AdmissionRules(reserved_cpus="0,16-17"),
            "reserved_cpus names CPUs that the machine does not have, 16-17",
        ),
        (machine(), AdmissionRules(reserved_cpu_count=17), "reserved_cpu_count is 17, and the machine has 16 CPUs"),
        (
            Topology(
                cpus=tuple(Cpu(id=i, core=i, socket=i, node=0, uncore=i) for i in range(2)), nodes=(NumaNode(id=0),)
            ),
            options(CpuOption.ALIGN_BY_SOCKET),
            "more sockets (2) than NUMA nodes with CPUs (1)",
        ),
    ],
)
def test_where_the_kubelet_would_not_start_a_pod_is_refused_and_told_so(
    topology: Topology, rules: AdmissionRules, finding: str
) -> None:
    refusal = refused(admit(node(topology), pod(container(cpus=1)), rules))

    assert "KubeletWouldNotStart" == refusal.code
    assert finding in refusal.finding
    assert "the kubelet does not start" in refusal.finding


def test_a_request_without_cpus_is_admitted_where_none_are_known() -> None:
    """
    A request that needs no CPUs is admitted where no CPUs are known. A pasted matrix has GPUs and no CPUs; the CPUs
    kept for the system are no matter there.
    """
    without_cpus = Topology(gpus=machine().gpus, nodes=machine().nodes)

    admitted(
        admit(node(without_cpus), pod(container(gpus=1)), AdmissionRules(reserved_cpus="0-3", reserved_cpu_count=2))
    )


def changed(state: NodeState, *facts: AllocationGranted | AllocationReleased) -> NodeState:
    for fact in facts:
        state = state.apply(fact)
    return state


def released(state: NodeState, name: str) -> NodeState:
    gone = AllocationReleased(
        node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=AllocationID(name), reason="gone"
    )
    return changed(state, gone)


@pytest.mark.parametrize(("mode", "left"), [(Mode.KUBELET, {0: 14, 1: 56}), (Mode.BEST, {0: 64, 1: 6})])
def test_in_kubelet_mode_shared_memory_returns_to_the_lowest_node_first(mode: Mode, left: dict[int, int]) -> None:
    """
    In mode `kubelet`, released memory that spans several NUMA nodes goes back to the lowest node first. Two pods have
    70 GiB and 50 GiB of two nodes with 64 GiB each: the first 64 + 6, the second 0 + 50. When the second has gone, the
    kubelet holds that its 50 GiB were of node 0; in mode `best` they go back to node 1.
    """
    rules = AdmissionRules(mode=mode, policy=Policy.NONE)
    state = node(machine())
    for name, gib in (("a", 70), ("b", 50)):
        state = granted(state, admit(state, pod(container(cpus=1, gib=gib), name=name), rules))

    state = released(state, "default/b/main")

    assert left == {node: use.reserved.get(MEMORY, 0) >> 30 for node, use in state.memory.items()}


def test_kubelet_mode_tells_what_a_refused_pod_had_been_given() -> None:
    """
    In mode `kubelet`, a refusal tells what the pod had been given before. The init container was given its CPUs before
    the app container was refused.
    """
    asked = pod(container(cpus=3, gib=1), init=[container("load", cpus=2, gib=1)])
    mine = AdmissionRules(cpu_options=WHOLE_CORES.cpu_options)

    theirs = refused(admit(node(machine()), asked, WHOLE_CORES)).undone
    assert ["load"] == [each.owner.container for each in theirs if each.owner]
    assert () == refused(admit(node(machine()), asked, mine)).undone
