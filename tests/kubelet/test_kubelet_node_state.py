"""What is read from a kubelet's files is what it holds: the next decision is the same as without the detour."""

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from decision_support import GIB, NODE, container, machine, node, pod
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet_files_support import write_files

from topoalign.core.admission.admit import admit
from topoalign.core.admission.kubelet_devices import explain_unavailable_resources
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission, Decision, Explanation, Refusal
from topoalign.core.model.errors import InvalidField, StateFault
from topoalign.core.model.ids import CPU, GPU, MEMORY, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import device_checkpoint
from topoalign.kubelet.files.device_checkpoint import CheckpointData, PodDevicesEntry
from topoalign.kubelet.files.node_state import KubeletNode, node_state

RULES = AdmissionRules(
    mode=Mode.KUBELET, policy=Policy.RESTRICTED, reserved_cpus="0", reserved_memory={0: {MEMORY: GIB}}
)


def read(state: NodeState, root: Path, rules: AdmissionRules = RULES) -> KubeletNode:
    assert state.topology is not None and state.health is not None
    return node_state(state.topology, state.health, root, rules)


def admitting(topology: Topology, pods: list[PodRequest], rules: AdmissionRules) -> NodeState:
    """The node with those of the pods that fit."""
    state = node(topology, unhealthy=["GPU-3"])
    for each in pods:
        decision = admit(state, each, rules)
        if isinstance(decision, Admission):
            for allocation in decision.allocations:
                state = state.holding(allocation)
    return state


def without_reasons(decision: Decision) -> Decision:
    return msgspec.structs.replace(decision, explanation=Explanation())


sizes = st.tuples(st.integers(0, 2), st.sampled_from([0, 0.5, 1, 2, 4]), st.sampled_from([0, 1, 20, 90]))


@settings(max_examples=60)
@given(
    st.lists(st.lists(sizes, min_size=1, max_size=2), max_size=5),
    sizes,
    st.sampled_from([Policy.RESTRICTED, Policy.BEST_EFFORT, Policy.NONE]),
    st.booleans(),
)
def test_the_files_lead_to_the_decision_of_the_state_they_were_made_of(
    wanted: list[list[tuple[int, float, int]]], last: tuple[int, float, int], policy: Policy, strict: bool
) -> None:
    """A decision from the files is the decision from the state of which they were written."""
    rules = msgspec.structs.replace(
        RULES, policy=policy, cpu_options=frozenset({CpuOption.STRICT_RESERVATION} if strict else ())
    )
    pods = [
        pod(*(container(f"c{i}", *amounts) for i, amounts in enumerate(containers)), name=f"uid-{place}")
        for place, containers in enumerate(wanted)
    ]
    held = admitting(machine(nodes=4), pods, rules)
    with TemporaryDirectory() as root:
        write_files(Path(root), held, rules)
        found = read(held, Path(root), rules)

    assert () == found.findings
    assert held.ownership.cpus_in_use == found.state.ownership.cpus_in_use
    assert held.ownership.holders.keys() == found.state.ownership.holders.keys()
    assert held.memory == found.state.memory
    expected, actual = (admit(state, pod(container("main", *last)), rules) for state in (held, found.state))
    assert without_reasons(expected) == without_reasons(actual)


def test_what_a_container_holds_is_one_allocation_of_a_pod_named_by_uid(tmp_path: Path) -> None:
    """What one container holds is one allocation of a pod that is named by its UID."""
    held = admitting(machine(), [pod(container("main", gpus=2, cpus=4, gib=8), name="uid-1")], RULES)
    write_files(tmp_path, held, RULES)

    (allocation,) = read(held, tmp_path).state.allocations.values()

    assert allocation.owner is not None
    assert ("", "uid-1", "main") == (allocation.owner.namespace, allocation.owner.pod, allocation.owner.container)
    assert (2, 8 * GIB) == (len(allocation.devices[GPU]), allocation.memory[0].size)
    assert "1-2,9-10" == allocation.cpus


def test_files_that_are_not_there_hold_nothing_and_are_named(tmp_path: Path) -> None:
    found = read(node(machine()), tmp_path)

    assert {} == found.state.allocations
    assert ["cpu_manager_state", "memory_manager_state", "kubelet_internal_checkpoint"] == [
        finding.split(":")[0].rsplit("/", 1)[1] for finding in found.findings
    ]


@pytest.mark.parametrize(
    "name", ["cpu_manager_state", "memory_manager_state", "device-plugins/kubelet_internal_checkpoint"]
)
def test_a_file_that_cannot_be_read_is_an_error_and_not_an_empty_node(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, node(machine()), RULES)
    for spoil in (Path.unlink, Path.mkdir):
        spoil(tmp_path / name)

    with pytest.raises(StateFault, match="cannot be read"):
        read(node(machine()), tmp_path)


def test_a_device_that_its_plugin_has_not_listed_as_healthy_is_not_given(tmp_path: Path) -> None:
    state = node(machine())
    (tmp_path / "device-plugins").mkdir()
    device_checkpoint.store(tmp_path / "device-plugins", CheckpointData(None, {GPU: ["GPU-1", "GPU-2"]}))

    assert ("GPU-1", "GPU-2") == tuple(read(state, tmp_path).state.ownership.free(GPU))


def test_a_resource_whose_plugin_has_gone_is_given_to_nobody(tmp_path: Path) -> None:
    """
    Nothing more is given of a resource whose plugin has gone while containers have some of it. Five minutes after its
    plugin went, the kubelet lists a resource no more, but it still knows it by what containers have: "cannot allocate
    unregistered device". A resource of which nobody has any it passes over.
    """
    fpga = ResourceName("example.com/fpga")
    entries = [
        PodDevicesEntry("uid-1", "main", name, {0: [device]}, b"") for name, device in ((GPU, "GPU-0"), (fpga, "f"))
    ]
    (tmp_path / "device-plugins").mkdir()
    device_checkpoint.store(tmp_path / "device-plugins", CheckpointData(entries))

    found = read(node(machine()), tmp_path)

    assert () == tuple(found.state.healthy(GPU))
    assert isinstance(admit(found.state, pod(container("main", gpus=1)), RULES), Refusal)
    with pytest.raises(InvalidField, match=r"limits\[example.com/fpga\]"):
        explain_unavailable_resources(
            read_pod(pod(container("main", others={fpga: 1})), RULES), machine(), found.registered
        )


def test_devices_of_another_machine_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "device-plugins").mkdir()
    device_checkpoint.store(tmp_path / "device-plugins", CheckpointData(None, {GPU: ["GPU-9\x1b"]}))

    with pytest.raises(StateFault, match=r"'GPU-9\?', which the machine does not have"):
        read(node(machine()), tmp_path)


def test_a_resource_that_only_the_kubelet_knows_cannot_be_predicted() -> None:
    """
    A resource that the kubelet knows and the machine does not cannot be predicted; one that nobody knows gets a note.
    """
    fpga = ResourceName("example.com/fpga")
    asking = pod(container("main", others={fpga: 1}))

    with pytest.raises(InvalidField, match=r"limits\[example.com/fpga\]"):
        explain_unavailable_resources(read_pod(asking, RULES), machine(), {fpga: frozenset({DeviceID("f")})})
    (note,) = explain_unavailable_resources(read_pod(asking, RULES), machine(), {})
    assert note.startswith("nobody lists example.com/fpga")
    assert () == explain_unavailable_resources(
        read_pod(pod(container("main", gpus=1, others={CPU: 1000})), RULES), machine(), {}
    )


def test_the_node_keeps_its_name_and_hardware(tmp_path: Path) -> None:
    state = node(machine())

    assert (NODE, state.hardware) == ((found := read(state, tmp_path).state).node, found.hardware)
