"""A node agent as a program, whose kubelet comes late, and who is told to stop while the kubelet waits for an answer."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from e2e_support import as_process, environment, in_one_process, pod
from kubelet_support import learn_owners

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.settings import AllocatorSettings
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1, v1beta1
from topoalign.kubelet.grpc.kubelet_client import FAILURES
from topoalign.kubelet.grpc.transport import GrpcServer
from topoalign.machines import load_machine
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.fake_kubelet.pod_resources import PodResources
from topoalign.testing.manual_clock import ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("node-1")
NOWHERE = "nats://127.0.0.1:9"
RULES = AdmissionRules()


class SlowPodResources(PodResources):
    """Says when it is asked, and answers when it is let."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        super().__init__(kubelet.state, kubelet.running.values, RULES)
        self.asked, self.let = anyio.Event(), anyio.Event()
        self.let.set()

    def hold(self) -> None:
        self.asked, self.let = anyio.Event(), anyio.Event()

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:
        self.asked.set()
        await self.let.wait()
        return await super().list(message)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


@asynccontextmanager
async def kubelet_of(folder: Path) -> AsyncIterator[tuple[FakeKubelet, SlowPodResources]]:
    (folder / "pod-resources").mkdir(exist_ok=True)
    kubelet = FakeKubelet(folder / "device-plugins", folder / "unused", load_machine("dgx-a100").topology, RULES)
    slow = SlowPodResources(kubelet)
    server = GrpcServer(slow, folder / "pod-resources" / "kubelet.sock", "directory")
    async with anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        await server.listen()
        yield kubelet, slow
        slow.let.set()
        await server.stop(1)
        tasks.cancel_scope.cancel()


def recorded(folder: Path) -> NodeState:
    with open_journal(folder / "state", NODE) as journal:
        return Ledger(NODE, journal, ManualClock()).state


def test_running_calls_and_then_connections_have_ten_seconds_in_all() -> None:
    """C57: what becomes of them is caused below, and not measured by a clock."""
    assert 2 * AllocatorSettings(node=NODE).drain_seconds <= 10


@pytest.mark.parametrize("answers", [True, False], ids=["finishes", "refuses"])
async def test_an_agent_stopped_during_an_allocate_ends_it_either_way(folder: Path, answers: bool) -> None:
    """
    Allocate over the record of a pod that has gone waits for PodResources; SIGTERM comes just then. If PodResources
    answers the devices are given and recorded, else the call is refused and the record stays; the agent ends with 0.
    """
    settings = {**environment(NODE, NOWHERE, folder), "TOPOALIGN_RECONCILE_SECONDS": "3600"}
    async with kubelet_of(folder) as (kubelet, slow), as_process("node", settings, folder / "log") as agent:
        with anyio.fail_after(60):
            await kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)
        assert isinstance(await kubelet.admit(pod("gone", gpus=8)), Admission)
        await learn_owners(kubelet)
        await kubelet.remove(pod("gone").namespace, PodName("gone"))
        devices = list(kubelet.state().hardware.devices[GPU])[:2]
        container = v1beta1.ContainerAllocateRequest(devices_ids=list(devices))
        request = v1beta1.AllocateRequest(container_requests=[container])
        client = kubelet.plugins.endpoints[GPU].client()
        outcome: list[object] = []
        slow.hold()

        async def allocate() -> None:
            try:
                outcome.append(await client.allocate(request))
            except FAILURES as error:
                outcome.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(allocate)
            await slow.asked.wait()
            agent.terminate()
            with anyio.fail_after(60):
                while [*(folder / "device-plugins").glob("topoalign-*")]:  # until it stops
                    await anyio.lowlevel.checkpoint()
                if answers:
                    slow.let.set()
                assert 0 == await agent.wait()

    (answer,) = outcome
    held = list(recorded(folder).allocations.values())
    if answers:  # what else the pod that has gone had stays its own for as long as its directory does
        assert isinstance(answer, v1beta1.AllocateResponse)
        assert [set(devices)] == [each.device_ids for each in held if each.owner is None]
        left = [each for each in held if each.owner is not None]
        assert {"gone"} >= {each.owner.pod for each in left if each.owner is not None}
        assert all(each.device_ids.isdisjoint(devices) for each in left)
    else:
        assert "KubeletAway" in str(answer)
        assert [8] == [len(each.device_ids) for each in held]


async def test_an_agent_with_a_late_kubelet_waits_says_why_and_is_ready_later(folder: Path) -> None:
    """An agent whose kubelet is late is alive, says what it waits for, and then is ready."""
    (folder / "device-plugins").mkdir()
    settings = {**environment(NODE, NOWHERE, folder), "TOPOALIGN_HTTP_PORT": "0"}
    names = ("discovery", "hinting", "allocator")
    async with in_one_process(MemoryBus(), settings, names) as url, httpx.AsyncClient(base_url=url) as http:
        with anyio.fail_after(60):
            while "the kubelet has no kubelet.sock" not in (late := await http.get("/readyz")).text:
                await anyio.lowlevel.checkpoint()
        assert 503 == late.status_code
        assert 200 == (await http.get("/livez")).status_code
        async with kubelet_of(folder) as (kubelet, _):
            with anyio.fail_after(60):
                await kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)
                while (await http.get("/readyz")).status_code != 200:
                    await anyio.lowlevel.checkpoint()
