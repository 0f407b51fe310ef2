"""The cases of GPUs in units: a container asks for computing time and for memory of one GPU, in two calls."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.tools.bench.device_plugin.kubelet import (
    NOTHING,
    Kubelet,
    allocate_request,
    preferred_allocation_request,
)
from topoalign.tools.bench.device_plugin.machine import CORES, MEMORY, node_in_units
from topoalign.tools.bench.device_plugin.node import WARM, Row, Settings
from topoalign.tools.bench.device_plugin.pods import AT_ONCE
from topoalign.tools.measuring import summarize_times

BLOCKS = 320
"""Of each GPU: 80 GiB."""
SHARE = {CORES: 20, MEMORY: 60}
HELD = {CORES: 25, MEMORY: 80}
"""Of each GPU, twice: half of it."""

Parts = dict[ResourceName, Sequence[DeviceID]]


def measure(settings: Settings, calls: int) -> Iterator[Row]:
    """Both cases, with this many calls of each kind."""
    with node_in_units("units", settings | AT_ONCE, BLOCKS) as (kubelet, agent, topology):
        free: dict[ResourceName, list[DeviceID]] = {CORES: [], MEMORY: []}
        held: list[Parts] = []
        for gpu in topology.gpus:
            cores = handed_out(gpu.id, 100, "cores")
            memory = handed_out(gpu.id, BLOCKS, "memory")
            units = {CORES: cores, MEMORY: memory}
            held += [{name: [*islice(some, HELD[name])] for name, some in units.items()} for _ in range(2)]
            for name, some in units.items():
                free[name] += some
        milliseconds = preferred(kubelet, free[CORES], WARM + calls)
        allocate = allocated(kubelet, free, WARM + calls)
        for parts in held:
            for name, devices in parts.items():
                kubelet.method("Allocate", name)(allocate_request(devices))
        bind(kubelet, held)
        beside = summarize_times("", preferred(kubelet, free[CORES], WARM + calls)[WARM:])
        row = summarize_times("preferred-share", milliseconds[WARM:])
        yield row | {f"beside_{len(held)}_p50_ms": beside["p50_ms"], "rss_mb": agent.rss_mb}
        yield allocate | {"rss_mb": agent.rss_mb}


def preferred(kubelet: Kubelet, free: Sequence[DeviceID], calls: int) -> list[float]:
    """The milliseconds of each GetPreferredAllocation for computing time, of half of all that there is."""
    prefer = kubelet.method("GetPreferredAllocation", CORES)
    milliseconds = []
    for number in range(calls):
        request = preferred_allocation_request([*free[number % 7 :]], SHARE[CORES])
        began = time.perf_counter()
        prefer(request)
        milliseconds.append((time.perf_counter() - began) * 1000)
    return milliseconds


def allocated(kubelet: Kubelet, free: dict[ResourceName, list[DeviceID]], calls: int) -> Row:
    """The case `allocate-share`: each of the two calls for a share. It is released before the next one."""
    milliseconds = []
    for _ in range(calls):
        share: Parts = {}
        for name, amount in SHARE.items():
            share[name] = free[name][:amount]
            give = kubelet.method("Allocate", name)
            request = allocate_request(share[name])
            began = time.perf_counter()
            give(request)
            milliseconds.append((time.perf_counter() - began) * 1000)
        bind(kubelet, [share])
        bind(kubelet, [])
    return summarize_times("allocate-share", milliseconds[2 * WARM :])


def bind(kubelet: Kubelet, held: Sequence[Parts]) -> None:
    """From now on these containers run, and the agent knows."""
    kubelet.show_parts(*held)
    look = kubelet.method("PreStartContainer", CORES)
    for _ in range(3):  # nothing is gone that was missing once, and a poll for an owner may come between
        look(NOTHING)
