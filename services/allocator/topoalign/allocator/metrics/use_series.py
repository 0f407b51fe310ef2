"""
Writes the use of GPUs by containers for /metrics, and reports containers that exceed their memory.

Discovery measures at each scrape. While a container holds an amount of memory (units, slots), the allocator also
requests measurements between scrapes. There are a few series for each container and GPU, and none for an allocation
whose container is still unknown.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger, container_title
from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import MemoryExcess
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Clock
from topoalign.core.usage.given import has_amounts
from topoalign.runtime.clock import until_tick

if TYPE_CHECKING:  # not needed before the first scrape
    from topoalign.allocator.metrics.use_families import GpuUsage
    from topoalign.core.model.processes import LibraryReading
    from topoalign.core.state.fold import NodeState
    from topoalign.core.usage.attribution import Excess, ExcessWatch, NodeShares

ANSWER_SECONDS = 5.0
"""Time limit of a measurement: half of Prometheus' default scrape timeout."""
SAMPLE_SECONDS = 15.0
"""Seconds between two measurements if there is no scrape."""

log = structlog.get_logger("topoalign.allocator.metrics.use_series")


class UseSeries:
    """Writes the metric families at each scrape, and reports once that a container exceeds its memory."""

    def __init__(
        self,
        ledger: Ledger,
        bus: Bus,
        also: Collection[str],
        library: "Callable[[], Awaitable[LibraryReading]] | None" = None,
        *,
        announces: bool = False,
    ) -> None:
        """
        `also`: additional names, `gaia` and `hami`. `library`: reads the counts of libraries that limit containers.
        `announces`: whether `UsageObserved` reports the containers that exceed their memory.
        """
        self._ledger = ledger
        self._bus = bus
        self._also = also
        self._library = library
        self._announces = announces
        self._watch: ExcessWatch | None = None
        self._exceeding: dict[object, MemoryExcess] = {}
        """Device and allocations -> the excess when it began."""
        self._failing = False
        self._rows: tuple[NodeState, Sequence[GpuUsage]] | None = None
        """Cache: a state, and how its GPUs are partitioned."""

    async def keep_watch(self, clock: Clock) -> None:
        """Measures every `SAMPLE_SECONDS` while a container holds an amount of memory, until cancelled."""
        while True:
            await clock.sleep(until_tick(clock, SAMPLE_SECONDS))
            await self._sample(clock.wall())

    async def _sample(self, now: float) -> None:
        """Measures, unless a scrape has just done so. Logs the first failure and the recovery."""
        if not has_amounts(self._ledger.state) or (self._watch is not None and not self._watch.counts(now)):
            return
        try:
            self._lasting(await self._measured())
        except TopoalignError as error:
            if not self._failing:
                log.info("cannot measure who is above its memory", finding=error.finding, remedy=error.remedy)
            self._failing = True
            return
        if self._failing:
            log.info("the use of memory is measured again")
        self._failing = False

    async def write(self) -> AsyncIterator[bytes]:
        """Yields the families. If nothing can be measured, only those that need no measurement."""
        from topoalign.allocator.metrics import use_families  # not needed before the first scrape

        rows = self._divided()
        yield use_families.render_families(use_families.own_partition_families(rows))
        if "hami" in self._also:
            yield use_families.render_families(use_families.hami_partition_families(rows, self._ledger.node))
        try:
            shares = await self.shares()
        except TopoalignError:
            shares = None
        yield use_families.render_families([use_families.measured_family(shares is not None)])
        if shares is None:
            return
        yield use_families.render_families(use_families.own_use_families(shares, self._lasting(shares)))
        hardware = self._ledger.state.hardware
        there = tuple(each for each in shares.devices if each.gpu in hardware.gpu_by_id)  # a GPU may be gone
        shares = msgspec.structs.replace(shares, devices=there)
        if "gaia" in self._also:
            yield use_families.render_families(use_families.gaia(shares, hardware))
        if "hami" in self._also:
            yield use_families.render_families(use_families.hami_use_families(shares, hardware))

    def _divided(self) -> "Sequence[GpuUsage]":
        """How each GPU is partitioned. Cached: 3,000 units take 40 ms of the event loop."""
        from topoalign.allocator.metrics.use_families import gpu_usages
        from topoalign.core.state.gpu_partitioning import partitioning_by_gpu

        state = self._ledger.state
        if self._rows is not None:
            had, rows = self._rows
            is_same_hardware = had.hardware is state.hardware and had.reported_health is state.reported_health
            if is_same_hardware and had.allocations is state.allocations:
                return rows
        rows = gpu_usages(partitioning_by_gpu(state), state.hardware)
        self._rows = state, rows
        return rows

    async def shares(self) -> "NodeShares":
        """The use of this node's GPUs now. Raises a TopoalignError if discovery does not answer or cannot measure."""
        from topoalign.core.usage.attribution import with_library

        shares = await self._measured()
        return shares if self._library is None else with_library(shares, await self._library())

    async def _measured(self) -> "NodeShares":
        """As `shares`, without the counts of libraries."""
        from topoalign.core.model.processes import Measurement
        from topoalign.core.usage.attribution import attribute_use

        node = self._ledger.node
        question = msgspec.json.encode(NodeRequest(node=node))
        answer = await self._bus.ask(wire.discovery_subject(node, "use"), question, within=ANSWER_SECONDS)
        return attribute_use(self._ledger.state, wire.decode_answer(answer, Measurement))

    def _lasting(self, shares: "NodeShares") -> "tuple[Excess, ...]":
        """Returns the containers that exceeded their memory in several measurements in a row. Logs each new one."""
        from topoalign.core.usage.attribution import ExcessWatch

        self._watch = (self._watch or ExcessWatch()).after(shares)
        lasting = {(each.device, each.holder.allocations): each for each in self._watch.lasting}
        self._exceeding = {key: self._exceeding.get(key) or excess_fact(each) for key, each in lasting.items()}
        if self._announces and self._ledger.state.usage is not None:
            self._ledger.observe(exceeding=tuple(self._exceeding.values()))
        for excess in self._watch.begun:
            log.warning(
                "a container uses more memory of a GPU than it was given",
                container=container_title(excess.holder.owner),
                device=excess.device,
                given=excess.holder.memory,
                used=excess.holder.use.memory,
            )
        return self._watch.lasting


def excess_fact(excess: "Excess") -> MemoryExcess:
    """The excess as `UsageObserved` reports it."""
    holder = excess.holder
    assert holder.memory is not None and holder.use.memory is not None, "they were compared"
    return MemoryExcess(
        owner=holder.owner,
        pod_uid=holder.pod_uid,
        allocations=holder.allocations,
        device=excess.device,
        given=holder.memory,
        used=holder.use.memory,
    )
