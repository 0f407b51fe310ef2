"""The cases, one after the other, each with an agent, a kubelet and a state of its own."""

import time
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from topoalign.cli.link import connect_to_bus
from topoalign.core.model.ids import GPU, NodeName, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files.documents import parse_document
from topoalign.plugin_config.file import interpret_document
from topoalign.plugin_config.resource_offers import offer_resources
from topoalign.runtime.nats_server import local_nats
from topoalign.tools.bench.device_plugin import nvml, pods, shares, slots, units
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.device_plugin.announced import Announced
from topoalign.tools.bench.device_plugin.kubelet import NOTHING, Kubelet, preferred_allocation_request
from topoalign.tools.bench.device_plugin.machine import (
    CORES,
    IN_UNITS,
    MEMORY,
    SHARING,
    shared_node,
    with_blocks,
    with_uuids,
)
from topoalign.tools.bench.device_plugin.node import GPUS, MACHINE, WARM, Row, Settings, node, scratch, told
from topoalign.tools.measuring import measure_calls, summarize_times

SIZE = 4
PREFERRED = {"preferred-1000-shares": 125, "preferred-8192-shares": 1024}
"""Shares of each of the eight GPUs."""
MOST_MISSING = 0.1
"""Part of the shares that a question may leave out."""
SHARES = {"list-1000": (8, 125), "list-17500": (7, 2500)}
"""GPUs, and shares of each."""


def measure(calls: int, changes: int, starts: int, idle_seconds: float) -> Iterator[Row]:
    """All cases with this many calls, health changes and starts each, and so many seconds without any call."""
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        portal.wrap_async_context_manager(local_nats(folder / "nats")) as nats,
    ):
        settings = {"NATS_URL": nats, "LOG_LEVEL": "error"}
        with node("byte-code", settings | {"MACHINE": MACHINE}):
            pass  # it compiles what it imports, and keeps 8 MB for that
        with node("bare", settings | {"MACHINE": MACHINE}) as (kubelet, agent):
            yield bare(kubelet, calls) | {"rss_mb": agent.rss_mb}
            yield preferred("preferred-4of8", kubelet, calls) | {"rss_mb": agent.rss_mb}
            yield idle(agent, idle_seconds)
        yield slow_nvml(settings, calls)
        for case, replicas in PREFERRED.items():
            yield preferred_shares(case, settings, replicas, calls)
        yield from pods.measure(settings, calls)
        yield from shares.measure(settings, calls)
        for case, (gpus, replicas) in SHARES.items():
            yield listed(case, settings, shared(gpus, replicas), portal, changes)
        yield from units.measure(settings, calls)
        yield from slots.measure(settings, portal, calls)
        yield listed("list-10624", settings, in_units(16, 564), portal, changes, (CORES, MEMORY))
        yield from start(settings, starts)
        yield reregister(settings, starts)


def bare(kubelet: Kubelet, calls: int) -> Row:
    """The case `bare`."""
    options = kubelet.method("GetDevicePluginOptions")
    return measure_calls("bare", lambda: options(NOTHING), calls, WARM)


def preferred(case: str, kubelet: Kubelet, calls: int) -> Row:
    """The cases `preferred-4of8` and `preferred-4of8-slow-nvml`."""
    prefer = kubelet.method("GetPreferredAllocation")
    request = preferred_allocation_request(GPUS, SIZE)
    return measure_calls(case, lambda: prefer(request), calls, WARM)


def preferred_shares(case: str, settings: Settings, replicas: int, calls: int) -> Row:
    """The cases `preferred-…-shares`: one of other shares each time, which come in no order, as from a kubelet."""
    chance = Random(replicas)
    milliseconds = []
    with shared_node(case, settings, replicas) as (kubelet, agent, shares):
        prefer = kubelet.method("GetPreferredAllocation")
        for _ in range(WARM + calls):
            missing = chance.randrange(1, int(MOST_MISSING * len(shares)))
            request = preferred_allocation_request(chance.sample(shares, len(shares) - missing), 1)
            began = time.perf_counter()
            prefer(request)
            milliseconds.append((time.perf_counter() - began) * 1000)
        return summarize_times(case, milliseconds[WARM:]) | {"rss_mb": agent.rss_mb}


def slow_nvml(settings: Settings, calls: int) -> Row:
    """Without a compiler there is nothing to measure, and the row says why."""
    case = "preferred-4of8-slow-nvml"
    with scratch() as folder:
        try:
            nvml.build(folder)
        except nvml.NoStandIn as missing:
            return {"case": case, "n": 0, "left_out": f"{missing.finding}; {missing.remedy}"}
        told = settings | nvml.settings(folder, len(GPUS))
        with node(case, told, environment=nvml.environment(folder)) as (kubelet, agent):
            return preferred(case, kubelet, calls) | {"rss_mb": agent.rss_mb}


def listed(
    case: str,
    settings: Settings,
    topology: Topology,
    portal: BlockingPortal,
    changes: int,
    resources: Sequence[ResourceName] = (GPU,),
) -> Row:
    """The cases `list-…`: one change of a GPU's health per measurement."""
    name = NodeName(case)
    devices = sum(len(offer.devices) * offer.replicas for offer in topology.offered)
    milliseconds = []
    with portal.wrap_async_context_manager(connect_to_bus(settings["NATS_URL"])) as bus:
        announced = Announced(bus, name, topology)
        with (
            portal.wrap_async_context_manager(announced.serve()),
            node(case, settings, "allocator", healthy=None, resources=resources) as (kubelet, agent),
        ):
            portal.call(announced.asked.wait)
            agent.longest_block_ms()
            portal.call(announced.discover)
            kubelet.until(lambda came: came.healthy == devices, "the devices were not listed")
            for change in range(WARM + changes):
                ill = 0 if change % 2 else devices // len(topology.gpus)
                said = portal.call(announced.judge, not ill)
                came = kubelet.until(told(devices - ill), "a change of health was not listed")
                milliseconds.append((came.at - said) * 1000)
            block = agent.longest_block_ms()
            return summarize_times(case, milliseconds[WARM:]) | {"longest_block_ms": block, "rss_mb": agent.rss_mb}


def start(settings: Settings, starts: int) -> Iterator[Row]:
    """The cases `start`, with the agent's CPU time until the list, and `stop`; with the memory of the last agent."""
    milliseconds = []
    cpu = []
    stops = []
    for number in range(starts):
        with node(f"start-{number}", settings | {"MACHINE": MACHINE}, healthy=None) as (kubelet, agent):
            came = kubelet.until(told(len(GPUS)), "the GPUs were not listed")
            milliseconds.append((came.at - agent.started) * 1000)
            cpu.append(agent.cpu_seconds)
            rss_mb = agent.rss_mb
            stops.append(agent.stop() * 1000)
    yield summarize_times("start", milliseconds) | {"cpu_s": round(median(cpu), 3), "rss_mb": rss_mb}
    yield summarize_times("stop", stops) | {"rss_mb": rss_mb}


def reregister(settings: Settings, starts: int) -> Row:
    """The case `reregister`."""
    milliseconds = []
    with node("reregister", settings | {"MACHINE": MACHINE}) as (kubelet, agent):
        for _ in range(starts):
            kubelet.stop()
            began = time.monotonic()
            kubelet.start()
            milliseconds.append((kubelet.until_registered() - began) * 1000)
            kubelet.until(told(len(GPUS)), "the GPUs were not listed anew")
        return summarize_times("reregister", milliseconds) | {"rss_mb": agent.rss_mb}


def idle(agent: Agent, seconds: float) -> Row:
    """The case `idle`: the CPU time of an agent that nobody asks anything."""
    before = agent.cpu_seconds
    time.sleep(seconds)
    used = (agent.cpu_seconds - before) / seconds * 60
    return {"case": "idle", "n": 1, "cpu_s_per_minute": round(used, 3), "rss_mb": agent.rss_mb}


def shared(gpus: int, shares: int) -> Topology:
    """A machine with so many GPUs, shared so many ways by NVIDIA's configuration file."""
    return offered(with_uuids(gpus), SHARING % (GPU, shares))


def in_units(gpus: int, blocks: int) -> Topology:
    """A machine with so many GPUs in units, each with so many blocks of memory."""
    return offered(with_blocks(gpus, blocks, "dgx2"), IN_UNITS)


def offered(topology: Topology, config: str) -> Topology:
    """The machine as it is offered by a configuration file."""
    configuration = interpret_document(parse_document(config.encode(), "bench"), {}).configuration
    return msgspec.structs.replace(topology, offers=offer_resources(topology, configuration).offers)
