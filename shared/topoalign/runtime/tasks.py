"""
Task groups: one that raises what went wrong instead of a group around it, and one that waits for the first of several.

Structured concurrency wraps errors in ExceptionGroups, even a single one. Whoever reads our errors (the command line, a
test, an operator) is meant to meet the error itself.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from topoalign.core.errors import TopoalignError


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """Tasks that run beside the block and are cancelled when it ends. Raises the error that ended it, as itself."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = telling(group)
        if error is group:
            raise
        raise error from error.__cause__


async def either(*waits: Callable[[], Awaitable[None]]) -> None:
    """Returns when the first of these does. Opens and closes its task group between two `yield`s of its caller."""
    async with anyio.create_task_group() as tasks:

        async def run(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(run, wait)


def telling(error: BaseException) -> BaseException:
    """Of all errors in a group the one that says most: one raised on purpose, else the only one, else the group itself."""
    errors = list(leaves(error))
    purposeful = [leaf for leaf in errors if isinstance(leaf, TopoalignError)]
    if purposeful:
        return purposeful[0]
    return errors[0] if len(errors) == 1 else error


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
