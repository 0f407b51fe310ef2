"""
What a kube-scheduler and a kubelet wait for while other clients attack the HTTP ports of a registry.

The registry has the 1,000 half-full nodes of `bench filter`. The scheduler filters one pod after another over a kept
connection; no two ask for the same. A probe asks for /livez over a new connection ten times a second. Attackers run in
processes of their own (see `attackers`) and hold 500 connections.

- `quiet`: nobody attacks.
- `slow-heads`, `slow-bodies`: a byte each half second, to the port of the scheduler.
- `unread-answers`: 200 pipelined requests for the metrics on each connection, of which no answer is read.
- `large-pods`: each connection filters one pod of 100 containers after another.
- `all`: 125 connections of each.
- `all-one-address`: the same, from the address of the scheduler; the others come from an address of their own.

`cpu_p50_ms`, `cpu_p99_ms`: the CPU time that the registry used from the question to the answer, for all requests together.
That is what a filter takes where the registry has a core of its own; here attackers, scheduler and registry share the
machine, and a registry that is attacked waits for a core. `failed`: filters that were not answered within 5 s;
`livez_worst_ms`: the slowest answer to the probe.
"""

from collections.abc import Iterator

from topoalign.tools.bench.hostile.measure import Row, attacked


def cases(size: int = 1000, connections: int = 500, seconds: float = 15.0) -> Iterator[Row]:
    """Raises NotStored, NotAnswered, AllocatorsEnded. `seconds`: how long each case is measured."""
    yield from attacked(size, connections, seconds)
