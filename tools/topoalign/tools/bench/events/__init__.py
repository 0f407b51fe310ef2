"""
The time from the answer to an Allocate until a subscriber has the event of it, over a real nats-server.

The agent is `topoalign node` in a process of its own, with its journal on a disk; the subscriber is `topoalign.client` in
another; the kubelet of `device_plugin` is in this one. Each Allocate is for another share of a GPU, and nothing is released.

- `paced`: 50 Allocates a second.
- `burst`: 150 Allocates a second. An Allocate that is due while the one before is under way follows that at once.

`per_second` says how many Allocates were answered in a second, `rss_mb` the memory of the agent afterwards.
"""

from collections.abc import Iterator

from topoalign.tools.bench.device_plugin import NoClient

RATES = {"paced": 50, "burst": 150}
"""Allocates a second."""


def cases(seconds: float = 30.0) -> Iterator[dict[str, object]]:
    """Both cases, for so many seconds each. Raises NoClient."""
    try:
        from topoalign.tools.bench.events.measure import measure  # here, because grpcio need not be there
    except ModuleNotFoundError as error:
        if error.name != "grpc":
            raise
        raise NoClient from error
    yield from measure(RATES, seconds)
