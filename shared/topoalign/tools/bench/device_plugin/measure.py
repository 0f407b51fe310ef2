"""The cases, one after the other, each with an agent, a kubelet and a state of its own."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from topoalign.cli.link import connected
from topoalign.cli.measuring import measured, summary
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.machines import load_machine
from topoalign.runtime.nats_server import local_nats
from topoalign.tools.bench.device_plugin import nvml
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.announced import Announced
from topoalign.tools.bench.device_plugin.kubelet import (
    NOTHING,
    Came,
    Kubelet,
    allocate_request,
    pre_start_request,
    preferred_allocation_request,
)

MACHINE = "dgx-a100"
GPUS = tuple(DeviceID(f"GPU-{index}") for index in range(8))
SIZE = 4
WARM = 20
"""Calls that do not count."""
SHARES = {"list-1000": (8, 125), "list-17500": (7, 2500)}
"""GPUs, and shares of each."""

Row = dict[str, object]
Settings = dict[str, str]


class NotReleased(Unavailable):
    """What is gone was not released."""

    code = "NotReleased"


def measure(calls: int, changes: int, starts: int) -> Iterator[Row]:
    """All cases with this many calls, health changes and starts each."""
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        portal.wrap_async_context_manager(local_nats(folder / "nats")) as nats,
    ):
        settings = {"NATS_URL": nats, "LOG_LEVEL": "error"}
        with node("bare", settings | {"MACHINE": MACHINE}) as (kubelet, agent):
            yield bare(kubelet, calls) | {"rss_mb": agent.rss_mb}
            yield preferred("preferred-4of8", kubelet, calls) | {"rss_mb": agent.rss_mb}
        yield slow_nvml(settings, calls)
        yield allocate(settings, calls)
        for case, (gpus, shares) in SHARES.items():
            yield listed(case, settings, shared(gpus, shares), portal, changes)
        yield start(settings, starts)
        yield reregister(settings, starts)


def bare(kubelet: Kubelet, calls: int) -> Row:
    """The case `bare`."""
    options = kubelet.method("GetDevicePluginOptions")
    return measured("bare", lambda: options(NOTHING), calls, WARM)


def preferred(case: str, kubelet: Kubelet, calls: int) -> Row:
    """The cases `preferred-4of8` and `preferred-4of8-slow-nvml`."""
    prefer, request = kubelet.method("GetPreferredAllocation"), preferred_allocation_request(GPUS, SIZE)
    return measured(case, lambda: prefer(request), calls, WARM)


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


def allocate(settings: Settings, calls: int) -> Row:
    """
    As a kubelet does: asks what is preferred, gives that out, shows the container in its record while it runs, and later no
    more; PreStartContainer makes the agent look at the record. Only the giving out counts.
    """
    at_once = {"MACHINE": MACHINE, "GONE_SECONDS": "0", "SETTLE_SECONDS": "0", "RECONCILE_SECONDS": "3600"}
    milliseconds = []
    with node("allocate", settings | at_once) as (kubelet, agent):
        prefer, give, look = map(kubelet.method, ("GetPreferredAllocation", "Allocate", "PreStartContainer"))
        given = GPUS[:SIZE]
        for _ in range(WARM + calls):
            prefer(preferred_allocation_request(GPUS, SIZE))
            looks = kubelet.looks
            began = time.perf_counter()
            give(allocate_request(given))
            milliseconds.append((time.perf_counter() - began) * 1000)
            if kubelet.looks != looks:
                raise NotReleased(
                    "the GPUs of the call before are held still", "see how the allocator releases what is gone"
                )
            kubelet.show(given)
            look(pre_start_request(given))
            kubelet.show_nothing()
            for _ in range(2):  # nothing is gone that was missing once
                look(pre_start_request(given))
        return summary("allocate-4", milliseconds[WARM:]) | {"rss_mb": agent.rss_mb}


def listed(case: str, settings: Settings, topology: Topology, portal: BlockingPortal, changes: int) -> Row:
    """The cases `list-…`: one change of a GPU's health per measurement."""
    name = NodeName(case)
    devices = sum(len(offer.devices) * offer.replicas for offer in topology.offered)
    milliseconds = []
    with portal.wrap_async_context_manager(connected(settings["NATS_URL"])) as bus:
        announced = Announced(bus, name, topology)
        with (
            portal.wrap_async_context_manager(announced.serve()),
            node(case, settings, "allocator", healthy=None) as (kubelet, agent),
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
            return summary(case, milliseconds[WARM:]) | {"longest_block_ms": block, "rss_mb": agent.rss_mb}


def told(healthy: int) -> Callable[[Came], bool]:
    """A test for a list with this number of healthy devices."""
    return lambda came: came.healthy == healthy


def start(settings: Settings, starts: int) -> Row:
    """The case `start`, with the memory of the last agent in MiB."""
    milliseconds = []
    for number in range(starts):
        with node(f"start-{number}", settings | {"MACHINE": MACHINE}, healthy=None) as (kubelet, agent):
            came = kubelet.until(told(len(GPUS)), "the GPUs were not listed")
            milliseconds.append((came.at - agent.started) * 1000)
            rss_mb = agent.rss_mb
    return summary("start", milliseconds) | {"rss_mb": rss_mb}


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
        return summary("reregister", milliseconds) | {"rss_mb": agent.rss_mb}


@contextmanager
def node(
    name: str,
    settings: Settings,
    command: str = "node",
    *,
    healthy: int | None = len(GPUS),
    environment: Settings | None = None,
) -> Iterator[tuple[Kubelet, Agent]]:
    """An agent and its kubelet. `healthy`: waits until so many GPUs are listed; None: not at all."""
    with scratch() as folder:
        kubelet = Kubelet(folder)
        own = {"NODE": name, "STATE_DIR": str(folder / "state"), "KUBELET_DIR": str(kubelet.plugins_dir)}
        kubelet.start()
        try:
            with running(command, {**settings, **own}, environment, observed=command == "allocator") as agent:
                if healthy is not None:
                    kubelet.until(told(healthy), "the GPUs were not listed")
                yield kubelet, agent
        finally:
            kubelet.stop()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on a disk: what is in /var/tmp outlives a reboot, so it is never kept in memory alone."""
    with tempfile.TemporaryDirectory(prefix="topoalign-", dir="/var/tmp") as folder:
        yield Path(folder)


def shared(gpus: int, shares: int) -> Topology:
    """A machine with so many GPUs, shared so many ways, under ids as long as NVIDIA's."""
    known = load_machine(MACHINE).topology.gpus[:gpus]
    named = tuple(
        msgspec.structs.replace(gpu, id=DeviceID(f"GPU-{gpu.index:08x}-0000-0000-0000-000000000000")) for gpu in known
    )
    offer = Offer(resource=GPU, devices=tuple(gpu.id for gpu in named), replicas=shares)
    return msgspec.structs.replace(load_machine(MACHINE).topology, gpus=named, nics=(), links=(), offers=(offer,))
