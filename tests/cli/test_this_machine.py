"""Without a running node `topo`, `draw`, `gpu list` and `doctor` read this machine, or say that there is nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from nvml_support import host_tree

from topoalign.cli import root


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No `up` of this user, no settings, and a machine without a device."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE", "TOPOALIGN_MACHINE", "TOPOALIGN_DRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOPOALIGN_SYSFS_ROOT", str(host_tree(tmp_path / "host", gpus=0, nics=0)))
    monkeypatch.setenv("TOPOALIGN_DRIVER", "sysfs")


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of this machine tells of a DGX A100."""
    monkeypatch.setenv("TOPOALIGN_DRIVER", "described")
    monkeypatch.setenv("TOPOALIGN_MACHINE", "dgx-a100")


@pytest.mark.usefixtures("eight_gpus")
def test_topo_prints_this_machine_where_no_node_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["topo"])
    here = capsys.readouterr()
    root.run_command_line(["topo", "--machine", "dgx-a100"])

    assert 0 == status
    assert capsys.readouterr().out == here.out
    assert "no node runs here" in here.err
    assert "dgx-a100, the machine that TOPOALIGN_MACHINE describes" in here.err


def test_what_the_hardware_says_is_not_told_of_a_described_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPOALIGN_MACHINE", "dgx-a100")  # of which the driver `sysfs` takes no notice
    monkeypatch.setenv("TOPOALIGN_SYSFS_ROOT", str(host_tree(tmp_path / "real", gpus=0, nics=2)))
    status = root.run_command_line(["topo"])

    assert 0 == status
    assert "the hardware of this machine" in capsys.readouterr().err


@pytest.mark.usefixtures("eight_gpus")
def test_topo_draw_draws_this_machine_where_no_node_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["draw"])

    assert 0 == status
    assert "GPU7" in capsys.readouterr().out


@pytest.mark.usefixtures("eight_gpus")
def test_gpu_list_says_that_the_holders_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["gpu", "list"])
    shown = capsys.readouterr().out.splitlines()
    root.run_command_line(["gpu", "list", "--json"])
    devices = json.loads(capsys.readouterr().out)["devices"]

    assert 0 == status
    assert 18 == len(devices)
    assert shown[1].split() == ["GPU0", "GPU-0", "0000:05:00.0", "healthy", "not", "known", "-"]
    assert {None} == {device["held_by"] for device in devices}


@pytest.mark.parametrize("command", [["topo"], ["draw"], ["gpu", "list"]])
def test_a_machine_without_devices_is_reported_with_what_to_name(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """If the machine has no devices, the error says so and suggests a described machine."""
    status = root.run_command_line(command)

    error = capsys.readouterr().err
    assert 3 == status
    assert "no GPU and no RDMA-capable NIC was found" in error
    assert "--machine" in error


def test_who_names_a_node_wants_that_node_and_not_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["topo", "--node", "gpu-7"])

    error = capsys.readouterr().err
    assert 69 == status
    assert "no NATS is known" in error


@pytest.mark.usefixtures("eight_gpus")
def test_doctor_says_what_hardware_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    root.run_command_line(["doctor", "--json"])
    found = hardware(capsys)

    detail = "2 sockets, 8 NUMA nodes, CPUs 0-255, 8 GPUs, 10 NICs (described by TOPOALIGN_MACHINE: dgx-a100)"
    assert ("ok", detail) == (found["verdict"], found["detail"])


def test_doctor_names_the_remedy_where_there_is_no_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    root.run_command_line(["doctor", "--json"])
    found = hardware(capsys)

    assert "warning" == found["verdict"]
    assert "--machine" in found["remedy"]


def hardware(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    findings = json.loads(capsys.readouterr().out)["findings"]
    return next(finding for finding in findings if finding["check"] == "hardware")


@pytest.fixture
def degraded_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 of this machine has half of its NVLinks."""
    monkeypatch.setenv("TOPOALIGN_DRIVER", "described")
    monkeypatch.setenv("TOPOALIGN_MACHINE", "hgx-b200-gpu0-half")


@pytest.mark.usefixtures("degraded_gpu")
def test_gpu_list_names_a_degraded_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    root.run_command_line(["gpu", "list"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    root.run_command_line(["gpu", "list", "--json"])
    devices = json.loads(capsys.readouterr().out)["devices"]

    assert "degraded: 9 of 18 NVLinks are up" in rows["GPU0"]
    assert "degraded" not in rows["GPU1"]
    assert {"GPU-0": "9 of 18 NVLinks are up"} == {
        each["id"]: each["degraded"] for each in devices if "degraded" in each
    }


def test_topo_names_a_degraded_gpu_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    root.run_command_line(["topo", "--machine", "hgx-b200-gpu0-half"])
    half = capsys.readouterr()
    root.run_command_line(["topo", "--machine", "hgx-b200"])
    whole = capsys.readouterr()
    root.run_command_line(["draw", "--machine", "hgx-b200-gpu0-half"])
    drawn = capsys.readouterr().out

    assert "GPU0 is degraded: 9 of 18 NVLinks are up\n" == half.err
    assert "" == whole.err
    assert len(whole.out.splitlines()) == len(half.out.splitlines())
    assert "degraded" not in half.out
    assert "GPU0 is degraded: 9 of 18 NVLinks are up" in drawn
