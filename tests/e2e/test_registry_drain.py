"""S09: a registry ends by SIGTERM, and nobody who calls the Service of the registries meets an error."""

import ssl
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import Process
from api_server_support import shown_pod
from certificate_support import Authority

from topoalign.core.model.ids import NodeName
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import Object
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.ports import kept_ports
from topoalign.tools.simulate.cluster import Replica, Tls, started, stopped, until_ready
from topoalign.tools.simulate.node import SimulatedNode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-1")
CREATIONS = 200
BEFORE = 60
"""Creations before the SIGTERM."""
BINDS = 4
"""Half of them have begun when SIGTERM comes. Of more on one node at the same time some have to wait for others."""
LAG = 6
LONG = (3600.0, 3600.0)
UNTIL = datetime(2061, 1, 2, tzinfo=UTC)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


class Service:
    """
    Opens connections to the replicas that are ready, in turns; an open connection stays where it is. The readiness is asked
    for every `LAG` connections, as the endpoints of a Service follow a while later.
    """

    def __init__(self, replicas: Sequence[Replica], tls: ssl.SSLContext, pages: httpx.AsyncClient) -> None:
        self._replicas = replicas
        self._tls = tls
        self._pages = pages
        self._turn = 0
        self._ready = list(range(len(replicas)))
        """Positions of the replicas that were ready at the last look."""
        self.calls: Counter[int] = Counter()
        """Position of a replica -> calls that it answered."""
        self.closed: Counter[int] = Counter()
        """Position of a replica -> answers with which it closed a connection."""
        self.errors: list[str] = []

    async def _is_ready(self, replica: Replica) -> bool:
        try:
            page = await self._pages.get(f"http://127.0.0.1:{replica.pages}/readyz/scheduler")
        except httpx.TransportError:
            return False
        return page.status_code == 200

    async def connection(self) -> "Connection":
        if self._turn and self._turn % LAG == 0:
            self._ready = [n for n, each in enumerate(self._replicas) if await self._is_ready(each)]
        self._turn += 1
        place = self._ready[self._turn % len(self._ready)]
        url = f"https://127.0.0.1:{self._replicas[place].port}"
        return Connection(self, place, httpx.AsyncClient(base_url=url, verify=self._tls, timeout=30))


class Connection:
    """A connection to one replica, used until the replica closes it."""

    def __init__(self, service: Service, place: int, http: httpx.AsyncClient) -> None:
        self._service = service
        self._place = place
        self._http = http
        self.is_open = True

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The decoded answer; None for an error, which is noted."""
        try:
            answer = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            self.is_open = False
            self._service.errors.append(repr(error))
            return None
        self._service.calls[self._place] += 1
        self.is_open = answer.headers.get("connection") != "close"
        self._service.closed[self._place] += not self.is_open
        if answer.status_code != 200:
            self._service.errors.append(answer.text)
            return None
        return answer.json()

    async def close(self) -> None:
        self.is_open = False
        await self._http.aclose()


async def create_pods(service: Service, created: list[bool], process: Process, kept: bool) -> None:
    """Reviews of new pods until there are enough and the registry has ended, over kept connections or one for each."""
    pod = shown_pod("train")
    request = {
        "uid": "r",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "ml",
        "object": pod,
    }
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    connection = await service.connection()
    while len(created) < CREATIONS or process.returncode is None:
        if not connection.is_open:
            await connection.close()
            connection = await service.connection()
        answer = await connection.post("/webhook", body)
        created.append(answer is not None and answer["response"]["allowed"])
        if not kept:
            connection.is_open = False
    await connection.close()


async def bind(service: Service, pod: Object, bound: list[str]) -> None:
    """Appends the error of the answer, empty for none."""
    metadata = pod["metadata"]
    connection = await service.connection()
    body = {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": NODE,
    }
    answer = await connection.post("/scheduler/bind", body)
    bound.append("no answer" if answer is None else answer["Error"])
    await connection.close()


async def test_one_of_two_registries_ends_and_no_call_fails(folder: Path, tmp_path: Path) -> None:
    """Creations on kept and on new connections, and binds, some of which have begun when SIGTERM comes."""
    authority = Authority(tmp_path / "authority")
    authority.issue(tmp_path / "served", "registry", UNTIL)
    tls = Tls(tmp_path / "served", authority.certificate)
    api = FakeCluster()
    created: list[bool] = []
    bound: list[str] = []
    with kept_ports(4) as ports:
        async with (
            local_nats(folder / "nats") as nats,
            fake_api_server(api) as server,
            httpx.AsyncClient(timeout=30) as pages,
            background() as tasks,
        ):
            node = SimulatedNode(NODE, "dgx-a100", "none", folder / "1", nats, api, Random(0), shuffled=False)
            await tasks.start(node.run, LONG)
            kubeconfig = server.kubeconfig(folder / "kubeconfig")
            replicas = [await started(nats, kubeconfig, tls, *two) for two in (ports[:2], ports[2:])]
            try:
                await until_ready(replicas)
                service = Service(replicas, ssl.create_default_context(cafile=str(tls.authority)), pages)
                ending = replicas[0].process
                pods = [api.add_pod(shown_pod(f"p{number}")) for number in range(BINDS)]
                async with anyio.create_task_group() as clients:
                    for kept in (True, True, False):  # a kept connection to each replica
                        clients.start_soon(create_pods, service, created, ending, kept)
                    while len(created) < BEFORE:
                        await anyio.lowlevel.checkpoint()
                    for pod in pods[: BINDS // 2]:
                        clients.start_soon(bind, service, pod, bound)
                    ending.terminate()
                    for pod in pods[BINDS // 2 :]:
                        await bind(service, pod, bound)
                    await ending.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    for each in replicas:
                        await stopped(each.process)
            tasks.cancel_scope.cancel()

    assert [] == service.errors
    assert all(created) and len(created) >= CREATIONS
    assert [""] * BINDS == bound
    assert 0 == ending.returncode
    assert all(service.calls[place] for place in range(2))
    assert service.closed[0] and not service.closed[1]
