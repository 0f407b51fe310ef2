"""A card is lost with five sharers, in units and in slots: from the driver's library to kubelet, events and registry."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults_support import THOROUGH
from kubelet_support import learn_owners
from node_support import HURRY, NODE, WholeNode, whole_node
from nvml_support import host_tree, script, standing_in
from share_support import DEFAULT
from unit_support import CORES, MEMORY

from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Decision, Explained, Refusal
from topoalign.core.model.events import AllocationReleased, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.ports import Stream
from topoalign.discovery.use_meter import FRESH_SECONDS
from topoalign.kubelet.grpc.plugin_api import UNHEALTHY

pytestmark = pytest.mark.anyio

SHARERS = 5
CARD, OTHER = DeviceID("GPU-0"), DeviceID("GPU-1")
QUIET_SECONDS = 20.0
PATIENCE = 15.0
"""Seconds after which two polls have missed what has ended, for as long as it takes to be released."""
USE_FAILS = "fail nvmlDeviceGetComputeRunningProcesses_v3 0 15"
DEAD = ("fail nvmlDeviceGetMemoryInfo 0 15", "fail nvmlEventSetWait_v2 * 15", USE_FAILS)
"""GPU 0 answers only that it is lost."""


class Way(NamedTuple):
    """How the cards are shared."""

    config: str
    listed: Mapping[ResourceName, int]
    """Resource -> how many devices of each card are listed."""
    share: Mapping[ResourceName, int]
    """What each sharer asks for."""
    too_much: Mapping[ResourceName, int]
    """What one card has not left beside a sharer."""


UNITS = Way("sharing: {units: {}}", {CORES: 100, MEMORY: 16}, {CORES: 15, MEMORY: 2}, {CORES: 90, MEMORY: 2})
SLOTS = Way("sharing: {slots: {replicas: 8}}", {GPU: 8}, {GPU: 1}, {GPU: 2})
FAULTS = ["XID 79", "not in NVML"]


def asking(name: str, amounts: Mapping[ResourceName, int]) -> PodRequest:
    container = ContainerRequest(name=ContainerName("main"), requests={**amounts}, limits={**amounts})
    return PodRequest(namespace=DEFAULT, name=PodName(name), containers=(container,))


class Sharers:
    """A node with two cards that are shared."""

    def __init__(self, node: WholeNode, way: Way) -> None:
        self.node, self.way = node, way

    async def play(self, *more: str, gpus: tuple[int, ...] = (0, 1)) -> None:
        """From now on another machine, and a whole reading of it."""
        await self.node.play_machine(machine(*more, gpus=gpus))
        await self.node.reading()

    async def admit(self, name: str, amounts: Mapping[ResourceName, int] | None = None) -> Decision:
        decision = await self.node.kubelet.admit(asking(name, amounts or self.way.share))
        await learn_owners(self.node.kubelet)
        return decision

    def cards(self, name: str) -> set[DeviceID]:
        """Of which a running pod has a share."""
        parts = self.node.kubelet.running[DEFAULT, PodName(name)].parts()
        return {base_of(device) for *_, devices in parts for device in devices}

    def unhealthy(self) -> dict[ResourceName, set[DeviceID]]:
        """Resource -> the cards whose every share was last listed as Unhealthy; all shares are listed."""
        found: dict[ResourceName, set[DeviceID]] = {}
        for resource, count in self.way.listed.items():
            devices = self.node.kubelet.plugins.endpoints[resource].devices
            assert 2 * count == len(devices)
            ill = [base_of(device) for device, listed in devices.items() if listed.health == UNHEALTHY]
            found[resource] = {card for card in ill if ill.count(card) == count}
            assert len(ill) == count * len(found[resource])
        return found

    async def until_unhealthy(self, *cards: DeviceID) -> None:
        """Waits until the kubelet has received that these cards are unhealthy, and no other."""
        await self.node.until(lambda: self.unhealthy() == {resource: {*cards} for resource in self.way.listed})

    async def explained(self, names: list[str]) -> list[Explained]:
        return [await self.node.explain(f"default/{name}") for name in names]

    async def shares(self) -> dict[str, Any]:
        """GPU -> who uses it, measured anew."""
        await self.node.clock.advance(FRESH_SECONDS)
        return {row["device"]: row for row in (await self.node.get(f"/v1/shares?node={NODE}"))["items"]}

    def said(self, stream: Stream) -> list[Any]:
        """All events of a stream, oldest first."""
        return [wire.decode_event(received.message) for received in self.node.bus._logs[stream].kept]


def machine(*more: str, gpus: tuple[int, ...] = (0, 1)) -> str:
    """GPUs with 4 GiB each."""
    return script(gpus=gpus, more=[HURRY, *more]).replace(f"memory={80 << 30}", f"memory={4 << 30}")


@asynccontextmanager
async def sharers(way: Way, library: Path, folder: Path) -> AsyncIterator[Sharers]:
    host, config = host_tree(folder / "host", gpus=2, nics=0), folder / "config.yaml"
    config.write_text(f"version: v1\nhealth: {{quietSeconds: {QUIET_SECONDS}}}\n{way.config}\n")
    (folder / "nvml").mkdir()
    with standing_in(library, folder / "nvml", machine()) as standin:
        async with whole_node(host, standin, folder / "state", config=str(config), offered=0) as node:
            it = Sharers(node, way)
            listed = {resource: 2 * count for resource, count in way.listed.items()}
            while {resource: node.kubelet.allocatable(resource) for resource in listed} != listed:
                await node.clock.advance(0.1)
            yield it


async def lose(it: Sharers, fault: str) -> None:
    if fault == "not in NVML":
        await it.play(gpus=(1,))
        return
    it.node.standin.xid(0, 79)
    await it.node.until(lambda: it.node.counted("topoalign_discovery_xids_total", {"xid": "79"}))
    await it.play(*DEAD)


async def check_loss(it: Sharers, fault: str) -> None:
    """A card with five sharers is lost, one of them ends, others come, and the card is there again."""
    names, node = [f"share-{number}" for number in range(SHARERS)], it.node
    for name in names:
        assert isinstance(await it.admit(name), Admission)
    assert {CARD} == set().union(*map(it.cards, names))
    records = [each.allocations for each in await it.explained(names)]

    await lose(it, fault)
    await it.until_unhealthy(CARD)

    # the records stay, and whoever looks at them is told
    await node.clock.advance(PATIENCE)
    explained = await it.explained(names)
    assert records == [each.allocations for each in explained]
    assert all({CARD} == {base_of(device) for device in each.ailing} for each in explained)
    assert [] == [each for each in it.said(Stream.ALLOCATIONS) if isinstance(each, AllocationReleased)]
    health = [each for each in it.said(Stream.NODES) if isinstance(each, DeviceHealthChanged)][-1].devices
    assert (HealthState.UNHEALTHY, HealthState.HEALTHY) == (health[CARD].state, health[OTHER].state)
    assert health[CARD].reason
    topology = [each for each in it.said(Stream.NODES) if isinstance(each, TopologyDiscovered)][-1].topology
    assert {CARD, OTHER} == {base_of(device) for offer in topology.offered for device in offer.devices}

    # so does the registry
    rows = (await node.get("/v1/allocations"))["items"]
    assert {CARD} == {base_of(device) for row in rows for device in row["ailing"]}
    assert sum(map(len, records)) == len([row for row in rows if row["ailing"]])
    lost = (await it.shares())[CARD]
    assert {*names} == {holder["owner"]["pod"] for holder in lost["holders"]}
    assert {None} == {holder["use"]["memory"] for holder in lost["holders"]}
    assert lost["failure"]

    # who comes now gets of the other card, and no more than it has; who restarts is not refused
    assert isinstance(await it.admit("new"), Admission)
    assert {OTHER} == it.cards("new")
    refused = await it.admit("more", it.way.too_much)
    assert isinstance(refused, Refusal) and refused.code and refused.finding and refused.remedy
    await node.kubelet.start_containers(DEFAULT, PodName(names[1]))

    # what has ended is given back, and nothing else
    await node.kubelet.remove(DEFAULT, PodName(names[0]))
    await node.clock.advance(PATIENCE)
    released = [each.allocation for each in it.said(Stream.ALLOCATIONS) if isinstance(each, AllocationReleased)]
    assert {each.id for each in records[0]} == {*released}
    assert records[1:] == [each.allocations for each in await it.explained(names[1:])]

    # the card comes back with its sharers
    await it.play()
    await node.clock.advance(QUIET_SECONDS)
    await node.reading()
    await it.until_unhealthy()
    back = await it.explained(names[1:])
    assert (records[1:], {}) == (
        [each.allocations for each in back],
        dict(*[each.ailing for each in back if each.ailing]),
    )
    assert isinstance(await it.admit("sixth"), Admission)
    assert {CARD} == it.cards("sixth")
    assert "" == (await it.shares())[CARD]["failure"]


@pytest.mark.parametrize("fault", FAULTS if THOROUGH else FAULTS[:1])
async def test_c18_a_card_in_units_is_lost_with_five_sharers(fault: str, nvml_library: Path, tmp_path: Path) -> None:
    async with sharers(UNITS, nvml_library, tmp_path) as it:
        await check_loss(it, fault)


@pytest.mark.parametrize("fault", FAULTS if THOROUGH else FAULTS[1:])
async def test_c18_a_card_in_slots_is_lost_with_five_sharers(fault: str, nvml_library: Path, tmp_path: Path) -> None:
    async with sharers(SLOTS, nvml_library, tmp_path) as it:
        await check_loss(it, fault)
