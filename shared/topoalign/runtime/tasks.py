"""
Task groups that raise the error itself, wait for the first of several tasks, or process many items; and a check for
tasks that end without a request to end.

Structured concurrency wraps even a single error in an ExceptionGroup. The readers of errors (the command line, a test,
an operator) need the error itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from topoalign.core.model.errors import TopoalignError, Unavailable

T = TypeVar("T")


class StoppedUnasked(Unavailable):
    """
    Raised when a task that must run until it is cancelled has ended.

    Remedy: Report it with the log: it is a defect of topoalign.
    """

    def __init__(self, what: str, how: str) -> None:
        super().__init__(
            f"{what} stopped although nothing asked it to: {how}",
            "start it again, and report this with the log lines before it: it is a defect of topoalign",
        )


async def run_until_cancelled(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """
    Runs a function that must not return before it is cancelled. Raises StoppedUnasked if it returns, or if the
    cancellation of another task ends it: a task group would treat both as an end without an error.
    """
    task = asyncio.current_task()
    assert task is not None, "only called from tasks"
    asked = task.cancelling()
    try:
        await run()
    except asyncio.CancelledError as error:
        if task.cancelling() > asked:
            raise
        raise StoppedUnasked(what, "something that it waited for was cancelled") from error
    if task.cancelling() == asked:
        raise StoppedUnasked(what, "it returned, or a task of it was cancelled")


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """Runs tasks while the block runs, and cancels them when it ends. Raises an error itself, not an ExceptionGroup."""
    with without_group():
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()


async def for_each(items: Sequence[T], run: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """Runs a function for each item, for at most `at_once` items at a time. The first error stops it and is raised."""
    remaining = iter(items)

    async def run_remaining() -> None:
        for item in remaining:
            await run(item)

    with without_group():
        async with anyio.create_task_group() as tasks:
            for _ in range(min(at_once, len(items))):
                tasks.start_soon(run_remaining)


async def wait_for_first(*waits: Callable[[], Awaitable[None]]) -> None:
    """Returns when the first of these returns. Its task group does not stay open across a `yield` of the caller."""
    async with anyio.create_task_group() as tasks:

        async def run(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(run, wait)


@contextmanager
def without_group() -> Iterator[None]:
    """Raises the most specific error of an ExceptionGroup that the block raises."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = most_specific_error(group)
        if error is group:
            raise
        raise error from error.__cause__


def most_specific_error(error: BaseException) -> BaseException:
    """The most specific error of a group: a TopoalignError, or else the only error, or else the group itself."""
    errors = list(leaf_errors(error))
    purposeful = [leaf for leaf in errors if isinstance(leaf, TopoalignError)]
    if purposeful:
        return purposeful[0]
    return errors[0] if len(errors) == 1 else error


def leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors inside an ExceptionGroup, at any depth; any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaf_errors(inner)
    else:
        yield error
