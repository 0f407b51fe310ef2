"""S02: without NATS a registry serves the webhook and refuses the nodes, whether it has read them before or not."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
from api_server_support import shown_pod
from e2e_support import in_one_process

from topoalign.core.model.ids import NodeName
from topoalign.registry.kubernetes.objects import WOKEN
from topoalign.registry.scheduling import service
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.ports import kept_ports
from topoalign.tools.simulate.node import SimulatedNode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-1")
POD = shown_pod("train", gpus=2)
LONG = (3600.0, 3600.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


class Served:
    """A registry, as kubelet, scheduler and API server call it."""

    def __init__(self, http: httpx.AsyncClient, pages: str, port: int) -> None:
        self._http = http
        self._pages = pages
        self._url = f"http://127.0.0.1:{port}"

    async def ready(self, page: str) -> int:
        """The status of a readiness page."""
        return (await self._http.get(f"{self._pages}{page}")).status_code

    async def filter(self) -> str:
        """The code of the refusal or the error for the pod on the node; empty where the node passes."""
        body = {"Pod": {**POD, "metadata": {**POD["metadata"], "uid": "u"}}, "Nodes": None, "NodeNames": [NODE]}
        answer = (await self._http.post(f"{self._url}/scheduler/filter", json=body)).json()
        refused: dict[str, str] = answer["FailedAndUnresolvableNodes"] or answer["FailedNodes"] or {}
        return str(answer["Error"] or refused.get(NODE, "")).partition(":")[0]

    async def until_filtered(self, code: str) -> None:
        with anyio.fail_after(120):
            while await self.filter() != code:
                await anyio.lowlevel.checkpoint()

    async def review_pod(self, **spec: Any) -> list[bool]:
        """Whether both webhooks allow the pod."""
        request = {
            "uid": "r",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "ml",
            "object": {**POD, "spec": {**POD["spec"], **spec}},
        }
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        answers = [await self._http.post(self._url + path, json=body) for path in ("/webhook", "/webhook/validate")]
        assert [200, 200] == [each.status_code for each in answers]
        return [each.json()["response"]["allowed"] for each in answers]


@asynccontextmanager
async def registry(nats: str, kubeconfig: Path, port: int) -> AsyncIterator[Served]:
    """A registry that asks the nodes ten times as often as the default has it."""
    settings = {
        "NATS_URL": nats,
        "HTTP_PORT": "0",
        "SCHEDULER_PORT": str(port),
        "KUBERNETES": str(kubeconfig),
        "REGISTRY_ASK_SECONDS": "1",
        "REGISTRY_ANSWER_SECONDS": "0.5",
    }
    environment = {f"TOPOALIGN_{name}": value for name, value in settings.items()}
    async with in_one_process(None, environment, ["registry"]) as pages, httpx.AsyncClient(timeout=60) as http:
        yield Served(http, pages, port)


async def until_ready(served: Served) -> None:
    with anyio.fail_after(120):
        while await served.ready("/readyz/scheduler") != 200:
            await anyio.lowlevel.checkpoint()


async def test_pods_are_created_and_wait_while_nats_is_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A registry starts without NATS, reads the nodes, loses NATS, and has it again. A second one starts in between, and serves
    the webhook as the first. The pod that waits is woken by an annotation of the node.
    """
    monkeypatch.setattr(service, "NATS_AWAY_SECONDS", 0.5)
    api = FakeCluster()
    with kept_ports(3) as (nats_port, first_port, second_port):
        nats = f"nats://127.0.0.1:{nats_port}"
        node = SimulatedNode(NODE, "dgx-a100", "best-effort", folder / "1", nats, api, Random(0), shuffled=False)
        async with fake_api_server(api) as server, background() as tasks:
            kubeconfig = server.kubeconfig(folder / "kubeconfig")
            async with registry(nats, kubeconfig, first_port) as first:
                await until_ready(first)
                before = await first.filter(), await first.review_pod(), await first.review_pod(nodeName=NODE)
                async with local_nats(folder / "nats", nats_port):
                    await tasks.start(node.run, LONG)
                    await first.until_filtered("")
                api.add_pod({**POD, "spec": {**POD["spec"], "schedulerName": "nobody"}})
                await first.until_filtered("NodeStale")
                lost = await first.review_pod(), await first.review_pod(nodeName=NODE)
                pages = await first.ready("/readyz/scheduler"), await first.ready("/readyz")
                async with registry(nats, kubeconfig, second_port) as second:
                    await until_ready(second)
                    restarted = await second.filter(), await second.review_pod(), await second.review_pod(nodeName=NODE)
                    async with local_nats(folder / "nats", nats_port):
                        await first.until_filtered("")
                        await second.until_filtered("")
                        with anyio.fail_after(60):
                            while WOKEN not in api.nodes.get(("", NODE))["metadata"].get("annotations", {}):
                                await api.nodes.wait()
            tasks.cancel_scope.cancel()

    assert ("NotReadYet", [True, True], [False, False]) == before
    assert ([True, True], [False, False]) == lost
    assert (200, 503) == pages
    assert ("NotReadYet", [True, True], [False, False]) == restarted
