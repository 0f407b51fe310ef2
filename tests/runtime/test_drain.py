"""S09: after SIGTERM a process is not ready, and its services go on while their clients move to another replica."""

import os
import signal

import anyio
import httpx
import pytest
from anyio.abc import TaskStatus
from runner_support import ENVIRONMENT, Recorder

from topoalign.runtime import runner
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.runner import serve_all
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

DRAIN_SECONDS = 5.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_services_go_on_while_they_drain_and_no_page_is_ready(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM is what a kubelet sends; Ctrl-C in a terminal ends the services at once."""
    clock = ManualClock()
    monkeypatch.setattr(runner, "SystemClock", lambda: clock)
    recorder = Recorder()
    draining = anyio.Event()
    ended = anyio.Event()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        context.drain.seconds = DRAIN_SECONDS
        context.readiness["scheduler"] = {}
        task_status.started()
        try:
            await context.drain.begun.wait()
            draining.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def run() -> None:
        await serve_all({"registry": serve}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await recorder.ready.wait()
        assert recorder.running is not None and recorder.running.http is not None
        async with httpx.AsyncClient(base_url=recorder.running.http) as http:
            before = [(await http.get(page)).status_code for page in ("/readyz", "/readyz/scheduler")]
            os.kill(os.getpid(), number)
            if number == signal.SIGTERM:
                await draining.wait()
                after = [(await http.get(page)).status_code for page in ("/livez", "/readyz", "/readyz/scheduler")]
                assert [200, 503, 503] == after
                await clock.advance(DRAIN_SECONDS - 0.1)
                await all_tasks_blocked()
                assert not ended.is_set()
                await clock.advance(0.1)
        with anyio.fail_after(30):
            await ended.wait()

    assert [200, 200] == before
