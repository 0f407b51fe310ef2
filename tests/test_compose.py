"""docker-compose.yml and Dockerfile: images, cheap health checks, and nothing that runs as root or listens to others."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from topoalign.cli import health_check
from topoalign.runtime import event_stores
from topoalign.runtime.nats_server import find_nats_server

ROOT = Path(__file__).parents[1]
MIB = 1024 * 1024
NATS_READY = "http://127.0.0.1:8222/healthz?js-enabled-only=true"
BY_DIGEST = re.compile(r"\w+:[\w.-]+@sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """Service by name, as a container engine gets it."""
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return dict(document["services"])


def test_one_service_builds_the_image_and_all_others_start_after_it(services: dict[str, dict[str, Any]]) -> None:
    builders = [name for name, service in services.items() if "build" in service]

    def before(name: str) -> set[str]:
        """The services that a service depends on, and those that these depend on."""
        others = {*services[name].get("depends_on", {})}
        return others.union(*map(before, others))

    assert ["volume"] == builders
    assert {"topoalign:local"} == {service["image"] for name, service in services.items() if name != "nats"}
    assert [] == [name for name in services if name != "volume" and "volume" not in before(name)]


def test_nats_runs_from_its_own_image_as_in_kubernetes(services: dict[str, dict[str, Any]]) -> None:
    """Under its digest, and in a volume that belongs to its user: an empty one gets the owner of the image's directory."""
    (stateful,) = [
        each
        for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/base/nats.yaml").read_text())
        if each["kind"] == "StatefulSet"
    ]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    nats, stores_first = services["nats"], services["volume"]

    assert container["image"] == nats["image"]
    assert BY_DIGEST.fullmatch(nats["image"])
    assert "65532:65532" == nats["user"]
    assert {*stores_first["volumes"]} < {*nats["volumes"]}
    assert {"volume": {"condition": "service_completed_successfully"}} == nats["depends_on"]


def test_base_images_are_named_by_digest() -> None:
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)

    assert 2 == len(bases)
    assert 1 == len({*bases})
    assert all(map(BY_DIGEST.fullmatch, bases))


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
    """Every health check of a service is one that the probe answers without the command line. NATS' image has no probe."""
    asked: list[health_check.Page] = []

    def check(page: health_check.Page) -> tuple[bool, list[str]]:
        asked.append(page)
        return True, ["ok"]

    monkeypatch.setattr(health_check, "check_page", check)
    monkeypatch.setenv("TOPOALIGN_HTTP_PORT", "8080")
    checks = {
        name: service["healthcheck"]["test"] for name, service in services.items() if "test" in service["healthcheck"]
    }

    assert ["CMD", "wget", "-q", "-O", "/dev/null", NATS_READY] == checks.pop("nats")
    assert {"discovery", "hinting", "allocator", "registry"} == checks.keys()
    assert {("CMD", "topoalign")} == {tuple(test[:2]) for test in checks.values()}
    assert {0} == {health_check.quick(test[2:]) for test in checks.values()}
    assert 4 == len(asked)


def test_no_container_can_write_its_image_gain_rights_or_take_all_memory(services: dict[str, dict[str, Any]]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()

    for name, service in services.items():
        assert service["read_only"]
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert service["mem_limit"] and service["pids_limit"]
        assert "privileged" not in service
        assert ("65532:65532" if name == "nats" else None) == service.get("user")
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
    reserved = sum(store.max_bytes for store in event_stores.STORES)

    assert 0 == done.returncode, done.stderr
    assert limit is not None
    assert reserved <= int(limit[1]) * 1024 * MIB <= 2 * reserved
    assert "sync_interval: always" in file.read_text()
