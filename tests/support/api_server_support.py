"""Pods as clients create them, and a reader of what an API server's adapter tells."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from topoalign.registry.kubernetes.objects import ShownPod
from topoalign.registry.ports import SeenPod, Synced


def shown_pod(name: str, *, node: str = "", gpus: int = 1, owner: str = "") -> dict[str, Any]:
    """A v1 Pod with one container that asks for GPUs."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}}
    metadata: dict[str, Any] = {"name": name, "namespace": "ml", "annotations": {"note": "x"}}
    if owner:
        reference = {"apiVersion": "batch/v1", "kind": owner, "name": "j", "uid": "1", "controller": True}
        metadata["ownerReferences"] = [reference]
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "i", "resources": resources}]}
    return {"metadata": metadata, "spec": {**spec, **({"nodeName": node} if node else {})}}


POD = shown_pod("p")


def pod_of(shown: dict[str, Any]) -> SeenPod:
    return msgspec.convert(shown, ShownPod).to_seen()


@asynccontextmanager
async def followed(watch: AsyncIterator[Any]) -> AsyncIterator[MemoryObjectReceiveStream[Any]]:
    """What a watch reports while the context is open, read in a task of its own."""
    send, receive = anyio.create_memory_object_stream[Any](1000)

    async def read() -> None:
        async for each in watch:
            await send.send(each)

    async with send, receive, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        yield receive
        tasks.cancel_scope.cancel()


async def until_synced(received: MemoryObjectReceiveStream[Any]) -> list[Any]:
    """What is reported up to the next `Synced`, and it."""
    reported = [await received.receive()]
    while not isinstance(reported[-1], Synced):
        reported.append(await received.receive())
    return reported
