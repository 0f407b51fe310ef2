"""The same services, the same decisions: on a memory bus in one process, and on NATS in four."""

from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest
from e2e_support import SERVICES, allocate, answering, as_process, in_one_process, pod, release

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.ports import kept_ports

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-1.example.com")


def settings(tmp_path: Path) -> dict[str, str]:
    return {
        "TOPOALIGN_NODE": NODE,
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
        "TOPOALIGN_POLICY": "restricted",
    }


async def scenario(bus: Bus) -> list[object]:
    """A morning on a node: what was decided for each pod."""
    await answering(bus, NODE)
    story: list[object] = []
    for asked in (
        pod("four", gpus=4, cpus=48, memory=200),
        pod("two", gpus=2, nics=1, cpus=8, memory=16),
        pod("too-many", gpus=4, cpus=48, memory=200),
        pod("cpu-only", cpus=32, memory=100),
    ):
        story.append(shown(await allocate(bus, NODE, asked)))
    await release(bus, NODE, "default/four")
    story.append(shown(await allocate(bus, NODE, pod("again", gpus=4, nics=4))))
    story.append(shown(await allocate(bus, NODE, pod("wide", gpus=2, nics=2), policy="single-numa-node")))
    return story


def shown(decision: object) -> object:
    """Of a decision what does not depend on when it was made."""
    if isinstance(decision, Admission):
        return [msgspec.to_builtins(msgspec.structs.replace(a, id="")) for a in decision.allocations]
    return msgspec.to_builtins(decision)


async def held(url: str, pods: int) -> list[object]:
    """What the registry says is allocated, once it listens and has received so many."""
    async with httpx.AsyncClient(base_url=url) as http:
        while True:
            with suppress(httpx.ConnectError):
                items: list[dict[str, object]] = (await http.get("/v1/allocations")).json()["items"]
                if len(items) == pods:
                    return [{key: item[key] for key in ("owner", "devices", "cpus", "affinity")} for item in items]


async def test_one_process_in_memory_and_four_processes_on_nats_allocate_alike(tmp_path: Path) -> None:
    http = {"TOPOALIGN_HTTP_PORT": "0"}
    bus = MemoryBus()
    async with in_one_process(bus, {**settings(tmp_path / "one"), **http}) as url:
        in_memory = await scenario(bus)
        held_in_memory = await held(url, 4)

    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(local_nats(tmp_path / "nats"))
        environment = {**settings(tmp_path / "four"), "TOPOALIGN_NATS_URL": nats}
        (port,) = stack.enter_context(kept_ports(1))
        for service in SERVICES:
            extra = {"TOPOALIGN_HTTP_PORT": str(port)} if service == "registry" else {}
            await stack.enter_async_context(as_process(service, {**environment, **extra}, tmp_path / f"{service}.log"))
        over_nats = await stack.enter_async_context(connect_bus(nats))
        with anyio.fail_after(60):
            on_nats = await scenario(over_nats)
            held_on_nats = await held(f"http://127.0.0.1:{port}", 4)

    assert in_memory == on_nats
    assert held_in_memory == held_on_nats
