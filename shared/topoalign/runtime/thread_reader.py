"""Reads files in a thread with a time limit, because a disk can hang and a thread cannot be stopped."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
from anyio import to_thread

T = TypeVar("T")


class ThreadReader(Generic[T]):
    """Runs one read at a time. While a read hangs, no other read starts."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._is_reading = False

    async def read(self, read: Callable[[], T], seconds: float) -> T:
        """Calls `read` in a thread and returns its result. Raises TimeoutError after `seconds`, or if another hangs."""

        def work() -> T:
            self._is_reading = True
            try:
                return read()
            finally:
                self._is_reading = False

        with anyio.fail_after(seconds):
            async with self._turn:
                if not self._is_reading:
                    return await to_thread.run_sync(work, abandon_on_cancel=True)
        raise TimeoutError("an earlier read hangs")
