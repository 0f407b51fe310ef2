"""
Pods from their creation until they run, on one machine: the whole cycle of a cluster with a scheduler and one registry.

    scheduler (stand-in) -> registry, a process -> API server (stand-in) -> kubelets (stand-ins)
                                   |                                               |
                                   +------ NATS ------ allocators of all nodes ----+

The nodes are those of `topoalign bench filter`, half full and no two alike; a process of its own answers for all of their
allocators and kubelets by the product's decisions (`nodes`). The scheduler filters and prioritizes one pod at a time with
all nodes that have room, and binds beside that. Pods ask for 1 GPU, 8 CPUs and 32 GiB or for twice as much, in turn.

- `1000x500`: 1,000 nodes and 500 pods that are created at once. `pods_per_second` is over the time until the last of them
  runs; `refused` counts what nodes refused and `errors` what calls ended with as an error.
- `1000x500-filter`, `-prioritize`, `-bind`: how long these calls took, as the scheduler sees it.
- `5000x1000`: the same with more.
- `bind`: one bind after another, each to another of 1,000 nodes and of a pod that was just filtered; nothing else happens.
- `waiting-500`: so many pods wait that no node takes, and containers on other nodes end 20 times a second; a call is one to
  filter. `cpu_percent` is the share of one core that the registry used for everything, `longest_ms` the longest call.

- `real-like-burst`, `real-like-stream`: 14 machines of several kinds and policies with 100 GPUs, whose kubelets and agents
  lag as those in front of a real scheduler did (`real_like`), with and without the extender in turn. A burst is 90 pods with
  one GPU that fit all; a stream is 120 pods of 1 to 8 GPUs that end after 1 to 3 s. The times are from the creation of a pod
  until it is bound; `part_of_rate` compares the pods a second that ran with those of the scheduler alone.

`longest_block_ms` is the longest time that one callback blocked the registry's event loop meanwhile, `rss_mb` its memory
then in units of 2^20 bytes.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from anyio.from_thread import start_blocking_portal

from topoalign.tools.bench.device_plugin.node import scratch
from topoalign.tools.bench.filter.cluster import BusyNode
from topoalign.tools.bench.registry.measure import streams
from topoalign.tools.bench.schedule.binding import bind
from topoalign.tools.bench.schedule.control_plane import ControlPlane, control_plane
from topoalign.tools.bench.schedule.cycle import schedule
from topoalign.tools.bench.schedule.nodes import FLEETS, MIXED, Nodes, nodes
from topoalign.tools.bench.schedule.real_like import REAL_LIKE, Load, Outcome, compare, place
from topoalign.tools.bench.schedule.waiting import wait


def cases(
    sizes: tuple[tuple[int, int], ...] = ((1000, 500), (5000, 1000)),
    waiting: int = 500,
    seconds: float = 10.0,
    real_like: Mapping[str, Sequence[Load]] = REAL_LIKE,
    rounds: int = 3,
) -> Iterator[dict[str, object]]:
    """
    `sizes`: nodes and pods; the first number of nodes is that of the other cases. `waiting`: pods that wait for so many
    `seconds`. `real_like`: loads by name, each placed in so many `rounds` with the extender and without it.

    Raises NotStored, NotAnswered, AllocatorsEnded.
    """
    for size, pods in sizes:
        with cluster(size) as (call, everywhere, _):
            yield from call(partial(schedule, everywhere=everywhere, pods=pods))
    with cluster(sizes[0][0]) as (call, everywhere, busy):
        yield from call(partial(bind, nodes=busy, everywhere=everywhere, calls=max(2, sizes[0][1] // 2)))
    with cluster(sizes[0][0]) as (call, everywhere, busy):
        yield from call(partial(wait, nodes=busy, everywhere=everywhere, pods=waiting, seconds=seconds))
    for name, load in real_like.items():
        outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
        for extended in (True, False) * rounds:
            with cluster(len(MIXED), "mixed") as (call, everywhere, _):
                outcomes[extended].append(call(partial(place, everywhere=everywhere, load=load, extended=extended)))
        yield compare(f"real-like-{name}", outcomes[True], outcomes[False])


T = TypeVar("T")


class Call(Protocol):
    """Runs a case with the API server and the registry of a cluster."""

    def __call__(self, case: Callable[[ControlPlane], Awaitable[T]]) -> T: ...


@contextmanager
def cluster(size: int, fleet: str = "half-full") -> Iterator[tuple[Call, Nodes, Sequence[BusyNode]]]:
    """What runs a case, the process of the nodes, and the nodes as they are at first, while the context is open."""
    busy = [FLEETS[fleet].create(number) for number in range(size)]
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        streams(portal, folder / "nats") as url,
        nodes(url, size, fleet) as everywhere,
        portal.wrap_async_context_manager(control_plane(url, folder, busy)) as plane,
    ):

        def call(case: Callable[[ControlPlane], Awaitable[T]]) -> T:
            return portal.call(case, plane)

        yield call, everywhere, busy
