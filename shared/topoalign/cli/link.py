"""
Connects the command line to running services: finds NATS and the node, and sends requests.

NATS and node come from an option, else from the environment, else from this user's `topoalign up`. Without them, the
node is this host. No call here waits longer than a few seconds. Requests that change something are in `effects`.
"""

import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import anyio
import msgspec

from topoalign.cli import options, output, running, this_machine
from topoalign.cli.effects import Effect, put
from topoalign.client import Client
from topoalign.client.stored_records import newest_reservations
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NotFound, TopoalignError, Unavailable, clean
from topoalign.core.model.events import (
    Allocation,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    Reading,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Stream
from topoalign.core.state.checkpoint_owners import with_checkpoint_owners
from topoalign.core.state.fold import NodeState, initial_state, newer_reading
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.settings import RuntimeSettings, from_environment

R = TypeVar("R", bound=Reading)

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
"""Timeout of a decision: far above the slowest ones, so that it expires only if the allocator is dead."""
WORDS_SECONDS = 3.0
"""Timeout of the request for the topology that is used to print an answer. Without it, only device ids are printed."""


class NothingRuns(Unavailable):
    """
    Raised when no setting, and no running `topoalign up`, has the address of NATS.

    Remedy: Start `topoalign up`, or give the address with `--nats`.
    """

    def __init__(self) -> None:
        super().__init__(
            "no NATS is known: neither --nats nor TOPOALIGN_NATS_URL is set, and no `topoalign up` of this user runs",
            "start `topoalign up` in another terminal, or give --nats URL",
        )


@dataclass(frozen=True)
class NodeLink:
    """
    The node and the NATS server of a command, and its output format. Node and NATS are resolved at first use, so that
    invalid options are reported first.
    """

    nats_option: str | None
    node_option: str | None
    as_json: bool

    @cached_property
    def _found(self) -> tuple[str, NodeName]:
        return locate_bus(self.nats_option, self.node_option)

    @property
    def nats(self) -> str:
        """URL of NATS. Raises NothingRuns."""
        return self._found[0]

    @property
    def node(self) -> NodeName:
        """Name of the node. Raises NothingRuns."""
        return self._found[1]

    def ask(self, verb: str, request: object, kind: Any, effect: Effect | None = None) -> tuple[Any, Topology]:
        """
        Sends a request to the allocator of the node. Returns the answer, of type `kind`, and the node's topology for
        printing it: empty with --json, or if none was announced. `effect`: what the request changes.

        Raises the error of the allocator, NodeSilent if it does not answer, and OutcomeUnknown.
        """
        subject = wire.admission_subject(self.node, verb)
        return self._put(subject, request, "allocator", kind, effect, with_topology=not self.as_json)

    def ask_discovery(self, subject: str, request: object, kind: Any, effect: Effect | None = None) -> Any:
        """Sends a request to the discovery of the node. Returns the answer. Raises the errors of `ask`."""
        return self._put(subject, request, "discovery", kind, effect, with_topology=False)[0]

    def read_node(self) -> "AnnouncedNode":
        """What the node has announced. Raises NotFound, NothingRuns, BusUnavailable."""
        return read_announced_node(self.node_option, self.nats_option)

    def _put(
        self, subject: str, request: object, service: str, kind: Any, effect: Effect | None, *, with_topology: bool
    ) -> tuple[Any, Topology]:
        found: list[tuple[Any, Topology]] = []

        async def ask() -> None:
            async with connect_to_bus(self.nats) as bus:
                answer = await put(bus, self.node, subject, request, service, kind, effect, ANSWER_SECONDS)
                found.append((answer, Topology()))
                if with_topology:
                    with anyio.move_on_after(WORDS_SECONDS), suppress(TopoalignError):
                        found.append((answer, await newest_topology(bus, self.node) or Topology()))

        try:
            anyio.run(ask)
        except KeyboardInterrupt:
            if not found and effect is not None:
                output.note(f"it is not known whether {effect.what} was done: {effect.settle}")
            if not found:
                raise
        except Exception:  # an error after the answer, such as a lost connection, does not change the result
            if not found:
                raise
        return found[-1]


def locate_bus(nats: str | None, node: str | None = None) -> tuple[str, NodeName]:
    """The URL of NATS and the name of the node, according to these options. Raises NothingRuns."""
    up = running.find_running() if nats is None else None
    url = nats or (up.nats if up is not None else None)
    if url is None:
        raise NothingRuns
    return url, NodeName(node or (up.node if up is not None else socket.gethostname().lower()))


def on_node(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --node, --nats and --json, and passes them to the command as a `NodeLink`."""

    @options.NODE
    @options.NATS
    @options.JSON
    @wraps(command)
    def linked(node: str | None, nats: str | None, as_json: bool, **rest: Any) -> Any:
        return command(NodeLink(nats, node, as_json), **rest)

    return linked


@asynccontextmanager
async def connect_to_bus(url: str, log_level: str = "error") -> AsyncIterator[Bus]:
    """Connects to the bus at this address with the credentials of the environment. Raises BusUnavailable, BusRefused."""
    configure_logging(level=log_level)
    settings = from_environment(RuntimeSettings, os.environ)
    async with connect_bus(url, name="topoalign-cli", wait=CONNECT_SECONDS, access=settings) as bus:
        yield bus


async def newest_topology(bus: Bus, node: NodeName) -> Topology | None:
    """The newest topology that the node announced; None if there is none."""
    reading = await newest_reading(bus, node, TopologyDiscovered)
    return reading.topology if reading is not None else None


async def newest_reading(bus: Bus, node: NodeName, kind: type[R]) -> R | None:
    """The node's last reading of this kind that can be read; None if there is none."""
    subject = f"{wire.PREFIX}.{wire.SUBJECTS[kind][0].format(node=wire.encode_node_token(node))}"
    last = await bus.last_position(Stream.NODES, subject)
    if not last:
        return None
    newest: R | None = None
    with anyio.move_on_after(ANSWER_SECONDS):
        async with bus.follow(Stream.NODES, subject) as messages:  # the stream keeps five of them
            async for received in messages:
                with suppress(BadRequest):  # anybody may have written it; subscribers put it on the dead-letter stream
                    event = wire.decode_event(received.message)
                    newest = newer_reading(newest, event) if isinstance(event, kind) else newest
                if received.position >= last:
                    break
    return newest


async def read_allocations(bus: Bus, node: NodeName) -> tuple[Allocation, ...]:
    """
    The live allocations of the node. Owners that PodResources does not list, such as ended init containers, come from
    the kubelet's checkpoint.
    """
    allocations: tuple[Allocation, ...] = ()
    if await bus.last_position(
        Stream.ALLOCATIONS, wire.allocation_subjects(node)
    ):  # else its allocator never published
        with anyio.move_on_after(CONNECT_SECONDS):
            async with aclosing(Client(bus, name="cli").allocations(node=node)) as events:
                snapshot = (await anext(events)).event
            if isinstance(snapshot, AllocationsSnapshot):
                allocations = snapshot.allocations
    if all(each.owner is not None for each in allocations):
        return allocations
    usage = await newest_reading(bus, node, UsageObserved)
    reserved = await newest_reservations(bus, node)
    return with_checkpoint_owners(
        allocations,
        usage.kubelet.entries if usage is not None and usage.kubelet is not None else (),
        reserved.reservations if reserved is not None else (),
    )


@dataclass(frozen=True)
class AnnouncedNode:
    """A running node as its services have announced it."""

    node: NodeName
    topology: Topology
    allocations: tuple[Allocation, ...]
    health: Mapping[DeviceID, DeviceHealth]
    """Published health of devices, and of MIG instances whose health differs. `health_of` is that of each device."""
    announced: bool = True
    """False: no node runs, and this was read from the hardware of this machine. Holders are then unknown."""

    def health_of(self, device: DeviceID) -> DeviceHealth:
        """The health of a device or of a part of one, by the rule of `device_health`."""
        return self.state.health_of(device)

    @cached_property
    def state(self) -> NodeState:
        """The status as the core's NodeState, so that the core's rules apply."""
        live = {allocation.id: allocation for allocation in self.allocations}
        state = initial_state(self.node, self.topology, self.health, "announced")
        return msgspec.structs.replace(state, allocations=live)

    @cached_property
    def holders(self) -> dict[DeviceID, tuple[str, ...]]:
        """Device, or part of one -> the pods that hold it or a share of it; `?` for a pod that is not yet known."""
        held: dict[DeviceID, dict[str, None]] = {}
        for allocation in self.allocations:
            pod = "?" if allocation.owner is None else f"{allocation.owner.namespace}/{allocation.owner.pod}"
            for device in allocation.device_ids:
                for name in {base_of(device), self.topology.parent_of(device)}:
                    held.setdefault(name, {})[pod] = None
        return {device: tuple(pods) for device, pods in held.items()}


def read_announced_node(node: str | None, nats: str | None) -> AnnouncedNode:
    """Reads what a running node has announced. Raises NotFound, NothingRuns, BusUnavailable."""
    url, meant = locate_bus(nats, node)

    async def ask() -> AnnouncedNode:
        async with connect_to_bus(url) as bus:
            topology = await newest_topology(bus, meant)
            if topology is None:
                raise NotFound("node", meant, "give its name with --node, and check that `topoalign node` runs there")
            health = await newest_reading(bus, meant, DeviceHealthChanged)
            allocations = await read_allocations(bus, meant)
            return AnnouncedNode(meant, topology, allocations, health.devices if health is not None else {})

    return anyio.run(ask)


def read_node_or_machine(node: str | None, nats: str | None) -> AnnouncedNode:
    """
    What a running node has announced; if no NATS is known and `node` is None, the hardware of this machine. Raises
    NotFound, BusUnavailable, and NothingHere if this machine has no devices.
    """
    try:
        return read_announced_node(node, nats)
    except NothingRuns:
        if node is not None:
            raise
    inventory = this_machine.read_inventory()
    machine = this_machine.configured_machine()
    if machine:
        subject = f"{clean(machine, 200)}, the machine that TOPOALIGN_MACHINE describes, not this machine's hardware"
    else:
        subject = "the hardware of this machine; which pods hold it is not known"
    output.note(f"no node runs here: this is {subject}")
    here = NodeName(socket.gethostname().lower())
    return AnnouncedNode(here, inventory.topology, (), inventory.health, announced=False)


def self_test(url: str) -> str:
    """
    Connects as a service does, which checks the server's version, the permissions and the stores. Returns a text with
    the time that a request takes. Raises BusUnavailable, BusRefused, InvalidField.
    """

    async def test() -> str:
        async with connect_to_bus(url) as bus:
            began = time.perf_counter()
            positions = [await bus.last_position(stream) for stream in Stream]
            milliseconds = (time.perf_counter() - began) * 1000 / len(positions)
            return f"version and stores are right, {milliseconds:.1f} ms for a request"

    return anyio.run(test)
