"""
The connection from the command line to running services: which NATS, which node, and one request over it.

NATS and node come from an option, else from the environment, else from the `topoalign up` of this user; without any of
them the node is this host. No call here waits longer than a few seconds for an answer. Requests that change something are
in `effects`.
"""

import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import anyio
import click
import msgspec

from topoalign.cli import options, output, running, this_machine
from topoalign.cli.effects import Effect, Question, put, undone_unless
from topoalign.client import Client
from topoalign.client.records import newest_reservations
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NotFound, TopoalignError, Unavailable, clean, quoted
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
from topoalign.core.model.maintenance import DevicesRequest, Override
from topoalign.core.model.processes import Measurement
from topoalign.core.model.requests import UseRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Stream
from topoalign.core.state.checkpoint_owners import with_checkpoint_owners
from topoalign.core.state.fold import NodeState, initial_state, newer_reading
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import Access, connect_bus
from topoalign.runtime.settings import RuntimeSettings, from_environment

R = TypeVar("R", bound=Reading)

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
"""For a decision: far above the slowest ones, so that only a dead allocator is given up."""
WORDS_SECONDS = 3.0
"""For the topology that an answer is worded with; without it device ids stand alone."""


class NothingRuns(Unavailable):
    """Nothing says where NATS is."""

    code = "NothingRuns"

    def __init__(self, remedy: str = "start `topoalign up` in another terminal, or give --nats URL") -> None:
        super().__init__(
            "no NATS is known: neither --nats nor TOPOALIGN_NATS_URL is set, and no `topoalign up` of this user runs",
            remedy,
        )


@dataclass(frozen=True)
class Link:
    """Where a command asks, and how it answers. Looked up when it is needed: a wrong option is told first."""

    nats_option: str | None
    node_option: str | None
    as_json: bool

    @cached_property
    def found(self) -> tuple[str, NodeName]:
        """URL of NATS, name of the node. Raises NothingRuns."""
        return located(self.nats_option, self.node_option, os.environ)

    @property
    def nats(self) -> str:
        """URL of NATS. Raises NothingRuns."""
        return self.found[0]

    @property
    def node(self) -> NodeName:
        """Name of the node. Raises NothingRuns."""
        return self.found[1]

    def ask(self, verb: str, request: object, kind: Any, effect: Effect | None = None) -> tuple[Any, Topology]:
        """
        One question to the allocator of the node, and the node's topology to word the answer with.

        `kind` is the type of the answer, `effect` what the request changes. The topology is empty where none was announced
        or can be had now, and with --json, which does not need it. Raises what the allocator failed with, NodeSilent if it
        does not answer, and OutcomeUnknown if it does not and may have done it.
        """
        question = Question(wire.admission_subject(self.node, verb), request, "allocator")
        return self._put(question, kind, effect, worded=not self.as_json)

    def tell(self, word: Override, devices: Sequence[str], reason: str) -> dict[DeviceID, DeviceHealth]:
        """
        An operator's word on devices, to the discovery of the node. Returns how each of them is from now on.

        Raises what discovery failed with, NodeSilent if it does not answer, and OutcomeUnknown if it may have received
        the request.
        """
        request = DevicesRequest(node=self.node, devices=tuple(devices), reason=reason)
        effect = spoken(word, devices)
        question = Question(wire.devices_subject(self.node, word), request, "discovery")
        health: dict[DeviceID, DeviceHealth]
        health, _ = self._put(question, dict[DeviceID, DeviceHealth], effect, worded=False)
        return health

    def measure(self) -> Measurement:
        """What the GPUs of the node are used for now, from its discovery. Raises what discovery failed with, NodeSilent."""
        question = Question(wire.use_subject(self.node), UseRequest(node=self.node), "discovery")
        measured: Measurement
        measured, _ = self._put(question, Measurement, None, worded=False)
        return measured

    def _put(self, question: Question, kind: Any, effect: Effect | None, *, worded: bool) -> tuple[Any, Topology]:
        """The answer; with `worded` also the topology, where it can be had. An answer stands, whatever comes after it."""
        found: list[tuple[Any, Topology]] = []

        async def ask() -> None:
            async with connected(self.nats) as bus:
                answer = await put(bus, self.node, question, kind, effect, ANSWER_SECONDS)
                found.append((answer, Topology()))
                if worded:
                    with anyio.move_on_after(WORDS_SECONDS), suppress(TopoalignError):
                        found.append((answer, await newest_topology(bus, self.node) or Topology()))

        with undone_unless(found, effect):
            anyio.run(ask)
        return found[-1]


def spoken(word: Override, devices: Sequence[str]) -> Effect:
    """What an operator's override of devices does, for errors after it was sent."""
    return Effect(f"the {word} of {quoted(devices)}", "`topoalign gpu list` shows it; repeating it is safe")


def located(nats: str | None, node: str | None, environment: Mapping[str, str]) -> tuple[str, NodeName]:
    """The NATS to use and the node that is meant. Raises NothingRuns."""
    up = running.find(environment) if nats is None else None
    url = nats or (up.nats if up is not None else None)
    if url is None:
        raise NothingRuns
    return url, NodeName(node or (up.node if up is not None else socket.gethostname().lower()))


def on_node(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --node, --nats and --json, and hands them to the command as a `Link`."""

    @options.NODE
    @options.NATS
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @wraps(command)
    def linked(node: str | None, nats: str | None, as_json: bool, **rest: Any) -> Any:
        return command(Link(nats, node, as_json), **rest)

    return linked


@asynccontextmanager
async def connected(url: str, log_level: str = "error") -> AsyncIterator[Bus]:
    """The bus at this address; who we are to it comes from the environment. Raises BusUnavailable, BusRefused."""
    configure_logging(level=log_level)
    settings = from_environment(RuntimeSettings, os.environ)
    async with connect_bus(url, name="topoalign-cli", wait=CONNECT_SECONDS, access=Access.of(settings)) as bus:
        yield bus


async def newest_topology(bus: Bus, node: NodeName) -> Topology | None:
    """What the node announced last; None if it never did."""
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
                with suppress(BadRequest):  # what anybody may have written there; subscribers put it aside
                    event = wire.decode_event(received.message)
                    newest = newer_reading(newest, event) if isinstance(event, kind) else newest
                if received.position >= last:
                    break
    return newest


async def live_allocations(bus: Bus, node: NodeName) -> tuple[Allocation, ...]:
    """What is held on the node; nothing where its allocator never spoke."""
    if not await bus.last_position(Stream.ALLOCATIONS, wire.allocation_subjects(node)):
        return ()
    with anyio.move_on_after(CONNECT_SECONDS):
        async with aclosing(Client(bus, name="cli").allocations(node=node)) as events:
            snapshot = (await anext(events)).event
        if isinstance(snapshot, AllocationsSnapshot):
            return snapshot.allocations
    return ()


async def named_allocations(bus: Bus, node: NodeName) -> tuple[Allocation, ...]:
    """What is held on the node; what init containers left, which PodResources does not show, with them as owners."""
    allocations = await live_allocations(bus, node)
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
class NodeStatus:
    """A running node as its services have announced it."""

    node: NodeName
    topology: Topology
    allocations: tuple[Allocation, ...]
    health: Mapping[DeviceID, DeviceHealth]
    """What was told, of cards and of parts that are ill alone; `health_of` derives from it how each device is."""
    announced: bool = True
    """False: no node runs, and this is what the hardware of this machine says; who holds what is not known then."""

    def health_of(self, device: DeviceID) -> DeviceHealth:
        """Of anything that is handed out, by the rule of `device_health`."""
        return self.state.health_of(device)

    @cached_property
    def state(self) -> NodeState:
        """The same as a fold, so that the rules of the core apply."""
        live = {allocation.id: allocation for allocation in self.allocations}
        state = initial_state(self.node, self.topology, self.health, "announced")
        return msgspec.structs.replace(state, allocations=live)

    @cached_property
    def holders(self) -> dict[DeviceID, tuple[str, ...]]:
        """Card, or part of one -> the pods that hold it or something of it; `?` where the kubelet has not said which."""
        held: dict[DeviceID, dict[str, None]] = {}
        for allocation in self.allocations:
            pod = "?" if allocation.owner is None else f"{allocation.owner.namespace}/{allocation.owner.pod}"
            for device in allocation.device_ids:
                for name in {base_of(device), self.topology.card_of(device)}:
                    held.setdefault(name, {})[pod] = None
        return {device: tuple(pods) for device, pods in held.items()}


def discovered(node: str | None, nats: str | None, environment: Mapping[str, str]) -> NodeStatus:
    """What a running node has announced. Raises NotFound, NothingRuns, BusUnavailable."""
    url, meant = located(nats, node, environment)

    async def ask() -> NodeStatus:
        async with connected(url) as bus:
            topology = await newest_topology(bus, meant)
            if topology is None:
                raise NotFound("node", meant, "give its name with --node, and check that `topoalign node` runs there")
            health = await newest_reading(bus, meant, DeviceHealthChanged)
            allocations = await named_allocations(bus, meant)
            return NodeStatus(meant, topology, allocations, health.devices if health is not None else {})

    return anyio.run(ask)


def discovered_or_read(node: str | None, nats: str | None, environment: Mapping[str, str]) -> NodeStatus:
    """
    What a running node has announced; where nothing says which node, what this machine has.

    Raises NotFound, BusUnavailable, NothingHere where this machine has nothing either.
    """
    try:
        return discovered(node, nats, environment)
    except NothingRuns:
        if node is not None:
            raise NothingRuns(this_machine.PLAY) from None
    inventory = this_machine.read()
    machine = this_machine.played()
    if machine:
        shown = f"{clean(machine, 200)}, the machine that TOPOALIGN_MACHINE describes, not this machine's hardware"
    else:
        shown = "the hardware of this machine; which pods hold it is not known"
    output.note(f"no node runs here: this is {shown}")
    here = NodeName(socket.gethostname().lower())
    return NodeStatus(here, inventory.topology, (), inventory.health, announced=False)


def self_test(url: str) -> str:
    """
    Connects as a service would, which checks the server's version, our permissions and the stores, and asks it something.

    Raises BusUnavailable, BusRefused, InvalidField.
    """

    async def test() -> str:
        async with connected(url) as bus:
            began = time.perf_counter()
            positions = [await bus.last_position(stream) for stream in Stream]
            milliseconds = (time.perf_counter() - began) * 1000 / len(positions)
            return f"version and stores are right, {milliseconds:.1f} ms for a request"

    return anyio.run(test)
