"""
Runs the allocator of one node: its ledger, the hardware watch, the outbox, and the requests of the bus and the kubelet.

Allocations continue while the bus is disconnected. The hardware is received from discovery, and the outbox publishes
allocations. No decision waits for the outbox. A decision waits for discovery only if the health of the devices is
unconfirmed, and then for a few seconds at most.
"""

from collections.abc import Sequence

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger, container_title
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.allocator.reconciliation.usage_publisher import UsagePublisher
from topoalign.allocator.requests.admissions import Admissions, check_own
from topoalign.core import wire
from topoalign.core.model.errors import StateFault, Unavailable, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import ExplainRequest, NodeRequest, WriterPosition
from topoalign.core.ports import Bus, Endpoint
from topoalign.runtime.clock import until_tick
from topoalign.runtime.replies import answer_with


class WriterPositions:
    """
    Answers `alive` with the `WriterPosition` of the node, and publishes its usage again on `announce`. A subscriber
    cannot recognize a forged fact by its number, so it compares it with the writer's last publication.
    """

    def __init__(self, ledger: Ledger, hardware_watch: HardwareWatch, usage: UsagePublisher) -> None:
        self._ledger = ledger
        self._hardware_watch = hardware_watch
        self._usage = usage

    def endpoints(self) -> Sequence[Endpoint]:
        """The endpoints `alive` and `announce`, to serve on the bus."""
        node = self._ledger.node
        answers = {
            "alive": answer_with(NodeRequest, self.alive),
            "announce": answer_with(NodeRequest, self.announce),
        }
        return [
            Endpoint(name=verb, subject=wire.admission_subject(node, verb), answer=a) for verb, a in answers.items()
        ]

    async def alive(self, request: NodeRequest) -> WriterPosition:
        """Returns the numbers and the digest of the last publication. Raises InvalidField for another node."""
        check_own(self._ledger, request.node)
        state = self._ledger.state
        readings = {**self._hardware_watch.newest, **self._usage_position()}
        return WriterPosition(epoch=state.epoch, seq=state.seq, digest=state.digest, readings=readings)

    async def announce(self, request: NodeRequest) -> dict[str, tuple[int, int]]:
        """Publishes the usage under a new epoch; returns epoch and revision. Raises InvalidField for another node."""
        check_own(self._ledger, request.node)
        self._usage.announce()
        return self._usage_position()

    def _usage_position(self) -> dict[str, tuple[int, int]]:
        """Empty until the usage is published, because nobody can have received it."""
        usage = self._ledger.state.usage
        return {"usage": (usage.epoch, usage.revision)} if usage is not None and self._usage.has_published else {}


SERVICE = "topoalign-allocator"
DUPLICATE_SECONDS = 0.5
"""Seconds that another allocator of the same node may take to answer. If there is none, the bus answers at once."""

MOST_PAIRS = 3
"""Maximum number of pairs that a reason lists."""

log = structlog.get_logger("topoalign.allocator")


class Allocator:
    """Runs the tasks of a node's allocator as one service, and answers /readyz for them."""

    def __init__(  # one parameter for each collaborator
        self,
        ledger: Ledger,
        bus: Bus,
        hardware_watch: HardwareWatch,
        admissions: Admissions,
        device_allocations: DeviceAllocations | None,
        *,
        reconcile_seconds: float,
        reservations: NodeReservationList | None = None,
        hub: Bus | None = None,
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        """
        `device_allocations`, `reservations`: None if no kubelet allocates the devices of the node. `device_allocations`
        is reconciled every `reconcile_seconds`. `hub`: the bus shared by all nodes, if `bus` is the one inside this
        process. `endpoints`: further endpoints of this service.
        """
        self._reconcile_seconds = reconcile_seconds
        self.ledger = ledger
        self.hardware_watch = hardware_watch
        self.admissions = admissions
        self.device_allocations = device_allocations
        self.reservations = reservations
        self.outbox = Outbox(ledger, bus, ledger.clock)
        self.usage = UsagePublisher(ledger, bus, ledger.clock, hub or bus)
        self._bus = bus
        self._endpoints = endpoints

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves the bus and runs all tasks until cancelled. Reports that it has started once requests are answered."""
        positions = WriterPositions(self.ledger, self.hardware_watch, self.usage)
        endpoints = [*self.admissions.endpoints(), *positions.endpoints(), *self._endpoints]
        async with self._bus.serve(SERVICE, endpoints), anyio.create_task_group() as tasks:
            tasks.start_soon(self.hardware_watch.run)
            tasks.start_soon(self.outbox.run)
            tasks.start_soon(self.outbox.watch)
            if self.device_allocations is not None:
                tasks.start_soon(self._reconcile, self.device_allocations)
                tasks.start_soon(self.device_allocations.owner_polls.run)
                tasks.start_soon(self.usage.run)
                tasks.start_soon(self.usage.watch)
            if self.reservations is not None:
                tasks.start_soon(self.reservations.run)
            task_status.started()

    async def _reconcile(self, device_allocations: DeviceAllocations) -> None:
        """Reconciles every `reconcile_seconds`. Logs the first failure and the recovery."""
        failing = False
        while True:
            try:
                await device_allocations.reconcile()
                if failing:
                    log.info("PodResources answers again")
                failing = False
            except (Unavailable, StateFault) as error:
                if not failing:
                    log.warning("cannot reconcile", finding=error.finding, remedy=error.remedy)
                failing = True
            await self.ledger.clock.sleep(until_tick(self.ledger.clock, self._reconcile_seconds))

    def topology_unknown(self) -> str | None:
        """Why no device can be offered yet, for /readyz: discovery has not published the topology. None: it has."""
        return None if self.ledger.state.topology is not None else "the topology of this node has not been received yet"

    def record_unconfirmed(self) -> str | None:
        """For /readyz: why containers may hold devices that are not in the record. None: it is confirmed."""
        unconfirmed = self.ledger.unconfirmed
        if unconfirmed is None:
            return None
        if self.device_allocations is not None:
            return f"the journal was damaged ({unconfirmed}): the kubelet has not confirmed yet what is held"
        return f"the journal was damaged ({unconfirmed}): nothing is given out until `topoalign trust` confirms what is held"

    def devices_given_twice(self) -> str | None:
        """Lists the devices that two containers hold, at most `MOST_PAIRS`, for /readyz; None: there are none."""
        pairs = [
            f"{', '.join(clean(device) for ids in former.devices.values() for device in ids)} "
            f"({container_title(former.owner)} and {container_title(held.owner)})"
            for held in self.ledger.state.allocations.values()
            for former in held.displaced
        ]
        if not pairs:
            return None
        more = f", and {len(pairs) - MOST_PAIRS} more" if len(pairs) > MOST_PAIRS else ""
        return f"devices that two containers have: {'; '.join(pairs[:MOST_PAIRS])}{more}; delete one pod of each pair"

    def outbox_full(self) -> str | None:
        """For /readyz: why the bus refuses facts, or that too many wait for it. None: neither. Allocations continue."""
        waiting = len(self.ledger.pending)
        limit = self.ledger.pending_limit
        if self.outbox.publisher.refusal is not None:
            return f"{waiting} facts wait for the bus, which refuses them: {self.outbox.publisher.refusal}"
        return None if waiting < limit else f"{waiting} facts wait for the bus, {limit} are kept"


async def refuse_duplicate_agent(bus: Bus, node: NodeName) -> None:
    """
    Raises StateFault if an allocator already answers for this node, because two allocators would allocate the same
    devices twice. The lock of the state directory excludes only an allocator with the same directory. While the bus is
    disconnected, another allocator is not detected.
    """
    question = msgspec.json.encode(ExplainRequest(node=node, target="-"))
    try:
        await bus.ask(wire.admission_subject(node, "explain"), question, DUPLICATE_SECONDS)
    except Unavailable:
        return
    raise StateFault(
        f"another allocator answers for node {node!r}", "stop it, or give this node a name of its own (TOPOALIGN_NODE)"
    )
