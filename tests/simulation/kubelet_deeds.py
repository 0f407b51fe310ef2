"""What happens to pods and to the kubelet on a node where the kubelet hands out the devices."""

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import anyio
import msgspec
from simulation.divisions import CORES, MEMORY, card
from simulation.pods import Container, Pod
from simulation.refusals import sound
from simulation.share_deeds import come, share_pod
from simulation.world import Violation

from topoalign.core.model.errors import DeviceInUse, TopoalignError, Unavailable
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES

if TYPE_CHECKING:
    from simulation.scenario import Scenario


def new_pod(run: "Scenario", size: int | None = None) -> Pod:
    if run.world.has_shares:
        return share_pod(run, size)
    chance, name = run.world.chance, run.next_name()
    limits = {GPU: size or chance.choice((1, 1, 2, 3))}
    if chance.random() < 0.2:
        limits[NIC] = 1
    app = Container(name=ContainerName("main"), role="app", limits=limits)
    before: tuple[Container, ...] = ()
    if size is None and chance.random() < 0.3:
        role: Literal["init", "sidecar"] = "init" if chance.random() < 0.6 else "sidecar"
        before = (Container(name=ContainerName("before"), role=role, limits={GPU: chance.choice((1, 2))}),)
    return Pod(uid=f"uid-{name}", name=PodName(name), containers=(*before, app))


def comes(run: "Scenario", size: int | None = None) -> None:
    """A pod is scheduled to the node."""
    come(run, new_pod(run, size))


def two_come(run: "Scenario") -> None:
    """Two pods of equal size at the same time."""
    size = run.world.chance.choice((1, 2))
    comes(run, size)
    comes(run, size)


def goes(run: "Scenario") -> None:
    """A pod ends, or is deleted by force while it is being admitted."""
    assert run.kubelet is not None
    if run.kubelet.wanted:
        uid = run.world.chance.choice(sorted(run.kubelet.wanted))
        run.world.note("goes", uid)
        run.kubelet.remove(uid)


def replaced(run: "Scenario") -> None:
    """A pod is deleted by force and one of the same shape takes its place, so that their number stays the same."""
    assert run.kubelet is not None
    if run.kubelet.wanted:
        old = run.kubelet.wanted[run.world.chance.choice(sorted(run.kubelet.wanted))]
        run.kubelet.remove(old.uid)
        name = run.next_name()
        pod = msgspec.structs.replace(old, uid=f"uid-{name}", name=PodName(name))
        run.kubelet.wanted[pod.uid] = pod
        run.world.note("replaced", old.uid, pod.uid)
        if run.kubelet.up:
            run.admit(pod.uid)


def held_now(run: "Scenario") -> list[tuple[str, ContainerName, ResourceName]]:
    """Containers of pods that run, with what they hold."""
    assert run.kubelet is not None
    return sorted(key for key in run.kubelet.entries if key[0] in run.kubelet.admitted)


def again(run: "Scenario") -> None:
    """The kubelet repeats an Allocate (kubernetes 52678): the same answer, and nothing changes."""
    if held := held_now(run):
        run.soon(repeat, run, run.world.chance.choice(held))


async def repeat(run: "Scenario", key: tuple[str, ContainerName, ResourceName]) -> None:
    assert run.kubelet is not None
    devices, kubelet, agent, starts = run.kubelet.entries.get(key), run.kubelet, run.agent, run.kubelet.starts
    if agent.device_allocations is None or devices is None:
        return
    hidden = key[0] in kubelet.hidden
    places = frozenset((key[2], device) for device in devices)
    owned = [name for name, (owner, held) in run.checks.record.live.items() if held == places and owner is not None]
    answer: object
    try:
        answer = (await agent.allocate(key[2], sorted(devices))).name
        run.world.note("repeated", key, answer)
    except TopoalignError as error:
        sound(run, error)
        if not isinstance(error, DeviceInUse):
            return
        answer = error
    hidden |= key[0] in kubelet.hidden or starts != kubelet.starts
    if owned and key[0] in kubelet.admitted and not hidden and answer != owned[0]:
        run.world.violate(Violation("I6", f"{key} has {owned[0]} and was answered with {answer}"))


def conflict(run: "Scenario") -> None:
    """An Allocate of what another container holds: refused."""
    if held := held_now(run):
        run.soon(clash, run, run.world.chance.choice(held))


async def clash(run: "Scenario", key: tuple[str, ContainerName, ResourceName]) -> None:
    assert run.kubelet is not None
    kubelet, agent, starts = run.kubelet, run.agent, run.kubelet.starts
    if agent.device_allocations is None or key[0] not in kubelet.admitted or key[0] in kubelet.hidden:
        return
    if key not in kubelet.entries:  # the checkpoint was lost meanwhile
        return
    container = next(c for c in kubelet.wanted[key[0]].containers if c.name == key[1])
    if container.role == "init":
        return
    mine = sorted(kubelet.entries[key])
    offered = run.world.machine.devices.get(key[2], NO_DEVICES)
    others = [d for d in offered if d not in mine]
    if mine[0] not in offered:
        return
    asked = [mine[0], *run.world.chance.sample(others, min(1, len(others)))]
    if set(asked) == set(mine):
        return
    try:
        await agent.allocate(key[2], asked)
    except TopoalignError as error:
        sound(run, error)
        if isinstance(error, Unavailable):  # nobody knows what it did
            run.checks.contest(asked)
        return
    run.checks.contest(asked)
    if key[0] in kubelet.admitted and key[0] not in kubelet.hidden and starts == kubelet.starts:
        run.world.violate(Violation("I1", f"{asked} were given although {key} holds {mine}"))


def contested(run: "Scenario") -> tuple[ResourceName, list[DeviceID]]:
    """A resource of GPUs, and what the kubelet may give of it now; of units those of one GPU, which go together."""
    assert run.kubelet is not None
    kubelet, resource = run.kubelet, GPU
    if run.world.division == "units":
        resource = run.world.chance.choice((CORES, MEMORY))
    free = [device for device in kubelet.healthy.get(resource, ()) if (resource, device) not in kubelet.taken]
    if resource != GPU and free:
        one = card(run.world.chance.choice(free))
        free = [device for device in free if card(device) == one]
    return resource, free


def race(run: "Scenario") -> None:
    """Two Allocates of one device at the same time, as of a kubelet that has lost count (kubernetes 137534)."""
    resource, free = contested(run)
    if len(free) > 1:
        one, other = run.world.chance.sample(free, 2)
        run.checks.init_in_doubt = True
        run.checks.contest([one, other])
        run.world.note("race", one, other)
        for asked in ([one, other], [one]):
            run.soon(hurry, run, resource, asked)


async def hurry(run: "Scenario", resource: ResourceName, asked: list[DeviceID]) -> None:
    if run.agent.device_allocations is None:
        return
    try:
        await run.agent.allocate(resource, asked)
    except TopoalignError as error:
        sound(run, error)


def crowd(run: "Scenario") -> None:
    """Several Allocates in one moment, some of one device, and some whose caller gives up before it is answered."""
    resource, free = contested(run)
    if len(free) > 1:
        chance = run.world.chance
        asked = [chance.sample(free, chance.choice((1, 1, 2))) for _ in range(chance.choice((2, 3, 4)))]
        run.checks.init_in_doubt = True
        run.checks.contest(device for devices in asked for device in devices)
        run.world.note("crowd", asked)
        run.soon(press, run, resource, [(devices, chance.choice((0, 1, 2, 9, 9, 9))) for devices in asked])


async def press(run: "Scenario", resource: ResourceName, asked: list[tuple[list[DeviceID], int]]) -> None:
    """`asked`: devices, and after how many turns of the loop their caller gives up."""
    device_allocations = run.agent.device_allocations
    if device_allocations is None:
        return

    async def ask(devices: list[DeviceID], turns: int) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give_up, scope, turns)
                with suppress(TopoalignError):
                    for given in await device_allocations.allocate(resource, [devices]):
                        granted = {e.allocation.id for e in run.world.disk.history if isinstance(e, AllocationGranted)}
                        run.checks.expect("I9", given.id in granted, f"{given.id} was answered and is not on disk")
                tasks.cancel_scope.cancel()

    async def ask_all() -> None:
        async with anyio.create_task_group() as tasks:
            for each in asked:
                tasks.start_soon(ask, *each)

    with suppress(Unavailable):
        await run.agent.door.call(ask_all)


async def give_up(scope: anyio.CancelScope, turns: int) -> None:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    if turns < 9:
        scope.cancel()


def nonsense(run: "Scenario") -> None:
    """Device ids that cannot be meant: refused, and nothing changes."""
    run.soon(ask_nonsense, run)


async def ask_nonsense(run: "Scenario") -> None:
    chance, agent = run.world.chance, run.agent
    resource = CORES if CORES in run.world.machine.devices else GPU
    gpu = chance.choice(list(run.world.machine.devices[resource]))
    asked = chance.choice(([], [gpu, gpu], [DeviceID("GPU-x")], [DeviceID("\x00" * 100)], [gpu, DeviceID("GPU-9")]))
    if agent.device_allocations is None:
        return
    try:
        await agent.allocate(resource, asked)
    except TopoalignError as error:
        sound(run, error)
        return
    run.world.violate(Violation("I2", f"{asked} were given"))


def kubelet_restarts(run: "Scenario") -> None:
    run.restart_kubelet()


def kubelet_away(run: "Scenario") -> None:
    run.stop_kubelet()
    run.later(run.world.chance.choice((0.5, 4.0, 25.0)), run.restart_kubelet)


def checkpoint_unreadable(run: "Scenario") -> None:
    assert run.kubelet is not None
    run.kubelet.readable = not run.kubelet.readable
