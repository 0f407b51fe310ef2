"""
Somebody who may publish, and says under the node's name what is not so: with the next number or a large one, in the epoch
of the node or another, under ids of its own or under those that the node uses next.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from simulation.world import NODE

from topoalign.core import wire
from topoalign.core.model.errors import IdTaken
from topoalign.core.model.events import (
    LARGEST_NUMBER,
    Allocation,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealthChanged,
    Event,
    TopologyDiscovered,
)
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, NodeName
from topoalign.core.model.topology.model import Topology

if TYPE_CHECKING:
    from simulation.scenario import Scenario

ANOTHER = NodeName("node-2")
FORGED = "forged"
"""The source of a forged topology."""


def forge(run: "Scenario", event: Event) -> None:
    """It reaches the broker at once: the liar has a better way than the node."""
    run.world.lies += 1
    message = wire.encode_event(event, run.world.clock.wall())
    headers = {**message.headers, "Nats-Msg-Id": f"forged-{run.world.lies}"}
    run.world.note("forged", event)

    async def publish() -> None:
        await run.world.broker.bus.publish(msgspec.structs.replace(message, headers=headers))

    run.soon(publish)


def place(run: "Scenario") -> tuple[int, int]:
    """Epoch and seq of the node's newest fact, which everybody can read."""
    return run.checks.record.place


def invented(run: "Scenario") -> Allocation:
    gpu = DeviceID(f"GPU-{run.world.chance.randrange(4)}")
    return Allocation(id=AllocationID(f"forged-{run.world.lies}"), devices={GPU: (gpu,)})


def forges_snapshot(run: "Scenario") -> None:
    epoch, seq = place(run)
    chance = run.world.chance
    epoch, seq = chance.choice(((epoch, seq + 1), (epoch, LARGEST_NUMBER), (epoch + 1, 1), (LARGEST_NUMBER, 1), (1, 1)))
    allocations = chance.choice(((), (invented(run),)))
    forge(run, AllocationsSnapshot(node=NODE, epoch=epoch, seq=seq, allocations=allocations, digest="0" * 16))


def forges_facts(run: "Scenario") -> None:
    """One that comes next, some that do, or one after a gap."""
    epoch, seq = place(run)
    chance = run.world.chance
    for number in range(chance.choice((1, 1, 3))):
        ahead = chance.choice((1 + number, 1 + number, 4))
        if chance.random() < 0.7:
            forge(run, AllocationGranted(node=NODE, epoch=epoch, seq=seq + ahead, allocation=invented(run)))
        else:
            live = sorted(run.checks.record.live) or [AllocationID("none")]
            name = chance.choice(live)
            forge(run, AllocationReleased(node=NODE, epoch=epoch, seq=seq + ahead, allocation=name, reason="gone"))


def forges_hardware(run: "Scenario") -> None:
    """No devices, or no health of any: as the next reading, one that comes after all, or one of another discovery."""
    chance, epoch = run.world.chance, run.world.discovery_epoch
    epoch, revision = chance.choice(((epoch, 2), (epoch, LARGEST_NUMBER), (epoch + 1, 1), (LARGEST_NUMBER, 1)))
    if chance.random() < 0.5:
        boot = f"boot-{run.world.boot}"
        forge(
            run,
            TopologyDiscovered(
                node=NODE, epoch=epoch, revision=revision, boot_id=boot, source=FORGED, topology=Topology()
            ),
        )
    else:
        forge(run, DeviceHealthChanged(node=NODE, epoch=epoch, revision=revision, devices={}))


def takes_ids(run: "Scenario") -> None:
    """
    Somebody publishes under the ids of the next facts or readings: another fact of the node, or something of another node.
    """
    chance, (epoch, seq) = run.world.chance, place(run)
    numbers = range(1, 1 + chance.choice((1, 2, 4)))
    if chance.random() < 0.7:
        for number in numbers:
            mine = AllocationsSnapshot(node=NODE, epoch=epoch, seq=seq + number, allocations=(), digest="0" * 16)
            others = AllocationsSnapshot(node=ANOTHER, epoch=1, seq=1, allocations=(), digest="0" * 16)
            take(run, mine, chance.choice((mine, others)))
    else:
        first = chance.randrange(1, 12)
        for number in numbers:
            reading = DeviceHealthChanged(
                node=NODE, epoch=run.world.discovery_epoch, revision=first + number, devices={}
            )
            take(run, reading, DeviceHealthChanged(node=ANOTHER, epoch=1, revision=1, devices={}))


def take(run: "Scenario", event: Event, instead: Event) -> None:
    """The id of `event`, for a message that says something else."""
    run.world.lies += 1
    taken = wire.encode_event(event, run.world.clock.wall()).headers["Nats-Msg-Id"]
    message = wire.encode_event(instead, run.world.clock.wall())
    run.world.note("taken", taken, instead)

    async def publish() -> None:
        with suppress(IdTaken):
            headers = {**message.headers, "Nats-Msg-Id": taken}
            await run.world.broker.bus.publish(msgspec.structs.replace(message, headers=headers))

    run.soon(publish)
