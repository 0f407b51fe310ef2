"""What serves until it is told to stop and stops by itself ends its process with an error: a supervisor starts it again."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus
from bus_support import killable
from runner_support import ENVIRONMENT, Recorder

from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.runner import serve_all
from topoalign.runtime.tasks import StoppedUnasked
from topoalign.runtime.watchdog import Watchdog
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


async def returns(context: Context) -> None:
    """A service that has nothing more to do."""


async def waits_for_what_is_cancelled(context: Context) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def has_a_task_that_waits_for_what_is_cancelled(context: Context) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits_for_what_is_cancelled, context)
        await anyio.sleep_forever()


@pytest.mark.parametrize("end", [returns, waits_for_what_is_cancelled, has_a_task_that_waits_for_what_is_cancelled])
async def test_a_service_that_stops_although_nobody_asked_it_to_has_failed(
    end: Callable[[Context], Awaitable[None]],
) -> None:
    """Without an error of its own the process would end with exit code 0, and say nothing."""
    recorder = Recorder()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await recorder.ready.wait()
        await end(context)

    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="hinting stopped although nothing asked it to"):
        await serve_all(
            {"discovery": recorder.service("discovery"), "hinting": serve},
            ENVIRONMENT,
            bus=MemoryBus(),
            ready=recorder.note,
        )

    assert "discovery ends" == recorder.events[-1]


async def test_a_service_that_stops_before_it_serves_has_failed() -> None:
    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        return

    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="hinting stopped although nothing asked it to"):
        await serve_all({"hinting": serve}, ENVIRONMENT, bus=MemoryBus())


async def test_what_runs_beside_the_services_does_not_end_them_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    async def run(self: Watchdog) -> None:
        await recorder.ready.wait()
        await waits_for_what_is_cancelled(Context(bus=MemoryBus(), clock=ManualClock(), environment={}))

    monkeypatch.setattr(Watchdog, "run", run)
    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="discovery stopped although nothing asked it to"):
        await serve_all({"discovery": recorder.service("discovery")}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)


@pytest.mark.parametrize("patient", [True, False])
async def test_a_service_that_ends_when_asked_to_has_not_failed(patient: bool) -> None:
    """However a service ends after it was asked to stop, it has not failed."""
    recorder = Recorder()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:  # bad manners, and no failure
            if patient:
                raise

    async def stop() -> None:
        await recorder.ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        with anyio.fail_after(30):
            await serve_all({"hinting": serve}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)


PLANTED = """
import asyncio
from topoalign.cli import main
from topoalign.runtime.nats_bus.nats_connection import NatsConnection

async def until_lost(self):
    raise asyncio.CancelledError

NatsConnection.until_lost = until_lost
main()
"""


async def test_an_agent_whose_bus_ends_by_itself_exits_with_a_reason(tmp_path: Path) -> None:
    """In a process of its own: the exit code is what a supervisor restarts it by."""
    async with killable(tmp_path / "nats") as server:
        environment = {**os.environ, **ENVIRONMENT, "TOPOALIGN_NATS_URL": server.url}
        done = await anyio.run_process(
            [sys.executable, "-c", PLANTED, "hinting"], env=environment, check=False, stderr=subprocess.PIPE
        )

    assert 69 == done.returncode
    assert "the connection to NATS stopped although nothing asked it to" in done.stderr.decode()
