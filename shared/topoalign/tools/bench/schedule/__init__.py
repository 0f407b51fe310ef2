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

`longest_block_ms` is the longest time that one callback blocked the registry's event loop meanwhile, `rss_mb` its memory
then in units of 2^20 bytes.
"""

from collections.abc import Iterator

from anyio.from_thread import start_blocking_portal

from topoalign.tools.bench.device_plugin.node import scratch
from topoalign.tools.bench.registry.measure import streams
from topoalign.tools.bench.schedule.cycle import schedule
from topoalign.tools.bench.schedule.nodes import nodes


def cases(sizes: tuple[tuple[int, int], ...] = ((1000, 500), (5000, 1000))) -> Iterator[dict[str, object]]:
    """`sizes`: nodes and pods. Raises NotStored, NotAnswered, AllocatorsEnded."""
    for size, pods in sizes:
        with (
            start_blocking_portal() as portal,
            scratch() as folder,
            streams(portal, folder / "nats") as url,
            nodes(url, size) as everywhere,
        ):
            yield from portal.call(schedule, url, folder, everywhere, size, pods)
