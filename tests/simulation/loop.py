"""
An event loop in which chance is a seed and time costs nothing.

It is asyncio's own loop with three differences. Its selector never waits: where nothing is ready, the time moves to the next
timer at once. What is ready runs in an order that the seed draws, because nothing may rely on another order than the one it
asks for. And tasks belong to simulated processes, which can be killed at any await, or stopped and continued, while the
others go on.

The same seed gives the same run, to the byte, in any process: no thread can be started, no clock is read, and where Python's
own order depends on addresses (who is cancelled first in a process that dies) what runs can no longer be observed.
"""

import asyncio
import threading
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from random import Random
from selectors import BaseSelector, SelectorKey
from typing import Any, NoReturn, TypeVar
from weakref import ReferenceType, ref

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, None]]

MOST_DYING_ROUNDS = 10_000
"""A killed process whose tasks have not ended after so many rounds does not end at all."""


class Stalled(Exception):
    """Everybody waits and nothing is due: the run can never end."""


class Process:
    """A simulated process: what its tasks have in memory is lost when it is killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.root: asyncio.Task[None] | None = None
        self.ended: list[Callable[[], None]] = []
        """Called once, at the moment it dies: connections to it break."""
        self.context = copy_context()
        """What is run in a copy of it is run as this process."""
        self.context.run(PROCESS.set, self)


PROCESS: "ContextVar[Process | None]" = ContextVar("PROCESS", default=None)


class DeafSelector(BaseSelector):
    """Knows its files and never waits for one."""

    def __init__(self) -> None:
        self._keys: dict[Any, SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:
        self._keys[fileobj] = SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, SelectorKey]:
        return self._keys


class Ready(Handle):
    """A `Handle` without asyncio's look at the debug mode, which no simulation has: most of a run's calls are of these."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class Timer(TimerHandle):
    """The same of a `TimerHandle`."""

    __slots__ = ()
    _when: float

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        """Of timers only: nothing else is in a loop's heap."""
        return bool(self._when < other._when)


class NumberedTask(asyncio.Task[T]):
    """A task with its place in the order in which all are created."""

    __slots__ = ("number",)
    number: int


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Virtual time from 0, and an order drawn by the seed."""

    _ready: deque[Handle]
    _scheduled: list[Timer]

    def __init__(self, seed: int) -> None:
        self.rounds = 0
        self._now = 0.0
        self._chance = Random(f"order-{seed}")
        self._held: list[Handle] = []
        self._unclosed: list[AsyncGenerator[Any, Any]] = []
        self._dying: list[Process] = []
        """Killed, and not ended yet."""
        self._stopped = 0
        """Processes that are stopped now."""
        self._created: list[ReferenceType[NumberedTask[Any]]] = []
        """Every task that was created."""
        super().__init__(DeafSelector())

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # asyncio's own types the arguments of the callback
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Ready(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as `call_soon`
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as `call_soon`
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = Timer(when, callback, args, self, context)
        heappush(self._scheduled, timer)
        return timer

    def start(self, process: Process, main: Main) -> None:
        """Runs `main` as this process."""
        process.root = self.create_in(process, main)

    def create_in(self, process: Process, main: Main) -> "asyncio.Task[None]":
        """A further task of this process, which is to be cancelled when it dies."""
        return self.create_task(run_quietly(main, process), context=process.context.copy())

    def kill(self, process: Process) -> None:
        """As SIGKILL does: from now on nothing that its tasks do is received by others; its ports see to that."""
        if process.dead:
            return
        self.carry_on(process)
        process.dead = True
        self._dying.append(process)
        for tell in process.ended:
            tell()

    def pause(self, process: Process) -> None:
        """As SIGSTOP does."""
        if not process.stopped:
            process.stopped = True
            self._stopped += 1

    def carry_on(self, process: Process) -> None:
        """As SIGCONT does: what came due meanwhile is due at once."""
        if process.stopped:
            process.stopped = False
            self._stopped -= 1
            self._ready.extend(self._held)  # another's are put aside again
            self._held.clear()

    def _run_once(self) -> None:
        """One round of asyncio's loop: due timers are made ready, and everything that is ready runs once."""
        self.rounds += 1
        if self._dying:
            self._bury()
        self._make_ready()
        while not self._ready:
            self._jump()
            self._make_ready()
        if len(self._ready) > 1:
            ready = sorted(self._ready, key=self._number_of)
            self._chance.shuffle(ready)
            self._ready.clear()
            self._ready.extend(ready)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> "asyncio.Task[Any]":
        """Tasks are told apart by the order in which they are created, which no address decides."""
        task = NumberedTask(coro, loop=self, name=name, context=context)
        self._created.append(ref(task))
        task.number = len(self._created)
        return task

    def unfinished(self) -> "list[asyncio.Task[Any]]":
        """The tasks that have not ended. `asyncio.all_tasks` looks through those of all earlier loops."""
        found = (created() for created in self._created)
        return [task for task in found if task is not None and not task.done()]

    def _number_of(self, handle: Handle) -> int:
        """The number of the task that a handle runs; 0 if it runs none. Who cancels several tasks does it by address."""
        task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # asyncio's own
        return task.number if isinstance(task, NumberedTask) else 0

    def _make_ready(self) -> None:
        """What is due is ready, but for what stopped processes would do."""
        scheduled, now = self._scheduled, self._now
        while scheduled and scheduled[0]._when <= now:
            self._ready.append(heappop(scheduled))
        if self._stopped:
            ready = list(self._ready)
            self._held += [handle for handle in ready if is_stopped(handle)]
            self._ready.clear()
            self._ready.extend(handle for handle in ready if not is_stopped(handle))

    def _jump(self) -> None:
        """To the next timer, the time flying."""
        while self._scheduled and self._scheduled[0].cancelled():
            heappop(self._scheduled)
        if not self._scheduled:
            raise Stalled("nothing is due and nobody is ready")
        self._now = self._scheduled[0].when()

    def _bury(self) -> None:
        """
        Lets the tasks of dead processes end, before anybody else has a turn and without an order of the seed. What they
        have begun may run until it waits, so that no task is cancelled before it has begun: Python would complain.
        """
        self._run_dead()
        for process in self._dying:
            if process.root is not None:
                process.root.cancel()
        self._dying.clear()
        self._run_dead()

    def _run_dead(self) -> None:
        for _ in range(MOST_DYING_ROUNDS):
            dead = [handle for handle in self._ready if is_dead(handle)]
            if not dead:
                return
            alive = [handle for handle in self._ready if not is_dead(handle)]
            self._ready.clear()
            self._ready.extend(alive)
            for handle in dead:
                run(handle)
        raise Stalled("a killed process does not end")

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """When the garbage collector finds a generator is not the seed's to say: it is closed at the end of the run."""
        self._unclosed.append(agen)


def run(handle: Handle) -> None:
    if not handle.cancelled():
        handle._run()


def process_of(handle: Handle) -> Process | None:
    context: Context = handle._context  # type: ignore[attr-defined]  # asyncio's own, not in the stubs
    return context.get(PROCESS)


def is_dead(handle: Handle) -> bool:
    process = process_of(handle)
    return process is not None and process.dead


def is_stopped(handle: Handle) -> bool:
    process = process_of(handle)
    return process is not None and process.stopped


async def run_quietly(main: Main, process: Process) -> None:
    """What a process that was killed has to say of it is of no interest."""
    try:
        await main()
    except BaseException:
        if not process.dead:
            raise


def simulate(seed: int, main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs `main(loop)` to its end in a loop of its own."""
    loop = SimulatedLoop(seed)
    with no_threads():
        try:
            return loop.run_until_complete(main(loop))
        finally:
            loop.run_until_complete(end(loop.unfinished()))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


@contextmanager
def no_threads() -> Iterator[None]:
    """What a thread does cannot be replayed, so none may be started."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("a thread in a simulation")

    start = threading.Thread.start
    threading.Thread.start = refuse  # type: ignore[assignment,method-assign]  # for the time of the run
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]  # as it was


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
