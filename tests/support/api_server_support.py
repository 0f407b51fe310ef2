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
    """The pod as the registry reads it."""
    return msgspec.convert(shown, ShownPod).to_seen()


@asynccontextmanager
async def followed(told: AsyncIterator[Any]) -> AsyncIterator["Followed"]:
    """Follows a watch in a task of its own while the context is open."""
    send, receive = anyio.create_memory_object_stream[Any](1000)

    async def read() -> None:
        async for each in told:
            await send.send(each)

    async with send, receive, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        yield Followed(receive)
        tasks.cancel_scope.cancel()


class Followed:
    """What was told by a watch."""

    def __init__(self, received: MemoryObjectReceiveStream[Any]) -> None:
        self._receive = received

    async def one(self) -> Any:
        """The next that is told."""
        return await self._receive.receive()

    async def next(self, number: int) -> list[Any]:
        """The next that are told."""
        return [await self.one() for _ in range(number)]

    async def until_synced(self) -> list[Any]:
        """What is told up to the next `Synced`, and it."""
        told = [await self.one()]
        while not isinstance(told[-1], Synced):
            told.append(await self.one())
        return told

    def waiting(self) -> list[Any]:
        """What was told and not taken yet."""
        found = []
        while True:
            try:
                found.append(self._receive.receive_nowait())
            except anyio.WouldBlock:
                return found
