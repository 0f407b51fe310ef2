"""
The time that a kubelet waits for the node agent: over its sockets, to the last byte, answers not decoded.

The agent is `topoalign node` in a process of its own on a described machine, with a NATS, its state on a disk, and the
kubelet of `kubelet.py` in this process.

- `bare`: GetDevicePluginOptions, which does nothing: the time of gRPC itself.
- `preferred-4of8`: GetPreferredAllocation for 4 of 8 free GPUs.
- `preferred-4of8-slow-nvml`: the same while each NVML query takes 0.1 ms and the agent reads the hardware every second.
- `preferred-1000-shares`, `preferred-8192-shares`: GetPreferredAllocation for 1 of so many shares, of which up to a tenth,
  others each time, are not available; they are named in no order.
- `allocate-4`: Allocate of 4 GPUs, until the record is on the disk. Before each call the previous devices are released,
  and the kubelet asks for the preferred ones.
- `pod-start`: all calls that a kubelet waits for before a container with 2 of 8 GPUs starts, preference included.
- `pod-start-8`: eight pods with a GPU each at once, until the last is answered.
- `allocate-4-after-1000`: Allocate of 4 shares on a node that has given out a share a thousand times, and in turn
  with it (`after_none_p50_ms`) on one that has not.
- `allocate-64-callers`: 64 callers on one connection, each of which asks for the next share when it is answered:
  `per_second`, beside `one_caller_per_second`; and for the `grants` how many `fsyncs` of the journal the agent counts.
- `list-1000`, `list-17500`: from a published change of a GPU's health to the end of the list of all shares at the kubelet,
  as NVIDIA's configuration file asks for them. Here the agent is `topoalign allocator` and this process publishes the health
  over NATS; `longest_block_ms` is the longest time that one callback blocked its event loop, the first list included.
- `preferred-share`: GetPreferredAllocation for 20 hundredths of a GPU's computing time among half of what eight GPUs
  in units have (100, and 320 blocks of memory, each); and where 16 containers have the other half (`beside_16_p50_ms`), whom
  the agent then asks PodResources for.
- `allocate-share`: there each of the two Allocate calls for 20 hundredths and 60 blocks of one GPU, while nothing is held.
- `preferred-slot`: GetPreferredAllocation for a slot of eight GPUs in ten slots each, while one of each is reserved with 20
  cores and 15 GiB; and where 16 containers have equal parts (`beside_16_p50_ms`), whom it then asks PodResources for.
- `allocate-slot`: there the Allocate call for a reserved slot, while nothing is held.
- `list-10624`: as `list-1000`, to the end of both lists of 16 GPUs in units of computing time and memory.
- `start`: from the start of the process to a list with every GPU healthy; `cpu_s` is the CPU time of the agent until then.
  Like all agents here it runs from byte code, as an installed package does.
- `stop`: from SIGTERM to the end of the process, which serves nobody.
- `reregister`: from the kubelet's new socket to the agent's registration.
- `idle`: the CPU time that the agent uses while nobody asks anything, scaled to a minute; NATS is connected, and the kubelet
  listens to both plugins and answers PodResources.

`rss_mb` is the memory of the agent after the calls, in units of 2^20 bytes.
"""

from collections.abc import Iterator

from topoalign.core.model.errors import Unavailable


class NoClient(Unavailable):
    """The client that measures is not installed."""

    code = "NoClient"

    def __init__(self) -> None:
        super().__init__(
            "the client of this benchmark, grpcio, is not installed", "pip install 'topoalign-tools[bench]'"
        )


def cases(
    calls: int = 1000, changes: int = 50, starts: int = 10, idle_seconds: float = 20.0
) -> Iterator[dict[str, object]]:
    """`changes`: of a device's health; `starts`: of the agent, and of the kubelet. Raises NoClient."""
    try:
        from topoalign.tools.bench.device_plugin.measure import measure  # here, because grpcio need not be there
    except ModuleNotFoundError as error:
        if error.name != "grpc":
            raise
        raise NoClient from error
    yield from measure(calls, changes, starts, idle_seconds)
