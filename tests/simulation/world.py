"""
What a simulated run stands on: the seed's chance, virtual time, the disk, the broker, the hardware, and the trace.
"""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, Literal

import anyio
from simulation.bus import Broker
from simulation.divisions import MACHINES, Division, Limiter, machine
from simulation.instance_book import BookDisk
from simulation.journal import Disk
from simulation.limiters import LimiterFiles
from simulation.loop import Process, SimulatedLoop
from simulation.mig_driver import Driver

from topoalign.core.model.events import DeviceHealth, HealthState, LedgerEvent
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Compat
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

NODE = NodeName("node-1")
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
BEGAN = 1_700_000_000.0
"""Wall seconds at which every run begins."""
SLOW_SECONDS = (0.0, 0.001, 0.02, 0.4)
WHOLE = MACHINES["whole"]
SHARE_WORLDS = 0.25
"""How many of the worlds begin with GPUs in units or in slots."""
INSTANCE_WORLDS = 0.1
"""How many of the worlds have slots that become MIG instances."""
Kind = Literal["whole", "shares", "instances"]
BEGINNINGS: tuple[tuple[Division, Limiter, Compat], ...] = (("units", "vcuda", "gaia"), ("slots", "hami-core", "hami"))
"""How GPUs may be offered at first, what limits containers then, and whose answers they may get instead of ours."""


Trace = list[tuple[Any, ...]]
"""Lines of seconds, rounds of the loop, and what happened."""


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
        await anyio.sleep(max(seconds, 0.0))


class World:
    """Everything that outlives a process."""

    def __init__(self, seed: int, loop: SimulatedLoop, *, shares: bool = False) -> None:
        """`shares`: some seeds have GPUs in units or in slots, or in slots that become MIG instances."""
        self.loop = loop
        self.seed = seed
        self.chance = Random(f"scenario-{seed}")
        """For what happens; `faults` for how it goes wrong."""
        self.faults = Random(f"faults-{seed}")
        self.clock = SimulatedClock(loop)
        self.disk = Disk()
        self.broker = Broker()
        self.disk_refusals = self.disk_kills = 0.0
        sharing = Random(f"by-amounts-{seed}")
        self.has_instances = shares and kind_of(seed) == "instances"
        self.has_shares = shares and kind_of(seed) != "whole"
        sharing.random()  # which `kind_of` has looked at
        self.division: Division = "whole"
        """How the GPUs are offered now."""
        self.first = 0
        """Which of them the driver has numbered 0."""
        self.limiter: Limiter = "none"
        self.driver: Driver | None = None
        """Of the MIG instances; None: no GPU is in MIG mode, or its instances stay as they are."""
        self.book = BookDisk()
        compat: Compat = ""
        if self.has_instances:
            self.division = "dynamic"
            self.driver = Driver(self.faults, self.change_hardware)
            compat = sharing.choice(("", "hami"))
        elif self.has_shares:
            self.division, limiter, other = sharing.choice(BEGINNINGS)
            self.limiter = sharing.choice(("none", limiter))
            compat = sharing.choice(("", other))
        self.rules = AdmissionRules(compat=compat)
        self.limits = LimiterFiles(self.limiter)
        self.reserved: list[tuple[float, Reservation]] = []
        """What registries have reserved on the node, and until which virtual second."""
        self.reservations = 0
        """How many there ever were."""
        self.reserved_parts: set[tuple[ResourceName, int, int]] = set()
        """Of how many devices of a resource, and of how many cards, anything was ever reserved for a container."""
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
        self.slowness = self.chance.choice((0.0, 0.2, 0.6))
        self.trace: Trace = []
        self.violations: list[Violation] = []
        self.facts: list[Callable[[LedgerEvent], None]] = []
        """Told every fact in the moment in which it is on disk."""
        self.marks: list[Callable[[int, int], None]] = []
        """Told the number of every fact that counts as published from now on."""
        self.preferences: list[
            Callable[[NodeState, Sequence[DeviceID], Sequence[DeviceID], Sequence[DeviceID]], None]
        ] = []
        """Told of what was available what was preferred, by which record, and what it had to include."""

    @property
    def machine(self) -> Topology:
        """The hardware as discovery offers it now."""
        found = offered(self.division, self.first, self.limiter)
        return self.driver.shown(found) if self.driver is not None else found

    def divide(self, division: Division, first: int) -> None:
        """Offers the GPUs in another way, or with another one numbered 0."""
        self.division = division
        self.first = first
        self.change_hardware()

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


def kind_of(seed: int) -> Kind:
    """Which kind of world a seed has, where shares are possible."""
    if Random(f"by-instances-{seed}").random() < INSTANCE_WORLDS:
        return "instances"
    return "shares" if Random(f"by-amounts-{seed}").random() < SHARE_WORLDS else "whole"


@cache
def offered(division: Division, first: int, limiter: Limiter) -> Topology:
    """Each machine is one object."""
    is_first = not first and limiter == "none" and division in MACHINES
    return MACHINES[division] if is_first else machine(division, first, limiter)
