"""Pods as clients create them, and a reader of what an API server's adapter tells."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from topoalign.registry.kubernetes.objects import ShownPod
from topoalign.registry.ports import SeenPod, Synced


def shown_pod(name: str, *, node: str = "", gpus: int = 1, owner: str = "", namespace: str = "ml") -> dict[str, Any]:
    """A v1 Pod with one container that asks for GPUs."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}}
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "annotations": {"note": "x"}}
    if owner:
        reference = {"apiVersion": "batch/v1", "kind": owner, "name": "j", "uid": "1", "controller": True}
        metadata["ownerReferences"] = [reference]
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "i", "resources": resources}]}
    return {"metadata": metadata, "spec": {**spec, **({"nodeName": node} if node else {})}}


POD = shown_pod("p")


def pod_of(shown: dict[str, Any]) -> SeenPod:
    """The pod as the registry reads it."""
    return msgspec.convert(shown, ShownPod).to_seen()


class Followed:
    """Follows a watch in a task of its own while the context is open."""

    def __init__(self, told: AsyncIterator[Any]) -> None:
        self._told = told
        self._send, self._receive = anyio.create_memory_object_stream[Any](1000)
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(kind, error, trace)
        self._send.close()
        self._receive.close()

    async def _read(self) -> None:
        async for each in self._told:
            await self._send.send(each)

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
