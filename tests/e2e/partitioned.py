"""
A node, its hub and a subscriber in a network namespace of their own, between which packets are dropped for a while.

A program: `unshare -Urn python partitioned.py FOLDER DIRECTION SECONDS PING_SECONDS`. DIRECTION is `to-hub`, `from-hub` or
`both`; packets are dropped without a word until the client has noticed and SECONDS have passed. It prints one JSON object of
what happened. Nothing outside the namespace is touched.
"""

import json
import subprocess
import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bus_support import disconnected, killable  # the folder above is on the path only now
from outage_support import Listener, come_and_go, emptied, opened, telling

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Stream
from topoalign.runtime.nats_bus import connect_bus, nats_connection

RULES = {"to-hub": ["dport"], "from-hub": ["sport"], "both": ["dport", "sport"]}


def run(*words: str) -> None:
    subprocess.run(words, check=True)


async def main(folder: Path, direction: str, seconds: float, ping_seconds: float) -> None:
    nats_connection.PING_SECONDS = ping_seconds  # type: ignore[assignment]  # the library takes fractions, too
    run("ip", "link", "set", "lo", "up")
    run("nft", "add", "table", "inet", "partition")
    run("nft", "add", "chain", "inet", "partition", "in", "{ type filter hook input priority 0 ; }")
    happened: dict[str, object] = {}
    async with killable(folder / "nats") as server, connect_bus(server.url) as bus:
        listener = Listener(bus)
        with opened(folder / "state") as ledger:
            async with telling(ledger, bus), anyio.create_task_group() as tasks:
                tasks.start_soon(listener.listen)
                come_and_go(ledger, 20)
                await listener.agrees_with(ledger)

                for port in RULES[direction]:
                    run("nft", "add", "rule", "inet", "partition", "in", "tcp", port, str(server.port), "drop")
                come_and_go(ledger, 20)
                with anyio.fail_after(60):
                    await disconnected(bus)
                happened["seen"] = bus.reason_not_connected
                come_and_go(ledger, 20)
                try:
                    await bus.last_position(Stream.ALLOCATIONS)
                except BusUnavailable as error:
                    happened["asked"] = error.finding
                await anyio.sleep(seconds)  # the fault itself, which lasts; in a quick run it is over once it was seen
                happened["told"] = len(listener.told)
                happened["waiting"] = len(ledger.pending)

                run("nft", "flush", "chain", "inet", "partition", "in")
                await emptied(ledger)
                await listener.agrees_with(ledger)
                tasks.cancel_scope.cancel()
            happened["expected"] = [[ledger.state.epoch, number] for number in range(1, ledger.state.seq + 1)]
            happened["numbers"] = listener.numbers
            happened["gaps"] = listener.client.counts.gaps
    print(json.dumps(happened))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), backend="asyncio")
