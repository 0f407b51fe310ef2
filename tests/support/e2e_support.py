"""Runs topoalign as people do: all services in one process on a memory bus, or one process each on NATS."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process
from decision_support import container
from decision_support import pod as pod_of

from topoalign.core import wire
from topoalign.core.model.decisions import Decision
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AllocateRequest, PodRequest, ReleaseRequest
from topoalign.core.ports import Bus
from topoalign.runtime.installed import load_services
from topoalign.runtime.runner import run_services

SERVICES = ("discovery", "hinting", "allocator", "registry")


def pod(name: str, *, gpus: int = 0, cpus: int = 0, nics: int = 0, memory: int = 0) -> PodRequest:
    """A pod of one container; `memory` in GiB."""
    return pod_of(container(gpus=gpus, cpus=cpus, gib=memory, nics=nics), name=name)


def environment(node: NodeName, nats: str, folder: Path) -> dict[str, str]:
    """The settings of a node agent that plays a dgx-a100 for the kubelet in `folder`."""
    return {
        "TOPOALIGN_NODE": node,
        "TOPOALIGN_NATS_URL": nats,
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(folder / "state"),
        "TOPOALIGN_KUBELET_DIR": str(folder / "device-plugins"),
        "TOPOALIGN_RECONCILE_SECONDS": "0.05",
        "TOPOALIGN_GONE_SECONDS": "0.1",
        "TOPOALIGN_SETTLE_SECONDS": "0",
    }


async def allocate(bus: Bus, node: NodeName, asked: PodRequest, **rules: str) -> Decision:
    request = AllocateRequest(node=node, pod=asked, rules=dict(rules))
    body = await bus.ask(wire.admission_subject(node, "allocate"), msgspec.json.encode(request), 10)
    return wire.decode_answer(body, Decision)  # type: ignore[arg-type]  # a union is a type to msgspec, not to mypy


async def release(bus: Bus, node: NodeName, target: str) -> tuple[str, ...]:
    request = ReleaseRequest(node=node, target=target)
    body = await bus.ask(wire.admission_subject(node, "release"), msgspec.json.encode(request), 10)
    return wire.decode_answer(body, tuple[str, ...])


async def answering(bus: Bus, node: NodeName) -> None:
    """Waits until the allocator decides on a topology that it has received."""
    asked = AllocateRequest(node=node, pod=pod("probe", gpus=1))
    while True:
        try:
            body = await bus.ask(wire.admission_subject(node, "what-if"), msgspec.json.encode(asked), 2)
        except BusUnavailable:
            await anyio.lowlevel.checkpoint()
            continue
        if b"TopologyUnknown" not in body and b'"state":"unknown"' not in body and b'"Admission"' in body:
            return


@asynccontextmanager
async def in_one_process(
    bus: Bus | None, environment: Mapping[str, str], names: Sequence[str] = SERVICES
) -> AsyncIterator[str]:
    """The services on this bus; yields the URL of the HTTP pages ("" without)."""
    started = anyio.Event()
    url = ""
    async with anyio.create_task_group() as tasks:

        def ready(running: object) -> None:
            nonlocal url
            url = getattr(running, "http", None) or ""
            started.set()

        async def run() -> None:
            await run_services(load_services(names), environment, bus=bus, ready=ready)

        tasks.start_soon(run)
        with anyio.fail_after(60):
            await started.wait()
        yield url
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def as_process(service: str, environment: Mapping[str, str], log: Path, *flags: str) -> AsyncIterator[Process]:
    """One service as its own program, its log in a file that a failing test can show."""
    with log.open("ab") as output:
        process = await anyio.open_process(
            [str(Path(sys.executable).with_name("topoalign")), service, *flags],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                await process.wait()
        if process.returncode is None:
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()
        await process.aclose()
