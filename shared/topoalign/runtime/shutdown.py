"""
Ends a program in order at a signal: SIGTERM, Ctrl-C, or the end of its terminal.

It is for programs of which services are a part (`topoalign up`, `demo`, `simulate`). A signal has one handler in a process.
So each program receives its signals here, once, and the services in it end by cancellation.
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
    Cancels the block at the first signal of `ENDS` that was not ignored at the start (nohup), and leaves it without error.
    The interpreter handles a second signal. Raises the error that ended the block, as itself.
    """
    async with background() as tasks:
        await tasks.start(cancel_on_signal, tasks.cancel_scope.cancel)
        yield


async def cancel_on_signal(cancel: Callable[[], None], *, task_status: TaskStatus[None]) -> None:
    """Started once signals are received; calls `cancel` at the first."""
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
    """Runs `main` in an event loop. Returns whether it came to its end. Raises what `main` raises."""
    ended = False

    async def run() -> None:
        nonlocal ended
        async with until_signal():
            await main()
            ended = True

    anyio.run(run)
    return ended
