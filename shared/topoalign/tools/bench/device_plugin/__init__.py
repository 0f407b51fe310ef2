"""
How long a kubelet waits for the node agent: over its sockets, to the last byte, answers not decoded.

The agent is `topoalign node` in a process of its own on a described machine, with a NATS, its state on a disk, and the
kubelet of `kubelet.py` in this process.

- `bare`: GetDevicePluginOptions, which does nothing: what gRPC itself takes here.
- `preferred-4of8`: which 4 of 8 free GPUs go together.
- `preferred-4of8-slow-nvml`: the same where each NVML query takes 0.1 ms and the agent reads the hardware every second.
- `allocate-4`: 4 GPUs are given out, and that is on the disk. Before each, what was given out the time before is released,
  and the kubelet asks what is preferred.
- `list-1000`, `list-17500`: from when a GPU is said to have fallen ill (or to be well again) to the end of the list of all
  shares that the kubelet gets. Here the agent is `topoalign allocator` and this process says so over NATS;
  `longest_block_ms` is the longest that one callback kept its event loop meanwhile, the first list included.
- `start`: from the start of the process to a list with every GPU healthy.
- `reregister`: from when the kubelet is back with a new socket to the agent's registration.

`rss_mb` is the memory of the agent after the calls, in units of 2^20 bytes.
"""

from collections.abc import Iterator

from topoalign.core.model.errors import Unavailable


class NoClient(Unavailable):
    """The client that measures is not installed."""

    code = "NoClient"

    def __init__(self) -> None:
        super().__init__("the client of this benchmark, grpcio, is not installed", "pip install 'topoalign[bench]'")


def cases(calls: int = 1000, changes: int = 50, starts: int = 10) -> Iterator[dict[str, object]]:
    """`changes`: of a device's health; `starts`: of the agent, and of the kubelet. Raises NoClient."""
    try:
        from topoalign.tools.bench.device_plugin.measure import measure  # here, because grpcio need not be there
    except ModuleNotFoundError as error:
        if error.name != "grpc":
            raise
        raise NoClient from error
    yield from measure(calls, changes, starts)
