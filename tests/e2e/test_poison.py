"""What nobody should have said harms nobody: it is counted, put aside with the reason, and everybody goes on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import msgspec
import pytest
from bus_support import RawNats, killable, raw_nats
from e2e_support import allocate, answering, in_one_process, pod
from fact_support import Writer
from faults_support import sample

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import (
    DeviceHealth,
    DeviceHealthChanged,
    Event,
    HealthState,
    Reading,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Bus, Message, Stream
from topoalign.runtime.nats_bus import connect_bus

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("gpu-7.example.com")
SERVICES = ("registry", "topoalign-hinting", "topoalign-allocator")
"""Who hears the streams, by the names under which they put aside; the last two hear only what is said of hardware."""
SERVER_MOST = 1024 * 1024
"""Bytes of headers and body that NATS takes by default."""


class Poison(NamedTuple):
    what: str
    message: Message
    headers: bytes = b""
    unknown: bool = False
    """Of a later version, and so nobody's mistake: counted, and not put aside."""


def events() -> Iterator[Event]:
    """One of each stream's subjects, true to type."""
    gpu = Gpu(id=DeviceID("GPU-a"), index=0, pci="0000:07:00.0", numa_affinity=(0,))
    healthy = {DeviceID("GPU-a"): DeviceHealth(state=HealthState.HEALTHY)}
    writer = Writer(NODE)
    writer.snapshot()
    yield writer.grant("1", "GPU-a")
    topology = Topology(gpus=(gpu,))
    yield TopologyDiscovered(node=NODE, epoch=1, revision=9, boot_id="b", source="test", topology=topology)
    yield DeviceHealthChanged(node=NODE, epoch=1, revision=9, devices=healthy)
    yield UsageObserved(node=NODE, epoch=1, revision=9, containers=())


def poisons(event: Event) -> Iterator[Poison]:
    """What may lie on this event's subject instead of it."""
    good = wire.encode_event(event, 1_700_000_000.0)
    lines = {name: value for name, value in good.headers.items() if name != "Nats-Msg-Id"}

    def of(
        what: str, body: bytes, headers: Mapping[str, str] = {}, *, raw: bytes = b"", unknown: bool = False
    ) -> Poison:
        said = {**lines, **headers}
        whole = b"\r\n".join([*(f"{name}: {value}".encode() for name, value in said.items()), *([raw] if raw else [])])
        return Poison(what, msgspec.structs.replace(good, body=body), whole, unknown)

    chance = random.Random(good.subject)  # the same noise in every run
    yield of("nothing", b"")
    yield from (of("random bytes", chance.randbytes(size)) for size in (1, 16, 300, 5_000))
    for end in sample(range(1, len(good.body)), 12):
        yield of(f"cut after {end} bytes", good.body[:end])
    yield of("a later version", b'{"anything":1}', {"ce-type": "topoalign.v2.AllocationGranted"}, unknown=True)
    yield of("a later type", b'{"type":"Later"}', {"ce-type": "topoalign.v1.AllocationBlessed"}, unknown=True)
    yield of("later CloudEvents", good.body, {"ce-specversion": "2.0"})
    yield of("another node", good.body.replace(NODE.encode(), b"node-2"))
    yield of("no number", good.body.replace(b'"epoch":', b'"epoch":NaN,"old":'))
    yield of("not finite", good.body.replace(b'"epoch":', b'"epoch":1e999,"old":'))
    yield of("not whole", good.body.replace(b'"epoch":', b'"epoch":1.5,"old":'))
    yield of("deep", b"[" * 200_000)
    yield of("deep inside", good.body[:-1] + b',"later":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}")
    yield of("a megabyte", b'{"type":"' + b"x" * (SERVER_MOST - 2_000))
    if isinstance(event, TopologyDiscovered):
        offer = Offer(resource=GPU, devices=(DeviceID("GPU-a"),), replicas=10**12)
        huge = msgspec.structs.replace(event, topology=msgspec.structs.replace(event.topology, offers=(offer,)))
        yield of("a list of terabytes", msgspec.json.encode(huge))
        yield of("a mask of gigabytes", good.body.replace(b'"numa_affinity":[0]', b'"numa_affinity":[99999999999]'))
    if b'"id":"1"' in good.body:
        cpus = b"0-65535," * 100_000
        yield of("a list of CPUs that takes hours", good.body.replace(b'"id":"1"', b'"id":"1","cpus":"' + cpus + b'0"'))
    yield of("surrogates", good.body.replace(NODE.encode(), b"\\ud800"))
    yield of("not UTF-8", good.body.replace(NODE.encode(), b"\xc0\xa0"))
    for name in ("ce-type", "ce-source", "ce-id", "ce-time", "traceparent"):
        yield of(f"%C0%A0 in {name}", b"{}", {name: "%C0%A0"})
        yield of(f"bytes in {name}", b"{}", raw=name.encode() + b": \xc0\xa0\x1b[2J")
    yield of("a long header", b"{}", raw=b"traceparent: " + b"\xff" * 30_000)
    yield of("a header without name", b"{}", raw=b": x\r\nno colon at all")


async def say(raw: RawNats, poison: Poison) -> None:
    await raw.publish(poison.message.subject, poison.message.body, poison.headers)


class Letters:
    """What each service has put aside, as it comes."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {}

    async def read(self, bus: Bus) -> None:
        """Until cancelled."""
        async with bus.follow(Stream.DEADLETTERS, f"{wire.PREFIX}.deadletter.*") as messages:
            async for received in messages:
                assert received.message.headers["topoalign-reason"]
                service = received.message.subject.rpartition(".")[2]
                self.bodies.setdefault(service, []).append(received.message.body)

    async def have(self, count: int, *services: str) -> None:
        """Until each of these services has put so many aside."""
        while any(len(self.bodies.get(service, ())) < count for service in services):
            await anyio.lowlevel.checkpoint()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "TOPOALIGN_NODE": NODE,
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
        "TOPOALIGN_HTTP_PORT": "0",
    }


async def test_poison_on_every_subject_is_set_aside_once_and_services_go_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """
    C41: discovery, hinting, allocator and registry over a real NATS, all their subjects full of poison; then everything
    is announced anew, and a pod admitted. What each has put aside does not grow by a lost connection.
    """
    wicked = [(event, tuple(poisons(event))) for event in events()]
    letters, spoilt = Letters(), dict.fromkeys(SERVICES, 0)
    async with (
        killable(tmp_path / "nats") as server,
        connect_bus(server.url) as bus,
        in_one_process(bus, environment) as url,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(letters.read, bus)
        await answering(bus, NODE)
        async with raw_nats(server.port or 0) as raw:
            for event, some in wicked:
                concerned = SERVICES if isinstance(event, Reading) else SERVICES[:1]
                for poison in some:
                    await say(raw, poison)
                    await raw.done()
                    for service in concerned:
                        spoilt[service] += not poison.unknown
                        await letters.have(spoilt[service], service)  # of nodes, NATS keeps five messages of a subject
        await bus.ask(wire.discovery_subject(NODE, "announce"), msgspec.json.encode(NodeRequest(node=NODE)), 5)
        decision = await allocate(bus, NODE, pod("after", gpus=2))
        async with httpx.AsyncClient(base_url=url) as http:
            while not (await http.get("/v1/allocations")).json()["items"]:
                await anyio.lowlevel.checkpoint()
            while (node := (await http.get(f"/v1/nodes/{NODE}")).json()["summary"])["revision"] < 2:
                await anyio.lowlevel.checkpoint()
            metrics = (await http.get("/metrics")).text
        server.kill()
        await server.start()
        await answering(bus, NODE)
        tasks.cancel_scope.cancel()

    everything = [poison for _, some in wicked for poison in some]
    of_nodes = [poison for event, some in wicked for poison in some if isinstance(event, Reading)]
    assert isinstance(decision, Admission)
    assert not node["stale"]
    assert {
        "registry": bodies(everything),
        "topoalign-hinting": bodies(of_nodes),
        "topoalign-allocator": bodies(of_nodes),
    } == {service: sorted(put_aside) for service, put_aside in letters.bodies.items()}
    assert all(wire.decode_event(wire.encode_event(event, 0)) == event for event, _ in wicked), (
        "what was spoilt was good before"
    )
    assert f"topoalign_registry_undecodable_total {float(len(bodies(everything)))}" in metrics
    assert f"topoalign_registry_unknown_total {2.0 * len(wicked)}" in metrics


def bodies(poisons: Sequence[Poison]) -> list[bytes]:
    """Of those that are to be put aside, as they are kept."""
    return sorted(poison.message.body[: wire.LARGEST_BODY] for poison in poisons if not poison.unknown)


async def test_a_subscriber_with_poison_around_every_event_hears_each_once(tmp_path: Path) -> None:
    """C41."""
    writer = Writer(NODE)
    async with killable(tmp_path / "nats") as server, connect_bus(server.url) as bus, raw_nats(server.port or 0) as raw:
        client, spoilt = Client(bus, name="watcher"), 0
        stream = client.allocations(since=0)
        told: list[Event] = []
        for number in range(4):
            fact = writer.snapshot() if number == 0 else writer.grant(str(number), f"GPU-{number}")
            for poison in tuple(poisons(fact))[number::4]:
                await say(raw, poison)
                spoilt += not poison.unknown
            await raw.done()
            await bus.publish(wire.encode_event(fact, 0))
            told.append((await anext(stream)).event)
        await stream.aclose()
        letters = Letters()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(letters.read, bus)
            await letters.have(spoilt, "watcher")
            tasks.cancel_scope.cancel()

    assert writer.said == told
    assert spoilt == client.counts.undecodable == len(letters.bodies["watcher"])
    assert 0 == client.counts.gaps
