"""
Runs node agents that die by SIGKILL at a chosen step.

A program of its own: it imports everything once and then forks an agent for each line it reads, so that a start costs
milliseconds. A line is `{"environment": {...}, "arm": PATH, "step": N, "call": NAME, "log": PATH, "compact_after": N}`; its
answer is the agent's pid.
Once the file `arm` exists, every write, sync, rename and send of the agent is a step, and so is every call of NVML that
makes or destroys a MIG instance; before its Nth the agent kills itself. What a power button would do to a process, at every
moment that the outside world can see. With a `call` only the steps of that name count:

    write journal               a write to the file of this name; so are pwrite, fsync, ftruncate, replace, rename and link
    fsync journal done          the moment after it
    allocate, allocate done     a call of the kubelet has arrived, or is about to be answered; so is pre_start_container
    nvmlGpuInstanceDestroy      a call of NVML, also with `done`

The environment may name what a real node has and a test does not: NVML_STANDIN_LIBRARY, which is loaded as NVML, and
HOST_PROC and HOST_CGROUPS in place of /proc and /sys/fs/cgroup where containers are told of their devices.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pynvml

from topoalign.allocator import main as allocator_main
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig import instances
from topoalign.runtime.installed import load_services
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
    (pynvml, "nvmlDeviceCreateGpuInstanceWithPlacement"),
    (pynvml, "nvmlGpuInstanceCreateComputeInstance"),
    (pynvml, "nvmlComputeInstanceDestroy"),
    (pynvml, "nvmlGpuInstanceDestroy"),
]
CALLS = ("allocate", "pre_start_container")
"""Of the kubelet, which count by their names alone: what they do counts otherwise."""
COLLECT_SECONDS, UNBOUND_SECONDS = 0.2, 2.0
"""With MIG instances: not as long as on a node are they looked after, and is what nobody has shown kept."""


class Fuse:
    """Counts steps once armed: all, or those of one name."""

    def __init__(self, arm: str, step: int, call: str) -> None:
        self.arm, self.left, self.call = arm, step, call

    def burn(self, call: str) -> None:
        if call == self.call and os.path.exists(self.arm):
            self.left -= 1
            if self.left == 0:
                open(f"{self.arm}.died", "x").close()  # a process that dies can still be seen for a moment
                os.kill(os.getpid(), signal.SIGKILL)

    def guard(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.burn("")
            if not self.call:
                return step(*args, **kwargs)
            call = name_of(name, args)
            self.burn(call)
            done = step(*args, **kwargs)
            self.burn(f"{call} done")
            return done

        return guarded

    def guard_call(self, name: str, answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def guarded(*args: Any) -> Any:
            self.burn(name)
            answered = await answer(*args)
            self.burn(f"{name} done")
            return answered

        return guarded


def name_of(step: str, args: tuple[Any, ...]) -> str:
    """A step with the name of the file that it is about."""
    match args:
        case (int(file), *_):
            return f"{step} {os.path.basename(os.readlink(f'/proc/self/fd/{file}'))}"
        case (_, str() | os.PathLike() as target, *_):
            return f"{step} {os.path.basename(target)}"
        case _:
            return step


def play_host(environment: dict[str, str]) -> None:
    """What is not as on a real node."""
    if "NVML_STANDIN_LIBRARY" in environment:
        ctypes.CDLL(environment["NVML_STANDIN_LIBRARY"])  # the loader finds it under NVML's name from now on
        allocator_main.UNBOUND_SECONDS = UNBOUND_SECONDS
        instances.COLLECT_SECONDS = COLLECT_SECONDS
    if "HOST_PROC" in environment:
        assert Containers.__init__.__defaults__ is not None
        host = Path(environment["HOST_PROC"]), Path(environment["HOST_CGROUPS"])
        Containers.__init__.__defaults__ = (*Containers.__init__.__defaults__[:2], *host)


def agent(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    assert Ledger.__init__.__kwdefaults__ is not None
    Ledger.__init__.__kwdefaults__["compact_after"] = order["compact_after"]
    play_host(order["environment"])
    fuse = Fuse(order["arm"], order["step"], order["call"])
    for owner, name in STEPS:
        setattr(owner, name, fuse.guard(name, getattr(owner, name)))
    for name in CALLS:
        setattr(DevicePlugin, name, fuse.guard_call(name, getattr(DevicePlugin, name)))
    configure_logging("console", "info")
    anyio.run(run_services, load_services(SERVICES), os.environ)


def main() -> None:
    load_services(SERVICES)
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
