"""
What a simulated run stands on: the seed's chance, virtual time, the disk, the broker, the hardware, and the trace.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import anyio
from simulation.bus import Broker
from simulation.journal import Disk
from simulation.loop import Process, SimulatedLoop

from topoalign.core.model.events import DeviceHealth, HealthState, LedgerEvent
from topoalign.core.model.ids import GPU, NIC, DeviceID, NodeName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.core.state.fold import NodeState

NODE = NodeName("node-1")
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
BEGAN = 1_700_000_000.0
"""Wall seconds at which every run begins."""
SLOW_SECONDS = (0.0, 0.001, 0.02, 0.4)


def machine(shares: int = 1, first: int = 0) -> Topology:
    """
    Four GPUs and two NICs on two NUMA nodes. `shares`: into how many each GPU is divided in time; `first`: which of them
    the driver has numbered 0.
    """
    gpus, nics = tuple(DeviceID(f"GPU-{i}") for i in range(4)), tuple(DeviceID(f"mlx5_{i}") for i in range(2))
    return Topology(
        cpus=tuple(Cpu(id=i, core=i // 2 * 2, socket=i // 4, node=i // 4, uncore=i // 4) for i in range(8)),
        nodes=(NumaNode(id=0), NumaNode(id=1)),
        distances=((10, 21), (21, 10)),
        gpus=tuple(
            Gpu(id=gpus[at], index=index, numa_affinity=(at // 2,))
            for index, at in enumerate((*range(first, 4), *range(first)))
        ),
        nics=tuple(Nic(id=name, index=i, numa_affinity=(i,)) for i, name in enumerate(nics)),
        offers=(Offer(resource=GPU, devices=gpus, replicas=shares), Offer(resource=NIC, devices=nics))
        if shares > 1
        else None,
    )


class Violation(AssertionError):
    """An invariant that did not hold."""

    def __init__(self, invariant: str, finding: str) -> None:
        super().__init__(f"{invariant}: {finding}")
        self.invariant = invariant


class SimulatedClock:
    """`topoalign.core.ports.Clock` in virtual time, whose wall clock can be set."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.offset = 0.0

    def wall(self) -> float:
        return BEGAN + self._loop.time() + self.offset

    def monotonic(self) -> float:
        return 1_000.0 + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class World:
    """Everything that outlives a process."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.loop, self.seed = loop, seed
        self.chance = Random(f"scenario-{seed}")
        """For what happens; `faults` for how it goes wrong."""
        self.faults = Random(f"faults-{seed}")
        self.clock = SimulatedClock(loop)
        self.disk, self.broker = Disk(), Broker()
        self.disk_refusals = self.disk_kills = 0.0
        self.machine = WHOLE
        self.boot = 1
        self.health = {device: HEALTHY for devices in WHOLE.devices.values() for device in devices}
        self.hardware_changed = anyio.Event()
        self.is_discovery_up = True
        """Whether a discovery runs that can tell which reading is its own; one in the agent's process always does."""
        self.discovery_epoch = 0
        """Of the last discovery, as its record keeps it."""
        self.lies = 0
        """Messages that somebody else has published under the node's name."""
        self.one_process = self.chance.random() < 0.5
        """Whether discovery and the allocator share a process, and so a bus, as on a node that runs `topoalign node`."""
        self.rules = AdmissionRules()
        self.slowness = self.chance.choice((0.0, 0.2, 0.6))
        self.trace: list[tuple[Any, ...]] = []
        self.violations: list[Violation] = []
        self.facts: list[Callable[[LedgerEvent], None]] = []
        """Told every fact in the moment in which it is on disk."""
        self.marks: list[Callable[[int, int], None]] = []
        """Told the number of every fact that counts as published from now on."""
        self.preferences: list[
            Callable[[NodeState, Sequence[DeviceID], Sequence[DeviceID], Sequence[DeviceID]], None]
        ] = []
        """Told of what was available what was preferred, by which record, and what it had to include."""

    def note(self, what: str, *details: object) -> None:
        self.trace.append((round(self.loop.time(), 6), self.loop.rounds, what, *details))

    def violate(self, violation: Violation) -> None:
        """Ends the run at the next step; raised at once where nobody would catch it."""
        self.note("VIOLATION", str(violation))
        self.violations.append(violation)

    def became_true(self, event: LedgerEvent) -> None:
        self.note("fact", event)
        for told in self.facts:
            told(event)

    def was_published(self, epoch: int, seq: int) -> None:
        for told in self.marks:
            told(epoch, seq)

    def kill(self, process: Process) -> None:
        if not process.dead:
            self.note("killed", process.name)
            self.loop.kill(process)

    async def slow(self) -> None:
        """Whatever goes over a wire takes its time."""
        if self.faults.random() < self.slowness:
            await anyio.sleep(self.faults.choice(SLOW_SECONDS))

    def judge(self, device: DeviceID, health: DeviceHealth) -> None:
        self.health[device] = health
        self.change_hardware()

    def change_hardware(self) -> None:
        changed, self.hardware_changed = self.hardware_changed, anyio.Event()
        changed.set()


WHOLE = machine()
SHARED = machine(shares=2)
KNOWN = {
    resource: frozenset(WHOLE.devices[resource]) | frozenset(SHARED.devices[resource]) for resource in WHOLE.devices
}
"""All ids under which anything was ever handed out."""
