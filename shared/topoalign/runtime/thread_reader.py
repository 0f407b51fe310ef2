"""Reads files in a thread with a time limit, because a disk may hang and a thread cannot be ended."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
from anyio import to_thread

T = TypeVar("T")


class ThreadReader(Generic[T]):
    """Reads one thing after the other. While a read hangs, no other is started."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._is_reading = False

    async def read(self, read: Callable[[], T], seconds: float) -> T:
        """Calls `read` in a thread and returns its result. Raises TimeoutError if that takes longer."""

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
