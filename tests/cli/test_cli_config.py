"""`topoalign config` says what a node would run with, and what is wrong with a file before a node meets it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serving_support import gpu, machine

from topoalign.cli import config, exit_codes, root
from topoalign.machines import Machine, document
from topoalign.runtime.installed import settings_by_service
from topoalign.runtime.settings import RuntimeSettings

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, rename: small, devices: 2}]}}\n"
SEED = "SU" + "A2B3C4D5E6F7" * 4 + "ABCDEFGH"


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No `up` of this user, and no setting of whoever runs the tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE", "TOPOALIGN_CONFIG", "CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "topoalign.yaml"
    path.write_text(SHARED)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert 0 == root.run_command_line(["config", "show", "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_setting_of_every_service_is_shown_with_where_it_is_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOALIGN_READ_SECONDS", "3")
    monkeypatch.setenv("TOPOALIGN_SCOPE", "pod")
    found = {(each["service"], each["name"]): each for each in shown(capsys, "--scope", "container")["settings"]}

    for service, kind in settings_by_service().items():
        for field in msgspec.structs.fields(kind):
            if kind is RuntimeSettings or field.name != "node":
                assert (service, f"TOPOALIGN_{field.name.upper()}") in found
    assert ["every service", "discovery", "hinting", "allocator", "mps", "registry"] == list(settings_by_service())
    assert ("3.0", "environment") == value_of(found[("discovery", "TOPOALIGN_READ_SECONDS")])
    assert ("container", "flag") == value_of(found[("allocator", "TOPOALIGN_SCOPE")])
    assert ("best-effort", "default") == value_of(found[("allocator", "TOPOALIGN_POLICY")])


def value_of(setting: dict[str, str]) -> tuple[str, str]:
    return setting["value"], setting["origin"]


def test_every_field_of_the_configuration_is_shown_with_where_it_is_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setenv("MIG_STRATEGY", "mixed")
    configuration = shown(capsys, "--config", str(file))["configuration"]
    found = {each["field"]: (each["value"], each["origin"]) for each in configuration["fields"]}

    assert str(file) == configuration["file"]
    assert ('"mixed"', "environment MIG_STRATEGY") == found["flags.migStrategy"]
    assert ('"nvidia.com/small"', "file") == found["sharing.timeSlicing.resources[0].rename"]
    assert ("false", "default") == found["sharing.timeSlicing.renameByDefault"]
    assert ("null", "default") == found["health.ignoredXIDs"]


def test_people_see_origins_where_they_ask_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == root.run_command_line(["config", "show"])
    short = capsys.readouterr().out
    assert 0 == root.run_command_line(["config", "show", "--origin", "--log-level", "debug"])
    long = capsys.readouterr().out

    assert "ORIGIN" not in short and "TOPOALIGN_LOG_LEVEL      info" in short
    assert "TOPOALIGN_LOG_LEVEL      debug" in long and "flag" in long


def test_a_variable_that_no_service_reads_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOPOALIGN_FAULTS", "TOPOALIGN_VECTORS"):  # of the tests, and no settings of a service either
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOPOALIGN_POLCY", "restricted")
    monkeypatch.setenv("TOPOALIGN_REGISTRY_SERVICE_HOST", "10.0.0.1")  # a kubelet's, for a Service
    monkeypatch.setenv("TOPOALIGN_REGISTRY_PORT_80_TCP_ADDR", "10.0.0.1")

    assert ["TOPOALIGN_POLCY is set but is not a setting"] == shown(capsys)["notes"]


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("nats://user:canary@hub:4222", "nats://[redacted]@hub:4222"),
        ("nats://canary@hub", "nats://[redacted]@hub"),
        ("nats://u:canary@a,tls://u:canary@b", "nats://[redacted]@a,tls://[redacted]@b"),
        ("nats://u:ca/nary,canary@canary@a,nats://b", "nats://[redacted]@a,nats://b"),
        ("u:canary@hub:4222", "[redacted]@hub:4222"),
        ("nats://hub:4222", "nats://hub:4222"),
    ],
)
def test_credentials_in_addresses_are_not_shown(url: str, hosts: str) -> None:
    """C58: however they are written."""
    assert hosts == config.hide_secrets("TOPOALIGN_NATS_URL", url)
    assert "canary" not in config.hide_secrets("TOPOALIGN_NATS_URL", url)


def test_no_secret_is_in_any_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """C58: a seed put where the name of its file belongs, and a password in the address of NATS."""
    monkeypatch.setenv("TOPOALIGN_NATS_URL", "nats://user:canary@hub:4222")
    monkeypatch.setenv("TOPOALIGN_NATS_NKEY", SEED)
    for arguments in (["--origin"], ["--json"], ["--log-level", "debug"]):
        root.run_command_line(["config", "show", *arguments])
    printed = capsys.readouterr()

    assert "nats://[redacted]@hub:4222" in printed.out
    assert "canary" not in printed.out + printed.err
    assert SEED not in printed.out + printed.err
    assert "[redacted]" == config.hide_secrets("TOPOALIGN_API_TOKEN", "canary")


@pytest.mark.parametrize("arguments", [("--policy", "restricted", "--config", "/nowhere/at/all")])
def test_a_file_that_is_not_there_is_not_found(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_codes.NOT_FOUND == root.run_command_line(["config", "show", *arguments])
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_wrong_setting_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOALIGN_READ_SECONDS", "often")

    assert exit_codes.INVALID == root.run_command_line(["config", "show"])
    assert "TOPOALIGN_READ_SECONDS" in capsys.readouterr().err


def test_a_file_is_checked_against_a_machine(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert 0 == root.run_command_line(["config", "check", str(file), "--machine", "dgx-a100"])
    table = capsys.readouterr().out
    assert 0 == root.run_command_line(["config", "check", str(file), "--machine", "dgx-a100", "--json"])
    found = json.loads(capsys.readouterr().out)

    assert "nvidia.com/small  GPU-0 GPU-1                             4       any   8" in table
    assert [("nvidia.com/small", 4, 2), ("nvidia.com/gpu", 1, 6), ("topoalign.io/nic", 1, 10)] == [
        (offer["resource"], offer.get("replicas", 1), len(offer["devices"])) for offer in found["offers"]
    ]


def test_a_file_is_checked_where_there_is_no_machine(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert 0 == root.run_command_line(["config", "check", str(file)])
    printed = capsys.readouterr()

    assert f"{file} is a valid configuration\n" == printed.out
    assert "--machine" in printed.err


def test_a_wrong_file_is_invalid_input_with_the_path_of_the_field(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text(SHARED.replace("replicas: 4", "replicas: 0"))
    status = root.run_command_line(["config", "check", str(file), "--machine", "dgx-a100", "--json"])
    printed = capsys.readouterr()

    assert exit_codes.INVALID == status
    assert "sharing.timeSlicing.resources[0].replicas" in json.loads(printed.out)["error"]["finding"]
    assert "Traceback" not in printed.err


def test_what_cannot_be_offered_is_a_finding_that_can_be_a_gate(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    unlike = tmp_path / "unlike.json"
    unlike.write_bytes(
        document.encode_machine(Machine(name="unlike", topology=machine([gpu(0, ["1g.10gb"]), gpu(1)]), source=""))
    )
    file.write_text("flags: {migStrategy: single}")
    arguments = ["config", "check", str(file), "--machine", str(unlike)]

    assert 0 == root.run_command_line(arguments)
    assert exit_codes.FINDINGS == root.run_command_line([*arguments, "--fail-on-findings"])
    assert "error: flags.migStrategy: single needs all GPUs alike" in capsys.readouterr().err


def test_each_configuration_of_a_config_map_is_checked(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Of a ConfigMap each key is a file: the valid one has its offers, the other its error, and the check fails."""
    wrong = SHARED.replace("replicas: 4", "replicas: 16384")
    file.write_text(json.dumps({"kind": "ConfigMap", "data": {"any": SHARED, "wrong": wrong}}))
    status = root.run_command_line(["config", "check", str(file), "--machine", "dgx-a100"])
    printed = capsys.readouterr()
    root.run_command_line(["config", "check", str(file), "--machine", "dgx-a100", "--json"])
    found = json.loads(capsys.readouterr().out)

    assert exit_codes.INVALID == status
    assert f"{file}, data.any, is a valid configuration" in printed.out and "nvidia.com/small" in printed.out
    assert f"{file}, data.wrong, is no valid configuration" in printed.out
    assert "data.wrong.sharing.timeSlicing.resources[0].replicas" in printed.err
    assert [("data.any", True), ("data.wrong", False)] == [
        (each["field"], each["ok"]) for each in found["configurations"]
    ]
    assert not found["ok"]
