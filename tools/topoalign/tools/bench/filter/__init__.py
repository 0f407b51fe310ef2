"""
filter and prioritize as kube-scheduler calls them, one pod after another, over HTTP on one kept connection.

Each case has the streams of a nats-server with the topology, the health, the usage and the allocations of all nodes (see
`cluster`: no two nodes are alike), a process that answers for their allocators, and `topoalign registry` in a process of its
own. A duration is that of filter with all nodes and prioritize with those that passed, together.

- `1000`, `5000`, `10000`: nodes that are half full; each call is for another pod that asks for the same, and before each
  call a container of another node ends.
- `5000-new`: the same, and each pod asks for what none has asked for.
- `1000-cold`: the first call after a start of the registry.
- `1000-full`: no node has a free GPU, and nothing changes.
- `1000-shares`: nodes with 3,360 shares of GPUs, half of them held; each call is for another pod with 20, and before each
  call a container of another node ends.
- `bind`: one pod after another is filtered and then bound to a node with a real agent, which confirms it; the time is that
  of the bind (see `binding`).

`passed` is the number of nodes that filter let pass at last (not of `bind`), `longest_block_ms` the longest time that one
callback blocked the registry's event loop during the case, `rss_mb` its memory after it in units of 2^20 bytes.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from topoalign.core.model.errors import Unavailable
from topoalign.tools.bench.filter.binding import bind
from topoalign.tools.bench.filter.measure import full, half_full, shared


class NoKubernetesClient(Unavailable):
    """The library by which the registry binds pods is not installed."""

    code = "NoKubernetesClient"

    def __init__(self) -> None:
        super().__init__(
            "the registry's client of Kubernetes, lightkube, is not installed", "pip install 'topoalign[kubernetes]'"
        )


def cases(small: int = 1000, sizes: tuple[int, ...] = (5000, 10000), calls: int = 200) -> Iterator[dict[str, object]]:
    """
    `calls`: of each case; new requests are a quarter of them.

    Raises NoKubernetesClient, NotStored, NotAnswered, AllocatorsEnded.
    """
    if find_spec("lightkube") is None:
        raise NoKubernetesClient
    yield from half_full(small, calls, starts=max(2, calls // 40))
    yield full(small, calls)
    yield shared(small, calls)
    for place, size in enumerate(sizes):
        yield from half_full(size, calls, new=not place)
    yield bind(calls)
