"""Names that Kubernetes, PCI and people allow, and some they do not, go over the bus and come back as they were."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from fact_support import Writer, owner

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.events import (
    AllocationBound,
    AllocationGranted,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
)
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.ports import Bus, Endpoint, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = pytest.mark.anyio

NAMES = (
    "node-1",
    "gpu-7.rack-3.example.com",
    "GPU-7.Example.COM",
    "." * 253,
    ("a" * 61 + ".") * 4 + "b" * 5,
    "0000:07:00.0",
    "pci0000:00",
    "a b\tc",
    "*",
    ">",
    "$JS.API",
    "=2E",
    "a=b/c\\d",
    "знакъ-節点",
    "🦆",
    "-",
    "_",
)
"""Nodes; the fifth has 253 characters, as many as a Kubernetes name may have."""
PODS = ("train-0", "Train_0.X", "a" * 253, "a.b", "0000:07:00.0")


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    async with local_nats(tmp_path) as url, connect_bus(url, name="names") as over_nats:
        yield over_nats


async def test_a_wildcard_hears_every_node_and_a_node_is_heard_alone(bus: Bus) -> None:
    """C42: streams of allocations and of hardware, with pods and devices whose names are no less strange."""
    writers = [Writer(name) for name in NAMES]
    for writer in writers:
        facts = [writer.snapshot(), writer.grant("1", "0000:07:00.0", "mlx5_0", writer.node)]
        facts += [writer.bind("1", pod) for pod in PODS]
        for fact in facts:
            await bus.publish(wire.encode_event(fact, 0))
        health = DeviceHealthChanged(
            node=writer.node,
            epoch=1,
            revision=1,
            devices={DeviceID("0000:07:00.0"): DeviceHealth(state=HealthState.HEALTHY)},
        )
        await bus.publish(wire.encode_event(health, 0))

    of_all: dict[str, list[object]] = {}
    async with aclosing(Client(bus).allocations(since=0)) as events:
        for _ in range(len(NAMES) * (2 + len(PODS))):
            event = (await anext(events)).event
            of_all.setdefault(event.node, []).append(event)
    async with aclosing(Client(bus).nodes()) as events:
        hardware = [(await anext(events)).event.node for _ in NAMES]

    assert {writer.node: writer.said for writer in writers} == of_all
    assert set(NAMES) == set(hardware)
    for writer in writers:
        async with aclosing(Client(bus).allocations(since=0, node=writer.node)) as events:
            alone = [(await anext(events)).event for _ in writer.said]
        assert writer.said == alone
        granted, bound = alone[1], alone[2:]
        assert isinstance(granted, AllocationGranted)
        assert {"0000:07:00.0", "mlx5_0", writer.node} == granted.allocation.device_ids
        assert [owner(pod) for pod in PODS] == [event.owner for event in bound if isinstance(event, AllocationBound)]


async def test_every_node_is_asked_under_its_own_name(bus: Bus) -> None:
    """C42."""

    def saying(name: str) -> Endpoint:
        async def answer(body: bytes) -> bytes:
            return wire.encode_answer([name, body.decode()])

        return Endpoint(name="explain", subject=wire.admission_subject(NodeName(name), "explain"), answer=answer)

    async with bus.serve("topoalign-allocator", [saying(name) for name in NAMES]):
        for name in NAMES:
            answer = await bus.ask(wire.admission_subject(NodeName(name), "explain"), b"it", 5)

            assert [name, "it"] == wire.decode_answer(answer, list[str])


def test_tokens_can_be_turned_back_are_one_token_and_differ() -> None:
    """C42: what a wildcard stands for, and what a key of a NATS store may be."""
    tokens = {name: wire.encode_node_token(name) for name in (*NAMES, *PODS)}

    assert {name: name for name in tokens} == {name: wire.decode_node_token(token) for name, token in tokens.items()}
    assert len(tokens) == len(set(tokens.values()))
    assert all(
        set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=")
        for token in tokens.values()
    )


async def test_a_listener_of_a_node_hears_no_node_whose_name_contains_its(bus: Bus) -> None:
    """C42: `a.b` is no part of `a`, nor the other way round."""
    short, long = Writer("a"), Writer("a.b")
    for writer in (long, short):
        await bus.publish(wire.encode_event(writer.snapshot(), 0))
    async with aclosing(Client(bus).allocations(since=0, node=NodeName("a"))) as events:
        first = (await anext(events)).event

    assert short.said == [first]
    assert 2 == await bus.last_position(Stream.ALLOCATIONS)
