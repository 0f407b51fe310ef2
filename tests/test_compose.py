"""docker-compose.yml: one image that is built once, cheap health checks, nothing that runs as root or listens to others."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from topoalign.cli import probe
from topoalign.runtime import stores
from topoalign.runtime.nats_server import find_nats_server

ROOT = Path(__file__).parents[1]
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """Service by name, as a container engine gets it."""
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return dict(document["services"])


def test_one_service_builds_the_image_and_all_others_start_after_it(services: dict[str, dict[str, Any]]) -> None:
    builders = [name for name, service in services.items() if "build" in service]
    after = {name: service.get("depends_on", {}).keys() for name, service in services.items()}

    assert ["nats"] == builders
    assert {"topoalign:local"} == {service["image"] for service in services.values()}
    assert [] == [
        name
        for name, others in after.items()
        if name != "nats" and "nats" not in others and not any("nats" in after[other] for other in others)
    ]


def test_compose_1_29_knows_every_key_of_depends_on_and_healthcheck(services: dict[str, dict[str, Any]]) -> None:
    conditions = {
        key for service in services.values() for each in service.get("depends_on", {}).values() for key in each
    }
    checks = {key for service in services.values() for key in service["healthcheck"]}

    assert {"condition"} == conditions
    assert checks <= {"test", "interval", "timeout", "retries", "start_period", "disable"}


def test_every_health_check_is_answered_without_the_command_line(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every health check is one that the probe answers without the command line."""
    asked: list[probe.Page] = []

    def check(page: probe.Page) -> tuple[bool, list[str]]:
        asked.append(page)
        return True, ["ok"]

    monkeypatch.setattr(probe, "check", check)
    monkeypatch.setenv("TOPOALIGN_HTTP_PORT", "8080")
    checks = {
        name: service["healthcheck"]["test"] for name, service in services.items() if "test" in service["healthcheck"]
    }

    assert {"nats", "discovery", "hinting", "allocator", "registry"} == checks.keys()
    assert {("CMD", "topoalign")} == {tuple(test[:2]) for test in checks.values()}
    assert {0} == {probe.quick(test[2:]) for test in checks.values()}
    assert 5 == len(asked)


def test_no_container_can_write_its_image_gain_rights_or_take_all_memory(services: dict[str, dict[str, Any]]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()

    for service in services.values():
        assert service["read_only"]
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert service["mem_limit"] and service["pids_limit"]
        assert "user" not in service and "privileged" not in service
    assert re.search(r"^USER 65532$", dockerfile, re.MULTILINE)
    assert "install -d -o 65532 -g 65532 -m 0700 /var/lib/topoalign" in dockerfile


def test_ports_are_published_on_the_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]

    assert published
    assert [] == [port for port in published if not port.startswith("127.0.0.1:")]


def test_the_server_accepts_its_configuration_and_fits_our_stores() -> None:
    """The server accepts its configuration and has room for our stores, but for no more than twice their size."""
    file = ROOT / "deploy" / "nats.conf"
    done = subprocess.run([find_nats_server(), "-t", "--config", file], capture_output=True, text=True, timeout=60)
    limit = re.search(r"max_file_store: (\d+)GB", file.read_text())
    reserved = sum(store.max_bytes for store in stores.STORES)

    assert 0 == done.returncode, done.stderr
    assert limit is not None
    assert reserved <= int(limit[1]) * 1024 * MIB <= 2 * reserved
    assert "sync_interval: always" in file.read_text()
