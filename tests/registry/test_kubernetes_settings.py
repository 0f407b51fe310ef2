"""TOPOALIGN_KUBERNETES, and the settings that need it or a port, as a whole registry takes them."""

import sys
from pathlib import Path

import anyio
import httpx
import pytest
from api_server_support import shown_pod
from e2e_support import in_one_process

from topoalign.core.model.errors import InvalidField
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.faults import Harm
from topoalign.testing.fake_api_server.server import fake_api_server

pytestmark = pytest.mark.anyio
ANSWERING = {"TOPOALIGN_HTTP_PORT": "0", "TOPOALIGN_SCHEDULER_PORT": "0"}


async def test_a_registry_follows_the_api_server_of_a_kubeconfig(tmp_path: Path) -> None:
    """It is ready once it has listed pods and nodes; that the server is away later does not end that, and is noted."""
    async with fake_api_server(FakeCluster()) as server:
        server.cluster.add_node("node-1")
        server.cluster.add_pod(shown_pod("p"))
        environment = {**ANSWERING, "TOPOALIGN_KUBERNETES": str(server.kubeconfig(tmp_path / "kubeconfig"))}
        async with in_one_process(MemoryBus(), environment, ["registry"]) as url, httpx.AsyncClient() as client:
            await server.asked("WATCH pods", 1)
            await server.asked("WATCH nodes", 1)
            while (await client.get(f"{url}/readyz")).status_code != 200:
                await anyio.lowlevel.checkpoint()
            server.faults.add("WATCH pods", Harm.REFUSE, 1000, status=500)
            asked = server.requests["WATCH pods"]
            server.end_watches()
            await server.asked("WATCH pods", asked + 2)
            page = await client.get(f"{url}/readyz?verbose")

    assert 200 == page.status_code
    assert "[!] kubernetes: /api/v1/pods: HTTP status 500: refused on demand" in page.text


@pytest.mark.parametrize(
    ("settings", "finding"),
    [
        (
            {"TOPOALIGN_KUBERNETES": "in-cluster", "TOPOALIGN_SCHEDULER_PORT": "0"},
            "KUBERNETES: in-cluster cannot be used",
        ),
        ({"TOPOALIGN_KUBERNETES": "in-cluster"}, "KUBERNETES: it has no effect without .*_SCHEDULER_PORT"),
        (
            {"TOPOALIGN_SCHEDULER_TLS_DIR": "/tls"},
            "SCHEDULER_TLS_DIR: it has no effect without .*_SCHEDULER_PORT",
        ),
        (
            {**ANSWERING, "TOPOALIGN_DELETE_REFUSED_PODS": "true"},
            "DELETE_REFUSED_PODS: it has no effect without .*_KUBERNETES",
        ),
        (
            {**ANSWERING, "TOPOALIGN_UNKNOWN_NODES": "pass"},
            "UNKNOWN_NODES: it has no effect without .*_KUBERNETES",
        ),
        (
            {**ANSWERING, "TOPOALIGN_PUBLISH_TOPOLOGIES": "true"},
            "PUBLISH_TOPOLOGIES: it has no effect without .*_KUBERNETES",
        ),
    ],
)
async def test_a_registry_that_cannot_use_the_setting_does_not_start(settings: dict[str, str], finding: str) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with in_one_process(MemoryBus(), settings, ["registry"]):
            pass

    assert raised.group_contains(InvalidField, match=f"TOPOALIGN_{finding}")


async def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("topoalign.registry.kubernetes.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightkube"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ExceptionGroup) as raised:
        async with in_one_process(MemoryBus(), {**ANSWERING, "TOPOALIGN_KUBERNETES": "in-cluster"}, ["registry"]):
            pass

    assert raised.group_contains(InvalidField, match=r"lightkube[\w.]* is not installed")
