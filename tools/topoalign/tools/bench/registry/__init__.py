"""
The registry of a large cluster: 5,000 nodes with 8 allocations each.

The streams of a nats-server hold 40 facts of each node's allocator (grants, owners, releases, snapshots), and the topology,
health and usage of each: 5,000 DGX A100 whose GPUs have uuids of their own. `topoalign registry` runs in a process of its
own; another process answers in place of all allocators, and stands by what the streams hold.

- `start-5000`: from the start of the process until /readyz is 200.
- `asked-5000`: from there until every allocator was asked and no node is shown as stale.
- `page`: GET /v1/allocations?limit=500, each time another page of the list.
- `walk`: all pages of the list, one after another.
- `metrics`: GET /metrics.
- `spoken-again`: each node publishes its readings and a snapshot once more, until the last of them is shown.

- `start-1000230-events`: as `start-5000`, of 4,330 nodes with 228 facts each: containers have come and gone five times. The
  stream of allocations keeps the newest 512 MiB of them.

The questions to the allocators go on during the four from `page` on. Of the registry, after each case: `stale` is the number
of nodes that are shown as stale, `rss_mb` its memory in units of 2^20 bytes, and `longest_block_ms` the longest time that
one callback blocked its event loop during the case (in a start since its HTTP pages answer).
"""

from collections.abc import Iterator

from topoalign.tools.bench.registry.measure import long, measure


def cases(nodes: int = 5000, calls: int = 200, changed: tuple[int, int] = (4330, 5)) -> Iterator[dict[str, object]]:
    """
    `calls`: of the case `page`; `walk` and `metrics` have a tenth of them, and at least two. `changed`: nodes of the last
    case, and how often their containers have come. Raises NotStored, NotAnswered, AllocatorsEnded.
    """
    yield from measure(nodes, calls)
    yield long(*changed)
