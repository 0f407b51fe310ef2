"""The checkpoints of the CPU and memory managers: what kubelets wrote is read, and nothing else is trusted."""

import json
from typing import Any

import pytest
from decision_support import GIB, machine
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.ids import MEMORY
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.kubelet.files import cpu_checkpoint, memory_checkpoint
from topoalign.testing.fake_kubelet.files import cpu_file, memory_file

CPU_FILES = {
    "v1.34, two containers": '{"policyName":"static","defaultCpuSet":"0-1,6-11","entries":{'
    '"4aec46af-22b7-4e26-babb-d15383ac9151":{"mysqld":"2-3"},"60008d73-6f6f-4467-96c5-cd0a1eeadf23":{"mysqld2":"4-5"}},'
    '"checksum":2764424633}',
    "nothing given": '{"policyName":"static","defaultCpuSet":"0-63","checksum":1058907510}',
    "strict reservation": '{"policyName":"static","defaultCpuSet":"2-15,17-31,34-47,49-63","checksum":4141502832}',
    "two containers of a pod": '{"policyName":"static","defaultCpuSet":"0-1,6-13,18-23","entries":{'
    '"28c11c89-3493-4972-bb67-7090b9d75e0d":{"mytestclient":"2-3,14-15","mytestclient2":"4-5,16-17"}},'
    '"checksum":1684933537}',
    "policy none": '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}',
    "pod-level resources in the struct": '{"policyName":"static","defaultCpuSet":"7-9","entries":{'
    '"pod":{"container1":"4-6","container2":"1-3"}},"checksum":1942532442}',
}
"""As kubelets of several releases and Kubernetes' own tests have them."""

ONE_NODE = (
    '"policyName":"static","machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":2048,'
    '"systemReserved":512,"allocatable":1536,"reserved":512,"free":1024}},"cells":[]}},'
    '"entries":{"pod":{"container1":[{"numaAffinity":[0],"type":"memory","size":512}]}}'
)
MEMORY_FILES = {
    "policy None": ('{"policyName":"None","machineState":{},"checksum":4236770233}', {}),
    "one block": (f'{{{ONE_NODE},"checksum":4215593881}}', {0: 512}),
    "content in data": (
        json.dumps({"policyName": "other", "machineState": {}, "checksum": 1, "data": f"{{{ONE_NODE}}}"})[:-1]
        + ',"dataChecksum":1849615440}',
        {0: 512},
    ),
}
"""As Kubernetes' own tests and a running kubelet have them."""


@pytest.mark.parametrize("content", CPU_FILES.values(), ids=CPU_FILES)
def test_cpu_state_that_a_kubelet_wrote_has_the_checksum_it_says(content: str) -> None:
    state = cpu_checkpoint.decode_cpu_checkpoint(content.encode())

    assert json.loads(content)["policyName"] == state.policy_name
    with pytest.raises(StateFault, match="checksum"):
        cpu_checkpoint.decode_cpu_checkpoint(content.replace('"checksum":', '"checksum":1').encode())


@pytest.mark.parametrize(("content", "reserved"), MEMORY_FILES.values(), ids=MEMORY_FILES)
def test_memory_state_that_a_kubelet_wrote_has_the_checksum_it_says(content: str, reserved: dict[int, int]) -> None:
    state = memory_checkpoint.decode_memory_checkpoint(content.encode())

    assert reserved == {node: use.reserved[MEMORY] for node, use in state.use.items()}
    for field in ('"checksum":4', '"dataChecksum":18'):
        if field in content:
            with pytest.raises(StateFault, match="checksum"):
                memory_checkpoint.decode_memory_checkpoint(content.replace(field, field + "1").encode())


def test_cpus_of_a_file_without_a_checksum_are_read_as_the_kubelet_does() -> None:
    """The CPUs of a file without a checksum are accepted as the kubelet accepts them."""
    state = cpu_checkpoint.decode_cpu_checkpoint(
        b'{"policyName":"static","defaultCpuSet":"0","entries":{"u":{"c":"1-2"}},"checksum":0}'
    )

    assert {("u", "c"): frozenset({1, 2})} == state.exclusive


DECODERS: dict[Any, Any] = {
    cpu_checkpoint: cpu_checkpoint.decode_cpu_checkpoint,
    memory_checkpoint: memory_checkpoint.decode_memory_checkpoint,
}


@pytest.mark.parametrize("module", DECODERS)
@given(st.data())
def test_no_truncated_changed_or_random_file_is_trusted_or_ends_in_a_trace(module: Any, data: st.DataObject) -> None:
    """Each byte of a sound file matters, except in the blanks of JSON and in the case of escapes: there are none here."""
    sound = (
        CPU_FILES["two containers of a pod"] if module is cpu_checkpoint else MEMORY_FILES["one block"][0]
    ).encode()
    place = data.draw(st.integers(0, len(sound) - 1))
    noise = data.draw(
        st.one_of(
            st.binary(max_size=200),
            st.just(sound[:place]),
            st.integers(0, 255).map(lambda byte: sound[:place] + bytes([byte]) + sound[place + 1 :]),
        )
    )
    before = DECODERS[module](sound)
    try:
        state = DECODERS[module](noise)
    except StateFault as fault:
        assert fault.remedy
    else:
        assert (before.policy_name, before.entries) == (state.policy_name, state.entries)


@pytest.mark.parametrize("module", DECODERS)
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"null", b"\xff\xfe", b'{"a":' * 100_000, b"[" * 100_000, b'{"podEntries":{"u":{}}}']
)
def test_what_is_no_checkpoint_is_refused_by_name(module: Any, content: bytes) -> None:
    with pytest.raises(StateFault, match=module.NAME):
        DECODERS[module](content)


@pytest.mark.parametrize("module", DECODERS)
def test_resources_of_whole_pods_are_refused(module: Any) -> None:
    """Resources of whole pods are refused, because what they hold cannot be told."""
    content = b'{"policyName":"static","defaultCpuSet":"","machineState":{},"podEntries":{"u":{"cpuSet":"1"}}}'

    with pytest.raises(StateFault, match="PodLevelResourceManagers"):
        DECODERS[module](content)


RULES = AdmissionRules(mode=Mode.KUBELET, reserved_cpus="0-1")


@pytest.mark.parametrize(
    ("policy", "shared", "entries", "rules", "finding"),
    [
        ("none", "0-15", {}, RULES, "kept under policy 'none'"),
        ("static", "0-16", {}, RULES, "CPUs 16, which the machine does not have"),
        ("static", "0-13", {}, RULES, "CPUs 14-15 stand neither"),
        ("static", "0-15", {"u": {"c": "15"}}, RULES, "CPUs 15 are in the shared pool and belong"),
        ("static", "0-12", {"u": {"c": "13-15"}, "v": {"c": "13"}}, RULES, "CPUs 13 belong to two pods"),
        ("static", "1-15", {"u": {"c": "0"}}, RULES, "CPUs 0 are kept for the system and not in the shared pool"),
        (
            "static",
            "0-15",
            {},
            AdmissionRules(reserved_cpus="0-1", cpu_options=frozenset({CpuOption.STRICT_RESERVATION})),
            "CPUs 0-1 are kept for the system and in the shared pool",
        ),
    ],
)
def test_cpu_state_that_cannot_be_true_of_the_machine_is_refused(
    policy: str, shared: str, entries: dict[str, dict[str, str]], rules: AdmissionRules, finding: str
) -> None:
    state = cpu_checkpoint.decode_cpu_checkpoint(cpu_file(policy, shared, entries))

    with pytest.raises(StateFault, match=finding):
        cpu_checkpoint.check_cpu_state(state, machine(), rules)


def test_containers_of_one_pod_may_share_cpus_and_a_state_may_have_none() -> None:
    """
    The containers of one pod may have the same CPUs: an app container takes over those of an init container. A state
    without CPUs is that of a kubelet before its first pod.
    """
    for shared, entries in (("0-7,12-15", {"u": {"init": "8-9", "app": "8-11"}}), ("", {})):
        cpu_checkpoint.check_cpu_state(
            cpu_checkpoint.decode_cpu_checkpoint(cpu_file("static", shared, entries)), machine(), RULES
        )


def node(assignments: int = 0, cells: list[int] | None = None, **table: int) -> dict[str, Any]:
    memory = {"total": 8, "systemReserved": 1, "allocatable": 7, "reserved": 0, "free": 7, **table}
    return {"numberOfAssignments": assignments, "memoryMap": {"memory": memory}, "cells": cells}


def block(size: int, *nodes: int) -> dict[str, Any]:
    return {"u": {"c": [{"numaAffinity": nodes, "type": "memory", "size": size}]}}


@pytest.mark.parametrize(
    ("nodes", "entries", "finding"),
    [
        ({0: node(reserved=9, free=-2)}, {}, "cannot be trusted"),
        ({0: node(reserved=8, free=7)}, block(8, 0), "does not add up"),
        ({0: node(allocatable=9, free=9)}, {}, "does not add up"),
        ({0: node(cells=[0, 1]), 1: node()}, {}, "nothing is assigned"),
        ({0: node(1, cells=[1]), 1: node()}, {}, "cannot be in the group 1"),
        ({0: node(1, cells=[0, 2]), 1: node()}, {}, "cannot be in the group 0,2"),
        ({0: node(1, cells=[1, 0]), 1: node()}, {}, "cannot be in the group"),
        ({0: node(1, reserved=2, free=5)}, block(3, 0), "containers hold 3 bytes of memory, the NUMA nodes gave 2"),
        ({0: node(1, reserved=2, free=5)}, block(2, 1), "is nowhere"),
        ({0: node(1, reserved=2, free=5)}, block(2), "is nowhere"),
    ],
)
def test_memory_state_that_contradicts_itself_is_refused(
    nodes: dict[int, Any], entries: dict[str, Any], finding: str
) -> None:
    with pytest.raises(StateFault, match=finding):
        content = {"policyName": "Static", "machineState": nodes, "entries": entries, "checksum": 0}
        memory_checkpoint.decode_memory_checkpoint(json.dumps(content).encode())


def test_memory_of_a_group_is_known_by_node_with_the_group_it_belongs_to() -> None:
    nodes = {0: node(1, [0, 1], reserved=7, free=0), 1: node(1, [0, 1], reserved=1, free=6), 2: node(0, [2])}

    state = memory_checkpoint.decode_memory_checkpoint(memory_file("Static", nodes, block(8, 0, 1)))

    assert {
        0: MemoryUse(reserved={MEMORY: 7}, cells=(0, 1), assignments=1),
        1: MemoryUse(reserved={MEMORY: 1}, cells=(0, 1), assignments=1),
    } == state.use


@pytest.mark.parametrize(
    ("policy", "sizes", "finding"),
    [
        ("None", [], "kept under policy 'None'"),
        ("Static", [64 * GIB], "has NUMA nodes 0, and the machine has 0-1"),
        ("Static", [64 * GIB, 63 * GIB], "NUMA node 1 has .* by the machine and the kubelet's configuration"),
    ],
)
def test_memory_state_that_cannot_be_true_of_the_machine_is_refused(
    policy: str, sizes: list[int], finding: str
) -> None:
    nodes = {i: node(total=size, systemReserved=0, allocatable=size, free=size) for i, size in enumerate(sizes)}
    state = memory_checkpoint.decode_memory_checkpoint(memory_file(policy, nodes, {}))

    with pytest.raises(StateFault, match=finding):
        memory_checkpoint.check_memory_state(state, machine(), AdmissionRules())
