"""A node's record and its outbox, without the services around them, for tests of a bus that goes away."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

import anyio

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.client import Client, Delivery
from topoalign.core import wire
from topoalign.core.model.events import Allocation, LedgerFact
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.replies import answer_with

NODE = NodeName("gpu-7.example.com")


@contextmanager
def opened(folder: Path, clock: Clock | None = None, **bounds: int) -> Iterator[Ledger]:
    """The ledger on disk as a process has it that starts now, until that process is gone."""
    with open_journal(folder, NODE) as journal:
        yield Ledger(NODE, journal, clock or SystemClock(), **bounds)


def come_and_go(ledger: Ledger, times: int) -> None:
    """As many facts: a GPU is given away and given back, by turns."""
    for number in range(times):
        if ledger.state.allocations:
            ledger.release(tuple(ledger.state.allocations), "released")
        else:
            allocation = Allocation(id=ledger.next_id(), devices={GPU: (DeviceID(f"GPU-{number % 8}"),)})
            ledger.grant([allocation])


@asynccontextmanager
async def telling(ledger: Ledger, bus: Bus, clock: Clock | None = None) -> AsyncIterator[Outbox]:
    """The outbox at work, and the allocator's answer to whoever misses something."""

    async def announce(request: NodeRequest) -> tuple[int, int]:
        return ledger.announce()

    outbox = Outbox(ledger, bus, clock or SystemClock())
    subject = wire.admission_subject(ledger.node, "snapshot")
    endpoint = Endpoint(name="snapshot", subject=subject, answer=answer_with(NodeRequest, announce))
    async with bus.serve("topoalign-allocator", [endpoint]), anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        yield outbox
        tasks.cancel_scope.cancel()


async def emptied(ledger: Ledger) -> None:
    """Until the bus has everything."""
    while ledger.pending:
        await anyio.lowlevel.checkpoint()


class Listener:
    """A subscriber that notes what it was told, and folds it as any other would."""

    def __init__(self, bus: Bus, node: NodeName = NODE) -> None:
        self.client = Client(bus, name="listener")
        self.told: list[Delivery] = []
        self.state = NodeState(node=node)

    async def listen(self) -> None:
        async with aclosing(self.client.allocations(since=0, node=self.state.node)) as events:
            async for delivery in events:
                self.told.append(delivery)
                self.state = self.state.apply(delivery.event)

    async def listen_to_readings(self) -> None:
        async with aclosing(self.client.nodes(node=self.state.node)) as events:
            async for delivery in events:
                self.state = self.state.apply(delivery.event)

    async def agrees_with(self, ledger: Ledger) -> None:
        """Until it has been told what the ledger holds."""
        while place(self.state) != place(ledger.state):
            await anyio.lowlevel.checkpoint()

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """Epoch and number of every fact it was told, in order."""
        return [(one.event.epoch, one.event.seq) for one in self.told if isinstance(one.event, LedgerFact)]


def place(state: NodeState) -> tuple[int | str, ...]:
    readings = [each for each in (state.topology, state.health, state.usage) if each is not None]
    return (
        state.epoch,
        state.seq,
        state.digest,
        *(number for each in readings for number in (each.epoch, each.revision)),
    )


def consecutive(numbers: list[tuple[int, int]]) -> bool:
    """Whether each fact is the next of its epoch, or the first of a later one: none twice, none left out, none too soon."""
    return all(
        (epoch == before[0] and seq == before[1] + 1) or (epoch > before[0] and seq == 1)
        for before, (epoch, seq) in pairwise(numbers)
    )
