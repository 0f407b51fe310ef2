"""`topoalign doctor` says which of the kubelet's state files its next start fails with, or loses something by."""

import json
from pathlib import Path
from typing import Any

import pytest

from topoalign.cli import root
from topoalign.kubelet.files import checkpoint, cpu_checkpoint, device_checkpoint, memory_checkpoint

CPUS, MEMORY, DEVICES = "CPU manager state", "memory manager state", "device checkpoint"
CONFIG = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
STATIC = CONFIG + 'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\n'
STATIC_MEMORY = CONFIG + "memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]\n"
NO_MEMORY_TABLES = '{"policyName":"Static","machineState":{},"entries":{},"checksum":0}'


def cpu_file(shared: str, policy: str = "static") -> str:
    """The file of a kubelet that has given nothing away, with its checksum."""
    state = cpu_checkpoint.CpuManagerState(policy_name=policy, default_cpu_set=shared, entries=None)
    text = next(cpu_checkpoint.spew_cpu_state(state)).replace(
        "Entries:(map[string]map[string]string)<nil>", "Entries:(map[string]map[string]string)map[]"
    )
    return json.dumps(
        {"policyName": policy, "defaultCpuSet": shared, "entries": {}, "checksum": checkpoint.fnv1a(text)}
    )


def examined(capsys: pytest.CaptureFixture[str], kubelet: Path) -> dict[str, Any]:
    root.run_command_line(["doctor", "--json", "--kubelet-dir", str(kubelet / "device-plugins")])
    return {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root directory of a kubelet on a machine with 256 CPUs."""
    monkeypatch.setenv("TOPOALIGN_MACHINE", "dgx-a100")
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "name", "content", "check", "finding"),
    [
        (STATIC, cpu_checkpoint.NAME, cpu_file("0-299"), CPUS, "names CPUs 256-299, which the machine does not have"),
        (STATIC, cpu_checkpoint.NAME, cpu_file("0-99"), CPUS, "CPUs 100-255 stand neither"),
        (STATIC, cpu_checkpoint.NAME, cpu_file("1-255"), CPUS, "CPUs 0 are kept for the system"),
        (STATIC, cpu_checkpoint.NAME, cpu_file("0-255")[:-30], CPUS, "it is cut off"),
        (STATIC, cpu_checkpoint.NAME, "", CPUS, "it is cut off"),
        (STATIC, cpu_checkpoint.NAME, cpu_file("0-255").replace("0-255", "0-254"), CPUS, "its checksum"),
        (
            CONFIG,
            cpu_checkpoint.NAME,
            cpu_file("0-255"),
            CPUS,
            "written under policy 'static', and cpuManagerPolicy is",
        ),
        (STATIC, cpu_checkpoint.NAME, cpu_file("", "none"), CPUS, "policy 'none', and cpuManagerPolicy is 'static'"),
        (
            CONFIG,
            memory_checkpoint.NAME,
            NO_MEMORY_TABLES,
            MEMORY,
            "policy 'Static', and memoryManagerPolicy is 'None'",
        ),
        (STATIC_MEMORY, memory_checkpoint.NAME, NO_MEMORY_TABLES, MEMORY, "and the machine has 0-7"),
        (STATIC_MEMORY, memory_checkpoint.NAME, NO_MEMORY_TABLES[:20], MEMORY, "it is cut off"),
        (STATIC_MEMORY, memory_checkpoint.NAME, NO_MEMORY_TABLES.replace(":0}", ":7}"), MEMORY, "its checksum 7"),
    ],
)
def test_a_state_file_that_a_kubelet_does_not_start_with_is_a_failure(
    capsys: pytest.CaptureFixture[str], kubelet: Path, config: str, name: str, content: str, check: str, finding: str
) -> None:
    (kubelet / "config.yaml").write_text(config)
    (kubelet / name).write_text(content)
    found = examined(capsys, kubelet)[check]

    assert "failure" == found["verdict"]
    assert finding in found["detail"] and "a kubelet does not start with it" in found["detail"]
    assert f"delete {kubelet / name} and restart the kubelet" in found["remedy"]


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        ('{"PodDeviceEntries": null', "it is cut off"),
        ('{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":7}', "its checksum 7 is not that"),
        ('{"policyName":"none"}', "Object missing required field"),
    ],
)
def test_a_device_checkpoint_that_a_kubelet_passes_over_is_a_failure(
    capsys: pytest.CaptureFixture[str], kubelet: Path, content: str, finding: str
) -> None:
    """The kubelet starts, logs it, and gives away what running containers have."""
    path = kubelet / "device-plugins" / device_checkpoint.NAME
    path.write_text(content)
    found = examined(capsys, kubelet)[DEVICES]

    assert "failure" == found["verdict"]
    assert finding in found["detail"] and "gives them to others" in found["detail"]
    assert f"delete {path}" in found["remedy"]


def test_state_files_that_fit_are_ok(capsys: pytest.CaptureFixture[str], kubelet: Path) -> None:
    (kubelet / "config.yaml").write_text(STATIC)
    (kubelet / cpu_checkpoint.NAME).write_text(cpu_file("0-255"))
    (kubelet / memory_checkpoint.NAME).write_text(NO_MEMORY_TABLES.replace("Static", "None"))
    device_checkpoint.store(kubelet / "device-plugins", device_checkpoint.CheckpointData(None, {}))
    found = examined(capsys, kubelet)

    assert ["ok"] * 3 == [found[check]["verdict"] for check in (CPUS, MEMORY, DEVICES)]
    assert "policy static" == found[CPUS]["detail"]


def test_without_a_configuration_only_the_file_itself_is_checked(
    capsys: pytest.CaptureFixture[str], kubelet: Path
) -> None:
    (kubelet / "config.yaml").unlink()
    (kubelet / cpu_checkpoint.NAME).write_text(cpu_file("0-299"))
    found = examined(capsys, kubelet)[CPUS]

    assert ("ok", True) == (found["verdict"], "not compared" in found["detail"])


def test_without_state_files_there_is_no_finding(capsys: pytest.CaptureFixture[str], kubelet: Path) -> None:
    assert {CPUS, MEMORY, DEVICES}.isdisjoint(examined(capsys, kubelet))
