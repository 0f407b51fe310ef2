"""
Stops a program gracefully at a signal: SIGTERM, Ctrl-C, or the end of its terminal.

It is for programs that contain services (`topoalign up`, `demo`, `simulate`). A process has only one handler for a
signal. So the program receives its signals here, and the services in it stop by cancellation.
"""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from topoalign.runtime.tasks import background

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@asynccontextmanager
async def until_signal() -> AsyncIterator[None]:
    """
    Cancels the block at the first signal of `ENDS` that was not ignored at the start (nohup), and exits without an
    error. The interpreter handles a second signal. Raises the error that ended the block, not an ExceptionGroup.
    """
    async with background() as tasks:
        await tasks.start(cancel_on_signal, tasks.cancel_scope.cancel)
        yield


async def cancel_on_signal(cancel: Callable[[], None], *, task_status: TaskStatus[None]) -> None:
    """Calls `cancel` at the first signal. Reports its start when it can receive signals."""
    handled = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    if not handled:
        task_status.started()
        return
    with anyio.open_signal_receiver(*handled) as signals:
        task_status.started()
        async for _ in signals:
            cancel()
            return


def run_until_signal(main: Callable[[], Awaitable[None]]) -> bool:
    """Runs `main` in an event loop. Returns whether `main` returned. Raises what `main` raises."""
    ended = False

    async def run() -> None:
        nonlocal ended
        async with until_signal():
            await main()
            ended = True

    anyio.run(run)
    return ended
