"""
A whole node in one process, as its services run it: a stand-in NVML under the real pynvml, discovery, hinting, allocator,
registry, and a kubelet over real sockets. Only time and the bus are in memory.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from kubelet_support import RESTRICTED, short_directory, two_nodes
from nvml_support import QuickClock, StandIn, script
from starlette.applications import Starlette

from topoalign.allocator import main as allocator
from topoalign.core import wire
from topoalign.core.model.decisions import Explained
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import ExplainRequest
from topoalign.discovery import main as discovery
from topoalign.hinting import main as hinting
from topoalign.registry import main as registry
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

NODE = NodeName("node-1")
READ_SECONDS = 10.0
FOREVER = "1000000"
"""Seconds of an injected clock that real threads, which live by another time, never take."""
HURRY = "hurry 100"
"""For the stand-in: time passes a hundred times faster than it thinks."""


@dataclass
class WholeNode:
    root: Path
    standin: StandIn
    clock: QuickClock
    bus: MemoryBus
    kubelet: FakeKubelet
    context: Context

    async def play(self, *more: str, gpus: Sequence[int] = range(8)) -> None:
        """From now on another machine; no reading sees half of it."""
        await self.play_machine(script(gpus=gpus, more=[HURRY, *more]))

    async def play_machine(self, machine: str) -> None:
        await self.clock.driver_rests()
        self.standin.play(machine)

    def counted(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        return self.context.metrics.get_sample_value(name, dict(labels or {})) or 0.0

    async def until(self, true: Callable[[], object]) -> None:
        """Threads and sockets take their own time, but no time of the clock."""
        while not true():
            await anyio.lowlevel.checkpoint()

    async def reading(self) -> None:
        """A whole reading of the hardware as it is from now on."""
        done = self.counted("topoalign_discovery_read_seconds_count")
        while self.counted("topoalign_discovery_read_seconds_count") < done + 2:  # the first may have begun before
            await self.clock.advance(READ_SECONDS / 4)

    async def explain(self, target: str) -> Explained:
        request = msgspec.json.encode(ExplainRequest(node=NODE, target=target))
        return wire.decode_answer(await self.bus.ask(wire.admission_subject(NODE, "explain"), request, 10.0), Explained)

    def healthy(self) -> frozenset[str]:
        """GPUs that the kubelet would hand out, busy or not."""
        return frozenset(self.kubelet.state().healthy(GPU))

    async def get(self, path: str) -> Any:
        """From the registry's HTTP API."""
        transport = httpx.ASGITransport(app=Starlette(routes=self.context.routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
            return (await http.get(path)).json()


@asynccontextmanager
async def whole_node(
    root: Path, standin: StandIn, state: Path, *, driver_seconds: str = FOREVER, config: str = "", offered: int = 8
) -> AsyncIterator[WholeNode]:
    """Runs everything on this host tree and this library; yields once the kubelet has so many GPUs or shares of them."""
    with short_directory() as directory:
        clock, bus = QuickClock(standin), MemoryBus()
        settings = {
            "NODE": NODE,
            "DRIVER": "nvml",
            "SYSFS_ROOT": str(root),
            "STATE_DIR": str(state),
            "READ_SECONDS": str(READ_SECONDS),
            "DRIVER_SECONDS": driver_seconds,
            "KUBELET_DIR": str(directory / "device-plugins"),
            "SETTLE_SECONDS": "0",
        } | ({"CONFIG": config} if config else {})
        context = Context(
            bus=bus, clock=clock, environment={f"TOPOALIGN_{name}": value for name, value in settings.items()}
        )
        kubelet = FakeKubelet(directory / "device-plugins", directory / "pod-resources", two_nodes(), RESTRICTED)
        async with background() as tasks:
            await tasks.start(kubelet.run)
            for service in (discovery, hinting, allocator, registry):
                await tasks.start(service.serve, context)
            node = WholeNode(root, standin, clock, bus, kubelet, context)
            while len(node.healthy()) < offered:
                await clock.advance(0.1)
            yield node
