"""Pods with device annotations on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from topoalign.cli import formatting, root
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.machines import catalogue

TOGETHER = 'scheduling.koordinator.sh/device-joint-allocate={"deviceTypes":["gpu","rdma"],"requiredScope":"SamePCIe"}'
ASKED = ("what-if", "--machine", "epyc-nps4-4gpu", "--mode", "best", "--gpus", "2", "--nics", "2")


@pytest.fixture(autouse=True)
def no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE"):
        monkeypatch.delenv(name, raising=False)


def answered(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    status = root.run_command_line([*ASKED, "--json", *more])
    return status, json.loads(capsys.readouterr().out)["decision"]


def test_annotations_of_the_command_line_decide_as_those_of_a_pod_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, decision = answered(capsys, "--annotation", TOGETHER, "--annotation", "example.com/a=b=c")
    assert 0 == status
    assert ["GPU-0", "GPU-2"] == decision["allocations"][0]["devices"][GPU]

    status, decision = answered(capsys, "--annotation", TOGETHER, "--compat", "koordinator")
    assert (4, "DevicesDoNotFit") == (status, decision["code"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--annotation", "no-value"], "is not KEY=VALUE"),
        (["--annotation", "=x"], "is not KEY=VALUE"),
        (["--annotation", "a=\udcff"], "is not KEY=VALUE"),
        (["--annotation", "topoalign.io/x=1"], "is not known"),
        (["--annotation", "scheduling.koordinator.sh/device-allocate-hint={"], "invalid DeviceAllocateHint"),
        (["--compat", "other"], "--compat"),
    ],
)
def test_what_cannot_be_meant_is_said_by_name(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run_command_line([*ASKED, *more]) not in (0, 4)
    assert said in capsys.readouterr().err


def test_annotations_do_not_go_with_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pod.yaml").write_text("{}")

    assert 0 != root.run_command_line(["what-if", "--pod-file", "pod.yaml", "--annotation", "a=b", "--machine", "dgx2"])
    assert "--annotation" in capsys.readouterr().err


def test_virtual_functions_are_shown_with_their_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    nic = DeviceID("mlx5_0")
    held = Allocation(
        id=AllocationID("a"), devices={NIC: (nic, DeviceID("mlx5_1"))}, virtual_functions={nic: ("0000:0c:00.3",)}
    )

    formatting.show_allocation(held, catalogue.machine("hgx-h100"))

    lines = capsys.readouterr().out.splitlines()
    assert any("mlx5_0" in line and "VF 0000:0c:00.3" in line for line in lines)
    assert not any("mlx5_1" in line and "VF" in line for line in lines)


def test_annotations_count_as_ours_where_gpu_manager_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    """Koordinator reads names of fields in any case, and neither we nor gpu-manager do."""
    lax = TOGETHER.replace("deviceTypes", "DEVICETYPES")
    named = ("--annotation", TOGETHER, "--pod", "ml/p")

    assert answered(capsys, *named) == answered(capsys, *named, "--compat", "gaia")
    lenient = ("--annotation", lax, "--compat")
    assert [True, False] == [
        root.run_command_line([*ASKED, *lenient, word]) in (0, 4) for word in ("koordinator", "gaia")
    ]
    assert "DeviceJointAllocate" in capsys.readouterr().err
