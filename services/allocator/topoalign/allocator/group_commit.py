"""
Allocate calls that are recorded together: one write to the journal and one sync for all that are ready.

A call that is ready joins a queue. The first in the queue waits as long as each turn of the event loop brings another one,
and then all of the queue are judged and recorded in one go. While the disk syncs, the loop stands still and further calls
gather in their sockets, so the groups are as large as the load is. A single caller waits for one turn of the loop; requests
are taken in a few in each turn (`kubelet.grpc.turns`), so those who are not alone wait for some turns without a newcomer.

A caller who gives up before its call is judged leaves the queue, and nothing is recorded for it. One who gives up later has
its record, and whoever was first in the queue records the others whether or not it has given up itself.
"""

from collections.abc import Callable, Mapping, Sequence

import anyio
from anyio.lowlevel import checkpoint

from topoalign.allocator.instances.made import Made
from topoalign.allocator.ports import AskedDevices, Poll
from topoalign.allocator.reconciliation.memory import Grant
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName


class AllocateCall:
    """One Allocate on its way into the record."""

    def __init__(
        self,
        resource: ResourceName,
        containers: AskedDevices,
        checked: int,
        made: Mapping[DeviceID, Made] = {},
    ) -> None:
        self.resource, self.containers, self.made = resource, containers, made
        """`made`: slot -> the MIG instance that was made for it."""
        self.checked = checked
        """The version of the ledger under which its devices were checked."""
        self.poll: Poll | None = None
        """What the kubelet answered when it was asked for this call; None: it was not asked."""
        self.grant: Grant | None = None
        """The moment before that; None: the moment of the record."""
        self.answers: Sequence[Allocation] | None = None
        """One allocation for each container, recorded; None: there is no answer yet."""
        self.error: Exception | None = None
        """Why it is refused."""

    def result(self) -> tuple[Allocation, ...] | None:
        """The answers; None: the kubelet has to be asked first. Raises why the call is refused."""
        if self.error is not None:
            raise self.error
        return None if self.answers is None else tuple(self.answers)


MOST_CALLS = 256
"""Recorded together."""
QUIET_TURNS = 2
"""Turns of the event loop without a newcomer after which a group is whole."""


class GroupCommit:
    """The queue of the calls that are ready."""

    def __init__(self, record: Callable[[Sequence[AllocateCall]], None]) -> None:
        """`record` judges and records calls in their order, without a pause, and gives each its answers or its error."""
        self._record = record
        self._queue: list[AllocateCall] = []
        self._recorded = anyio.Event()
        """Set once the calls that are queued now are recorded."""

    async def join(self, call: AllocateCall) -> tuple[Allocation, ...] | None:
        """Records the call with all others that are ready. Returns and raises what `AllocateCall.result` does."""
        is_first = not self._queue
        self._queue.append(call)
        try:
            await (self._gather() if is_first else self._recorded.wait())
        except BaseException:
            if call in self._queue:
                self._queue.remove(call)
            raise
        finally:
            if is_first:
                self._flush()
        return call.result()

    async def _gather(self) -> None:
        """Returns when no more calls come for now."""
        quiet, count = 0, 1
        while quiet < (1 if count == 1 else QUIET_TURNS) and count < MOST_CALLS:
            await checkpoint()
            quiet = quiet + 1 if len(self._queue) == count else 0
            count = len(self._queue)

    def _flush(self) -> None:
        """Records all that are queued, and wakes them."""
        calls, recorded = self._queue, self._recorded
        self._queue, self._recorded = [], anyio.Event()
        try:
            self._record(calls)
        finally:
            recorded.set()
