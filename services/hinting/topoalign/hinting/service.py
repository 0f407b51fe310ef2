"""
Answers hint questions about one node.

A question contains all data on which its answer depends, except the hardware, whose revision it names. So every process
gives the same answer at any time. If this service does not have the revision, it refuses the question, and the caller
runs the providers in its own process instead.
"""

import anyio
from anyio.abc import TaskStatus

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.hints.providers import answer_hint_request, request_of_question
from topoalign.core.model.errors import InvalidField, Unavailable
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Endpoint
from topoalign.runtime.replies import answer_with

SERVICE = "topoalign-hinting"


class UnknownTopology(Unavailable):
    """
    Raised for a hint question about a revision of the hardware that the hinting service does not have.

    Remedy: Nothing: meanwhile, the allocator decides without the hinting service.
    """

    def __init__(self, asked: tuple[int, int], known: tuple[int, int] | None) -> None:
        has = "none is known" if known is None else f"epoch {known[0]}, revision {known[1]} is known"
        super().__init__(
            f"the question is about the hardware of epoch {asked[0]}, revision {asked[1]}, and here {has}",
            "ask the providers in process; this service catches up by itself",
        )


class Hinting:
    """The hinting service of one node."""

    def __init__(self, node: NodeName, bus: Bus, clock: Clock) -> None:
        self._node = node
        self._bus = bus
        self._clock = clock
        self._topology: TopologyDiscovered | None = None

    def topology_unknown(self) -> str | None:
        """For /readyz: why no question can be answered; None: the topology has been received."""
        return None if self._topology is not None else "the topology of this node has not been received yet"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled. Reports that it has started once questions are answered, even without the topology."""
        hints = Endpoint(
            name="hints", subject=wire.hints_subject(self._node), answer=answer_with(HintQuestion, self.answer)
        )
        async with self._bus.serve(SERVICE, [hints]), anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_topology)
            task_status.started()

    async def _follow_topology(self) -> None:
        async for delivery in Client(self._bus, self._clock, SERVICE).nodes(node=self._node):
            if isinstance(delivery.event, TopologyDiscovered):
                self._topology = delivery.event

    async def answer(self, question: HintQuestion) -> HintAnswer:
        """Answers a question. Raises UnknownTopology, InvalidField, and what the providers raise."""
        if question.node != self._node:
            raise InvalidField("node", f"this is the hinting service of {self._node}", "ask that node's own")
        known = self._topology
        if known is None or question.topology != (known.epoch, known.revision):
            raise UnknownTopology(question.topology, (known.epoch, known.revision) if known is not None else None)
        return answer_hint_request(request_of_question(question, known))
