"""The suite `kubelet/files` lays out a kubelet's root directory as its cases say, and compares what the kubelet decided."""

import json
from pathlib import Path
from typing import Any

import pytest
from decision_support import container, pod
from kubelet_files_support import write_files

from topoalign.cli.predict import Described
from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission
from topoalign.kubelet.files import kubelet_configuration
from topoalign.machines import load_machine
from topoalign.tools.conformance import suites
from topoalign.tools.conformance.suite import CaseResult

MACHINE = "dgx-a100"
CONFIG = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0",
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
}
LIMITS = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "next"},
    "spec": {"containers": [{"name": "main", "resources": {"limits": LIMITS}}]},
}
GIVEN = {
    "affinity": [1],
    "cpus": "16-17,144-145",
    "memory": [{"resource": "memory", "size": 8 << 30, "nodes": [1]}],
    "devices": {"nvidia.com/gpu": ["GPU-3", "GPU-2"]},
}


@pytest.fixture
def case(tmp_path: Path) -> dict[str, Any]:
    """A kubelet's files list a pod `uid` that has the two GPUs of NUMA node 1, and all else is free."""
    config, root = tmp_path / "config.json", tmp_path / "root"
    config.write_text(json.dumps(CONFIG))
    root.mkdir()
    rules = kubelet_configuration.load_configuration(config)
    state = Described(MACHINE, None, None).node(load_machine(MACHINE), rules).state
    decision = admit(state, pod(container("main", gpus=2, cpus=4, gib=8), name="uid"), rules)
    assert isinstance(decision, Admission)
    write_files(root, state.holding(decision.allocations[0]), rules)
    names = ("cpu_manager_state", "memory_manager_state", "device-plugins/kubelet_internal_checkpoint")
    return {
        "id": "one",
        "machine": MACHINE,
        "config": CONFIG,
        "files": {name: (root / name).read_text() for name in names},
        "pods": [],
        "emptied": [],
        "bare": [],
        "pod": POD,
        "expect": {"admit": True, "containers": {"main": GIVEN}},
    }


def result(folder: Path, case: dict[str, Any], **changes: Any) -> CaseResult:
    file = folder / "cases.jsonl"
    file.write_text(json.dumps({**case, **changes}) + "\n")
    (found,) = suites()["kubelet/files"](file)
    return found


@pytest.mark.parametrize(
    ("pods", "passed"),
    [
        ({"pods": []}, True),
        ({"pods": ["uid"]}, False),
        ({"pods": ["uid"], "emptied": ["uid"]}, True),
        ({"pods": ["uid"], "bare": ["uid"]}, False),
    ],
    ids=["no directory", "a volume", "torn down", "no volume"],
)
def test_the_pods_of_a_case_have_the_directories_that_it_says(
    tmp_path: Path, case: dict[str, Any], pods: dict[str, list[str]], passed: bool
) -> None:
    assert passed == result(tmp_path, case, **pods).passed


@pytest.mark.parametrize(
    ("expect", "passed"),
    [
        ({"admit": False, "reason": "TopologyAffinityError"}, False),
        ({"admit": True, "containers": {"main": {**GIVEN, "cpus": "16-17"}}}, False),
        ({"admit": True, "containers": {"main": {**GIVEN, "memory": []}}}, False),
        ({"admit": True, "containers": {"main": {**GIVEN, "devices": {}}}}, False),
        ({"admit": True, "containers": {"main": {**GIVEN, "devices": {}}}, "by_chance": True}, True),
        ({"admit": True, "containers": {"other": GIVEN}}, False),
    ],
)
def test_all_that_the_kubelet_decided_is_compared(
    tmp_path: Path, case: dict[str, Any], expect: dict[str, Any], passed: bool
) -> None:
    assert passed == result(tmp_path, case, expect=expect).passed


def test_of_a_refusal_the_reason_is_compared(tmp_path: Path, case: dict[str, Any]) -> None:
    expect = {"admit": False, "reason": "TopologyAffinityError", "message": "not compared"}

    three = {**POD, "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "3"}}}]}}

    assert result(tmp_path, case, pod=three, expect=expect).passed
    assert not result(tmp_path, case, pod=three, expect={**expect, "reason": "SMTAlignmentError"}).passed


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "", "a//b", "pods/.."])
def test_a_case_that_names_a_file_outside_its_root_directory_has_failed(
    tmp_path: Path, case: dict[str, Any], name: str
) -> None:
    assert not result(tmp_path, case, files={name: "x"}).passed
    assert not result(tmp_path, case, pods=[name]).passed
    assert not (tmp_path / "outside").exists()


def test_the_published_cases_of_pods_that_have_ended_pass(vectors: Path) -> None:
    results = list(suites()["kubelet/files"](vectors / "kubelet_files/ended.jsonl"))

    assert [] == [(case.id, case.expected, case.got) for case in results if not case.passed]
    assert 8 <= len(results)
