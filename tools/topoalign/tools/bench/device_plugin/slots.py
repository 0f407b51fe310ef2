"""The cases of GPUs in slots: a container asks for a slot that is reserved for it, with an amount of cores and memory."""

import time
from collections.abc import Callable, Iterator, Sequence

from anyio.from_thread import BlockingPortal

from topoalign.cli.link import connect_to_bus
from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.holdings import Amount, handed_out
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.model import Topology
from topoalign.tools.bench.device_plugin.kubelet import (
    NOTHING,
    PATIENCE_SECONDS,
    BenchStuck,
    Kubelet,
    allocate_request,
    preferred_allocation_request,
)
from topoalign.tools.bench.device_plugin.machine import node_in_slots
from topoalign.tools.bench.device_plugin.node import WARM, Row, Settings
from topoalign.tools.bench.device_plugin.pods import AT_ONCE
from topoalign.tools.measuring import summarize_times

NAME = NodeName("slots")
SLOTS = 10
"""Of each GPU."""
AMOUNT = Amount(cores=20, memory=15 << 30)
"""That is reserved by each slot."""
HELD = 2
"""Slots of each GPU that containers have, where some do."""

Reserve = Callable[[Sequence[DeviceID]], None]
"""Has these slots reserved, for a pod each, and those before no more; returns when the agent answers by it."""


def measure(settings: Settings, portal: BlockingPortal, calls: int) -> Iterator[Row]:
    """Both cases, with this many calls of each."""
    with (
        node_in_slots(NAME, settings | AT_ONCE, SLOTS) as (kubelet, agent, topology),
        portal.wrap_async_context_manager(connect_to_bus(settings["NATS_URL"])) as bus,
    ):
        reserve = reserving(
            kubelet, topology, lambda event: portal.call(bus.publish, wire.encode_event(event, time.time()))
        )
        slots = [slot for gpu in topology.gpus for slot in handed_out(gpu.id, SLOTS)]
        last = [slots[number * SLOTS - 1] for number in range(len(topology.gpus), 0, -1)]
        reserve(last)
        milliseconds = preferred(kubelet, slots, WARM + calls)
        allocate = allocated(kubelet, last[:1], WARM + calls)
        reserve(())
        held = [[slot] for number in range(len(topology.gpus)) for slot in slots[number * SLOTS :][:HELD]]
        for each in held:
            kubelet.method("Allocate")(allocate_request(each))
        bind(kubelet, held)
        reserve(last)
        beside = summarize_times("", preferred(kubelet, slots, WARM + calls)[WARM:])
        row = summarize_times("preferred-slot", milliseconds[WARM:])
        yield row | {f"beside_{len(held)}_p50_ms": beside["p50_ms"], "rss_mb": agent.rss_mb}
        yield allocate | {"rss_mb": agent.rss_mb}


def preferred(kubelet: Kubelet, slots: Sequence[DeviceID], calls: int) -> list[float]:
    """The milliseconds of each GetPreferredAllocation for a slot, of all that there are but some of the first."""
    prefer = kubelet.method("GetPreferredAllocation")
    milliseconds = []
    for number in range(calls):
        request = preferred_allocation_request(slots[number % 7 :], 1)
        began = time.perf_counter()
        prefer(request)
        milliseconds.append((time.perf_counter() - began) * 1000)
    return milliseconds


def allocated(kubelet: Kubelet, slots: Sequence[DeviceID], calls: int) -> Row:
    """The case `allocate-slot`: the reserved slot, which is released before the next call."""
    give = kubelet.method("Allocate")
    request = allocate_request(slots)
    milliseconds = []
    for _ in range(calls):
        began = time.perf_counter()
        give(request)
        milliseconds.append((time.perf_counter() - began) * 1000)
        bind(kubelet, [slots])
        bind(kubelet, [])
    return summarize_times("allocate-slot", milliseconds[WARM:])


def bind(kubelet: Kubelet, held: Sequence[Sequence[DeviceID]]) -> None:
    """From now on these containers run, and the agent knows."""
    kubelet.show(*held)
    look = kubelet.method("PreStartContainer")
    for _ in range(3):  # nothing is gone that was missing once, and a poll for an owner may come between
        look(NOTHING)


def reserving(kubelet: Kubelet, topology: Topology, say: Callable[[ReservationsChanged], object]) -> Reserve:
    """Takes the place of a registry, which says what is reserved."""
    said = 0

    def reserve(slots: Sequence[DeviceID]) -> None:
        nonlocal said
        said += 1
        made = tuple(reserved(f"pod-{said}-{number}", slot) for number, slot in enumerate(slots))
        uids = tuple(each.pod_uid for each in made)
        say(ReservationsChanged(node=NAME, epoch=1, seq=said, writer="bench", reservations=made, made=uids))
        until_heard(kubelet, [slot for gpu in topology.gpus for slot in handed_out(gpu.id, SLOTS)], slots)

    return reserve


def reserved(name: str, slot: DeviceID) -> Reservation:
    """The reservation of a pod with one container and one slot."""
    container = ReservedContainer(container=ContainerName("main"), devices={GPU: (slot,)}, slots={slot: AMOUNT})
    return Reservation(
        pod_uid=name, namespace=Namespace("default"), pod=PodName(name), containers=(container,), seconds_left=3600.0
    )


def until_heard(kubelet: Kubelet, all_slots: Sequence[DeviceID], slots: Sequence[DeviceID]) -> None:
    """
    Returns when the first of the reserved slots is preferred, or, where none is reserved, another one than the last of all,
    which is preferred for nothing else. Raises BenchStuck.
    """
    prefer = kubelet.method("GetPreferredAllocation")
    request = preferred_allocation_request(all_slots, 1)
    until = time.monotonic() + PATIENCE_SECONDS
    wanted = slots[0] if slots else all_slots[-1]
    while (wanted.encode() in prefer(request)) is not bool(slots):
        if time.monotonic() > until:
            raise BenchStuck("the agent has not received what is reserved")
        time.sleep(0.01)
