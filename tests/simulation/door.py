"""The device plugin's socket between two simulated processes: what one of them calls, the other one runs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from simulation.loop import Process
from simulation.world import Violation, World

from topoalign.core.model.errors import TopoalignError, Unavailable


class Call:
    """One call over the kubelet's socket."""

    def __init__(self, method: Callable[[], Awaitable[Any]]) -> None:
        self.method = method
        self.done = anyio.Event()
        self.reset = anyio.CancelScope()
        """Cancelled when the caller has gone and the plugin notices."""
        self.is_left = False
        """Whether the caller has gone, and the plugin has not noticed it."""
        self.result: Any = None
        self.error: TopoalignError | None = None


class Door:
    """The device plugin's socket: what one process calls, the other one runs."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._line: list[Call] = []
        self._open: list[Call] = []
        self._news = anyio.Event()
        process.ended.append(self._break)

    async def call(self, method: Callable[[], Awaitable[Any]]) -> Any:
        """Raises what the method raises, or Unavailable: then nobody knows what it did."""
        if self._process.dead:
            raise Unavailable("connection refused", "wait until the plugin is back")
        call = Call(method)
        self._line.append(call)
        self._open.append(call)
        self._news.set()
        try:
            await call.done.wait()
        except asyncio.CancelledError:
            call.is_left = True
            if self._world.faults.random() < 0.5:
                self._reset(call)
            raise
        if call.error is not None:
            raise call.error
        return call.result

    def hang_up(self) -> None:
        """Ends the calls whose callers have gone: so does a plugin with its old socket before it registers anew."""
        for call in self._open:
            if call.is_left:
                self._reset(call)

    def _reset(self, call: Call) -> None:
        self._process.context.copy().run(call.reset.cancel)

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                while self._line:
                    tasks.start_soon(self._serve, self._line.pop(0))
                self._news = anyio.Event()
                await self._news.wait()

    async def _serve(self, call: Call) -> None:
        with call.reset:
            await self._world.slow()
            try:
                call.result = await call.method()
            except TopoalignError as error:
                call.error = error
            except Exception as defect:  # a defect of the product: the run ends with it
                self._world.violate(Violation("I8", f"a call failed with {defect!r}, not with an error and its remedy"))
                call.error = Unavailable("a defect of the plugin", "see the violation")
            await self._world.slow()
        self._open.remove(call)
        call.done.set()

    def _break(self) -> None:
        for call in self._open:
            call.error = Unavailable("the connection broke", "nobody knows what the plugin did")
            call.done.set()
