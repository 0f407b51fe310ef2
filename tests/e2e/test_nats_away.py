"""Allocations do not wait for NATS: they are made while it is away, and every event arrives afterwards, in order."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from e2e_support import environment, in_one_process, pod
from kubelet_support import learn_owners

from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationBound, AllocationGranted, AllocationReleased, LedgerFact
from topoalign.core.model.ids import GPU, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.ports import Bus, Stream
from topoalign.machines import load_machine
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-1.example.com")
PODS = 40


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


async def story(bus: Bus, granted: int) -> list[LedgerFact]:
    """The node's allocation events in the order of the stream, up to and with so many grants that were bound."""
    events: list[LedgerFact] = []
    bound = 0
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NODE)) as messages:
        async for received in messages:
            event = wire.decode_event(received.message)
            assert isinstance(event, LedgerFact)
            events.append(event)
            bound += isinstance(event, AllocationBound)
            if bound == granted:
                return events
    return events


async def test_pods_go_on_while_nats_is_away_and_all_events_arrive_later(
    folder: Path,
) -> None:
    """NATS is not there when the node comes up, comes, goes again, and comes back with its store."""
    async with local_nats(folder / "nats") as first_url:
        port = int(first_url.rsplit(":", 1)[1])
    url = f"nats://127.0.0.1:{port}"
    machine = load_machine("dgx-a100").topology
    rules = AdmissionRules(policy=Policy.BEST_EFFORT)
    kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, rules)
    async with anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        async with in_one_process(None, environment(NODE, url, folder), ("discovery", "hinting", "allocator")):
            await kubelet.until(lambda k: k.allocatable(GPU) == 8)
            await come_and_go(kubelet, range(PODS))

            async with local_nats(folder / "nats", port), connect_bus(url) as bus:
                await story(bus, PODS)
            await come_and_go(kubelet, range(PODS, 2 * PODS))

            async with local_nats(folder / "nats", port), connect_bus(url) as bus:
                events = await story(bus, 2 * PODS)
        await kubelet.until(lambda k: k.allocatable(GPU) == 0)
        tasks.cancel_scope.cancel()

    numbers = [event.seq for event in events]
    granted = [event.allocation.id for event in events if isinstance(event, AllocationGranted)]
    bound = [event.owner.pod for event in events if isinstance(event, AllocationBound)]
    released = [event.allocation for event in events if isinstance(event, AllocationReleased)]
    assert list(range(1, len(numbers) + 1)) == numbers
    assert 2 * PODS == len(granted)
    assert [f"pod-{number}" for number in range(2 * PODS)] == bound
    assert set(released) <= set(granted)


async def come_and_go(kubelet: FakeKubelet, numbers: range) -> None:
    """Pods of two GPUs, one after the other; each goes when the next but two has come."""
    for number in numbers:
        if number >= numbers.start + 3:
            await kubelet.remove(Namespace("default"), PodName(f"pod-{number - 3}"))
        decision = await kubelet.admit(pod(f"pod-{number}", gpus=2))
        assert isinstance(decision, Admission), decision
        await learn_owners(kubelet)
    for number in numbers[-3:]:
        await kubelet.remove(Namespace("default"), PodName(f"pod-{number}"))
