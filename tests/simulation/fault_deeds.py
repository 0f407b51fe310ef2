"""What happens to processes, the disk, the bus, the hardware and the clock."""

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from simulation.bus_deeds import request_for
from simulation.divisions import DIVISIONS
from simulation.refusals import sound
from simulation.world import HEALTHY, NODE

from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, Unavailable
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.requests import NodeRequest

if TYPE_CHECKING:
    from simulation.scenario import Scenario

DAY = 86_400.0
LOST = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
CORDONED = DeviceHealth(state=HealthState.HEALTHY, cordoned=True)


def allocator_dies(run: "Scenario") -> None:
    run.world.kill(run.agent.process)


def allocator_dies_writing(run: "Scenario") -> None:
    """At the next write, before or after it has happened."""
    run.agent.journal.kills = 1.0


def disk_refuses(run: "Scenario") -> None:
    run.agent.journal.refusals = run.world.disk_refusals = run.world.chance.choice((0.3, 1.0))

    def over() -> None:
        run.agent.journal.refusals = run.world.disk_refusals = 0.0

    run.later(run.world.chance.choice((0.5, 10.0)), over)


def discovery_dies(run: "Scenario") -> None:
    if run.discovery_process is not None:
        run.world.kill(run.discovery_process)
        run.later(run.world.chance.choice((0.5, 20.0, 45.0)), run.start_discovery)


def registry_rebuilt(run: "Scenario") -> None:
    run.world.kill(run.hub.process)
    run.start_hub()


def bus_away(run: "Scenario") -> None:
    weather = run.world.broker.weather
    weather.away = True
    run.later(run.world.chance.choice((0.5, 8.0, 40.0)), lambda: setattr(weather, "away", False))


def bad_weather(run: "Scenario") -> None:
    """From now on messages come late, twice, again, in another order, or not at all."""
    weather, chance = run.world.broker.weather, run.world.chance
    weather.clear()
    for fault in ("timeout", "late", "repeat", "again", "swap", "lose"):
        if chance.random() < 0.5:
            setattr(weather, fault, chance.choice((0.1, 0.4)))


def good_weather(run: "Scenario") -> None:
    run.world.broker.weather.clear()


def device_ails(run: "Scenario") -> None:
    device = run.world.chance.choice(sorted(run.world.health))
    run.world.judge(device, run.world.chance.choice((LOST, CORDONED)))


def devices_recover(run: "Scenario") -> None:
    for device in run.world.health:
        run.world.judge(device, HEALTHY)


def clock_jumps(run: "Scenario") -> None:
    # Processes start after whole seconds. A jump back by whole seconds could repeat the millisecond of a start, and with it
    # an epoch, if the journal is lost as well (decision 4).
    run.world.clock.offset += run.world.chance.choice((-DAY, -3.0137, 3.0, DAY))


def paused(run: "Scenario") -> None:
    """SIGSTOP, and SIGCONT later."""
    process = run.world.chance.choice((run.agent.process, run.agent.process, run.hub.process))
    if not process.dead and not process.stopped:
        run.loop.pause(process)
        run.later(run.world.chance.choice((0.5, 5.0, 60.0)), partial(run.loop.carry_on, process))


def reboots(run: "Scenario") -> None:
    """The node: all processes and all containers end, and the pods come again."""
    world = run.world
    world.boot += 1
    if run.kubelet is not None:
        run.stop_kubelet()
        run.kubelet.reboot()
        run.later(world.chance.choice((0.5, 6.0)), run.restart_kubelet)
    if run.discovery_process is not None:
        world.kill(run.discovery_process)
        run.later(world.chance.choice((0.2, 3.0)), run.start_discovery)
    world.kill(run.agent.process)
    if world.driver is not None:
        world.driver.reboot()
        world.book.reboot()
        run.checks.rebooted()


def journal_damaged(run: "Scenario") -> None:
    """The allocator dies, and of its journal only a part can be read."""
    world = run.world
    world.kill(run.agent.process)
    disk = world.disk
    left = disk.damage(world.chance.randrange(len(disk.journal.load()) + 1))
    run.checks.init_in_doubt = True
    if run.kubelet is not None:
        run.checks.unreadable |= run.kubelet.lost
        run.kubelet.undelivered |= run.kubelet.directories.now().unreadable
    run.checks.record.begin_with(left, disk.journal.published())
    run.checks.amounts.begin_with(left)
    if run.checks.instances is not None:
        run.checks.instances.begin_with(left)
    world.note("damaged", len(left))


def division_changes(run: "Scenario") -> None:
    """
    Whole GPUs are divided in time from now on, or divided ones are whole again; where there are shares by amounts, they may
    be divided in any other way; those in MIG mode stay so.
    """
    assert run.kubelet is not None
    world = run.world
    if world.driver is not None:
        return
    if world.has_shares:
        world.divide(world.chance.choice([each for each in DIVISIONS if each != world.division]), world.first)
    elif run.kubelet.serial:
        world.divide("slices" if world.division == "whole" else "whole", world.first)


def renumbered(run: "Scenario") -> None:
    """A GPU was gone and is back under another number."""
    run.world.divide(run.world.division, run.world.chance.randrange(4))


def compaction(run: "Scenario") -> None:
    """Somebody asks for a snapshot, and the journal becomes short."""

    async def ask() -> None:
        question = msgspec.json.encode(NodeRequest(node=NODE))
        try:
            await run.client_bus.ask(wire.admission_subject(NODE, "snapshot"), question, 2.0)
        except (Unavailable, BadRequest) as error:
            sound(run, error)

    run.soon(ask)


def compared(run: "Scenario") -> None:
    """The same decision, asked for twice."""
    if run.agent.ledger is not None and not run.agent.process.dead:
        pod = request_for("what-if", run.world.chance.choice((1, 2, 3)))
        run.checks.decides_equally(run.agent, pod)
