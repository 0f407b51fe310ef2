"""
Runs node agents that die by SIGKILL at a chosen step.

A program of its own: it imports everything once and then forks an agent for each line it reads, so that a start costs
milliseconds. A line is `{"environment": {...}, "arm": PATH, "step": N, "log": PATH, "compact_after": N}`; the
answer is the agent's pid.
Once the file `arm` exists, every write, sync, rename and send of the agent is a step, and before its Nth the agent
kills itself. What a power button would do to a process, at every moment that the outside world can see.
"""

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import anyio

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.runtime.installed import find
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.runner import run_services

SERVICES = ("discovery", "hinting", "allocator")
STEPS: list[tuple[Any, str]] = [
    (os, "write"),
    (os, "pwrite"),
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (os, "link"),
    (os, "ftruncate"),
    (socket.socket, "send"),
    (socket.socket, "sendall"),
    (socket.socket, "sendmsg"),
]


class Fuse:
    """Counts steps once armed."""

    def __init__(self, arm: str, step: int) -> None:
        self.arm, self.left = arm, step

    def burn(self) -> None:
        if os.path.exists(self.arm):
            self.left -= 1
            if self.left == 0:
                open(f"{self.arm}.died", "x").close()  # a process that dies can still be seen for a moment
                os.kill(os.getpid(), signal.SIGKILL)

    def guard(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.burn()
            return step(*args, **kwargs)

        return guarded


def agent(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    assert Ledger.__init__.__kwdefaults__ is not None
    Ledger.__init__.__kwdefaults__["compact_after"] = order["compact_after"]
    fuse = Fuse(order["arm"], order["step"])
    for owner, name in STEPS:
        setattr(owner, name, fuse.guard(getattr(owner, name)))
    configure_logging("console", "info")
    anyio.run(run_services, SERVICES, {**os.environ, **order["environment"]})


def main() -> None:
    find(SERVICES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                agent(json.loads(line))
            except BaseException:  # whatever ends a fork ends here, with its reason in the log
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        print(child, flush=True)


if __name__ == "__main__":
    main()
