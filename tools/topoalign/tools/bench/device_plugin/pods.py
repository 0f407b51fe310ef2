"""
The cases in which pods are given GPUs: as a kubelet does it, call by call.

Every case shows the containers in the kubelet's record while they run, and later no more; PreStartContainer makes the agent
look at the record where it has no owner, as for no device. The kubelet asks for it only where the plugin's options say so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import DeviceID
from topoalign.tools.bench.device_plugin.kubelet import (
    NOTHING,
    Kubelet,
    allocate_request,
    pre_start_request,
    preferred_allocation_request,
)
from topoalign.tools.bench.device_plugin.node import GPUS, MACHINE, WARM, Row, Settings, node
from topoalign.tools.measuring import summarize_times

AT_ONCE = {"MACHINE": MACHINE, "GONE_SECONDS": "0", "SETTLE_SECONDS": "0", "RECONCILE_SECONDS": "3600"}
"""What is gone is released when it is looked for, and it is looked for in PreStartContainer alone."""
PRE_START_REQUIRED = b"\x08\x01"
"""The field `pre_start_required` of DevicePluginOptions, where it is true."""


MOST_DISTURBED = 20
"""Calls during which the kubelet may be asked for an owner besides, as on a slow disk; they are made again."""


class NotReleased(Unavailable):
    """What is gone was not released."""

    code = "NotReleased"


Release = Callable[[Sequence[Sequence[DeviceID]]], None]
"""Starts containers with these GPUs, and then ends them."""


def measure(settings: Settings, calls: int) -> Iterator[Row]:
    """All cases, on one node, with this many calls each."""
    with node("pods", settings | AT_ONCE) as (kubelet, agent):
        release = releasing(kubelet)
        for case in (allocate, pod_start, pod_start_8):
            yield case(kubelet, release, WARM + calls) | {"rss_mb": agent.rss_mb}


def allocate(kubelet: Kubelet, release: Release, calls: int) -> Row:
    """The case `allocate-4`: only the giving out counts, of GPUs that the kubelet has asked a preference among."""
    milliseconds: list[float] = []
    disturbed = 0
    prefer, give = map(kubelet.method, ("GetPreferredAllocation", "Allocate"))
    given = GPUS[:4]
    while len(milliseconds) < calls:
        prefer(preferred_allocation_request(GPUS, len(given)))
        looks = kubelet.looks
        began = time.perf_counter()
        give(allocate_request(given))
        took = (time.perf_counter() - began) * 1000
        if kubelet.looks == looks:
            milliseconds.append(took)
        elif (disturbed := disturbed + 1) > MOST_DISTURBED:
            raise NotReleased(
                "the GPUs of the call before are held still", "see how the allocator releases what is gone"
            )
        release([given])
    return summarize_times("allocate-4", milliseconds[WARM:])


def pod_start(kubelet: Kubelet, release: Release, calls: int) -> Row:
    """The case `pod-start`: every call that a kubelet waits for before a container with 2 of 8 GPUs starts."""
    milliseconds = []
    prefer = kubelet.method("GetPreferredAllocation")
    given = GPUS[:2]
    starting = container_start(kubelet)
    for _ in range(calls):
        began = time.perf_counter()
        prefer(preferred_allocation_request(GPUS, len(given)))
        starting(given, lambda: kubelet.show(given))
        milliseconds.append((time.perf_counter() - began) * 1000)
        release([given])
    return summarize_times("pod-start", milliseconds[WARM:])


def pod_start_8(kubelet: Kubelet, release: Release, calls: int) -> Row:
    """The case `pod-start-8`: eight pods with a GPU each at once, until the last is answered."""
    milliseconds = []
    each = [(gpu,) for gpu in GPUS]
    starting = container_start(kubelet)
    with ThreadPoolExecutor(len(each)) as callers:
        for _ in range(calls):
            began = time.perf_counter()
            for done in [callers.submit(starting, gpus, lambda: kubelet.show(*each)) for gpus in each]:
                done.result()
            milliseconds.append((time.perf_counter() - began) * 1000)
            release(each)
    return summarize_times("pod-start-8", milliseconds[WARM:])


def container_start(kubelet: Kubelet) -> Callable[[Sequence[DeviceID], Callable[[], None]], None]:
    """Allocate, and PreStartContainer where the plugin asks for it; in between the kubelet shows the container."""
    give, look = map(kubelet.method, ("Allocate", "PreStartContainer"))
    waits = PRE_START_REQUIRED in kubelet.method("GetDevicePluginOptions")(NOTHING)

    def starting(gpus: Sequence[DeviceID], show: Callable[[], None]) -> None:
        give(allocate_request(gpus))
        show()
        if waits:
            look(pre_start_request(gpus))

    return starting


def releasing(kubelet: Kubelet) -> Release:
    """What starts containers and ends them at this kubelet."""
    look = kubelet.method("PreStartContainer")

    def release(containers: Sequence[Sequence[DeviceID]]) -> None:
        kubelet.show(*containers)
        look(NOTHING)
        kubelet.show_nothing()
        for _ in range(3):  # nothing is gone that was missing once, and a poll for an owner may come between
            look(NOTHING)

    return release
