"""A process whose place another has taken serves nothing, and waits to be stopped."""

import anyio
import httpx
import pytest
from anyio.abc import TaskStatus

from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.runner import RunningServices, run_services

pytestmark = pytest.mark.anyio


async def test_all_services_end_and_the_process_lives_on_without_being_ready() -> None:
    """Were it to end, whatever watches over it would start it again, and the two would quarrel."""
    ended: list[str] = []
    all_ended = anyio.Event()
    url = ""

    def ready(running: RunningServices) -> None:
        nonlocal url
        url = running.http or ""

    async def serve(name: str, context: Context, task_status: TaskStatus[None]) -> None:
        context.checks[name] = lambda: None
        task_status.started()
        try:
            if name == "allocator":
                context.superseded.set()
            await anyio.sleep_forever()
        finally:
            ended.append(name)
            if len(ended) == 2:
                all_ended.set()

    async def allocator(context: Context, *, task_status: TaskStatus[None]) -> None:
        await serve("allocator", context, task_status)

    async def discovery(context: Context, *, task_status: TaskStatus[None]) -> None:
        await serve("discovery", context, task_status)

    services = {"discovery": discovery, "allocator": allocator}
    environment = {"TOPOALIGN_NODE": "node-1", "TOPOALIGN_HTTP_PORT": "0"}
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await run_services(services, environment, bus=MemoryBus(), ready=ready)

        tasks.start_soon(run)
        with anyio.fail_after(20):
            await all_ended.wait()
        async with httpx.AsyncClient(base_url=url) as http:
            alive, readiness = await http.get("/livez"), await http.get("/readyz?verbose")
        tasks.cancel_scope.cancel()

    assert {"allocator", "discovery"} == set(ended)
    assert 200 == alive.status_code
    assert 503 == readiness.status_code
    assert "another process has taken this one's place" in readiness.text
    assert "discovery" not in readiness.text
