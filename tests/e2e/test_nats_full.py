"""A hub without room stops no node: allocations go on, the node says what is wrong, and catches up once there is room."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from bus_support import killable
from e2e_support import environment, in_one_process, pod
from faults_support import THOROUGH
from outage_support import consecutive

from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationGranted, LedgerFact
from topoalign.core.model.ids import GPU, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.ports import Bus, Stream
from topoalign.machines import load_machine
from topoalign.runtime.nats_bus import connect_bus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-1.example.com")
PODS = 200 if THOROUGH else 15
ROOM, NO_ROOM = "4GB", "1KB"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


def settings(folder: Path, port: int | None, room: str) -> str:
    return (
        f"listen: 127.0.0.1:{-1 if port is None else port}\n"
        f'jetstream {{ store_dir: "{folder}", sync_interval: always, max_file_store: {room} }}\n'
    )


async def test_a_full_store_stops_no_allocation_and_all_arrives_later(folder: Path) -> None:
    """C37: NATS comes back with room for a kilobyte. Pods come and go; metrics and readiness say what the bus refuses."""
    machine = load_machine("dgx-a100").topology
    kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, AdmissionRules())
    async with killable(folder / "nats", whole=settings(folder / "nats", None, ROOM)) as server:
        more = {**environment(NODE, server.url, folder), "TOPOALIGN_HTTP_PORT": "0"}
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            async with in_one_process(None, more, ("discovery", "hinting", "allocator")) as url:
                await kubelet.until(lambda k: k.allocatable(GPU) == 8)
                async with httpx.AsyncClient(base_url=url) as http:
                    await until_ready(http)
                    server.kill()
                    server.whole = settings(folder / "nats", server.port, NO_ROOM)
                    await server.start()

                    await come_and_go(kubelet)
                    while "refuses" not in (ready := await http.get("/readyz")).text:
                        await come_and_go(kubelet, 1)  # until the last of the room is used
                    metrics = (await http.get("/metrics")).text

                    server.kill()
                    server.whole = settings(folder / "nats", server.port, ROOM)
                    await server.start()
                    while value(roomy := (await http.get("/metrics")).text, "topoalign_allocator_outbox_facts"):
                        await anyio.lowlevel.checkpoint()
                    await until_ready(http)
            await kubelet.until(lambda k: k.allocatable(GPU) == 0)
            tasks.cancel_scope.cancel()
        async with connect_bus(server.url) as bus:
            events = await story(bus)

    assert 503 == ready.status_code
    assert "[-] outbox: " in ready.text
    assert "insufficient resources (10023)" in ready.text
    assert value(metrics, "topoalign_allocator_outbox_facts") > 0
    assert (1, 0) == (
        value(metrics, "topoalign_allocator_outbox_refused"),
        value(roomy, "topoalign_allocator_outbox_refused"),
    )
    assert sum(isinstance(event, AllocationGranted) for event in events) >= PODS
    assert consecutive([(event.epoch, event.seq) for event in events])


def value(metrics: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"{name} "))


async def until_ready(http: httpx.AsyncClient) -> None:
    while (await http.get("/readyz")).status_code != 200:
        await anyio.lowlevel.checkpoint()


async def come_and_go(kubelet: FakeKubelet, pods: int = PODS) -> None:
    for number in range(pods):
        decision = await kubelet.admit(pod(f"pod-{number}", gpus=2))
        assert isinstance(decision, Admission), decision
        await kubelet.remove(Namespace("default"), PodName(f"pod-{number}"))


async def story(bus: Bus) -> list[LedgerFact]:
    """All allocation events of the stream."""
    events: list[LedgerFact] = []
    last = await bus.last_position(Stream.ALLOCATIONS)
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NODE)) as messages:
        async for received in messages:
            event = wire.decode_event(received.message)
            assert isinstance(event, LedgerFact)
            events.append(event)
            if received.position == last:
                break
    return events
