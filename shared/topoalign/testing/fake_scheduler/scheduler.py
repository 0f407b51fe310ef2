"""
The cycle of a scheduler: which nodes a pod may go to, which is best, and its Binding, made by the extender.

    pod -> nodes with room by count -> filter -> prioritize, if two or more are left -> assumed -> bind, beside the next pod

A pod that no node takes is refused with a condition, which is itself an event, as every change of a node or of a bound pod.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from topoalign.core.ports import Clock
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Object, Objects
from topoalign.testing.fake_scheduler.extender import Extender, ExtenderFailed
from topoalign.testing.fake_scheduler.queue import Key, SchedulingQueue
from topoalign.testing.fake_scheduler.room import Room

FINISHED = ("Succeeded", "Failed")


class FakeScheduler:
    """Schedules the pods of a cluster that name it as their scheduler."""

    def __init__(
        self, cluster: FakeCluster, extender: Extender, clock: Clock, *, name: str = "default-scheduler", seed: int = 0
    ) -> None:
        self.calls: Counter[str] = Counter()
        """Calls of the extender by verb."""
        self.refused: Counter[Key] = Counter()
        """How often each pod fitted nowhere."""
        self.errors: list[str] = []
        """What the extender answered that was an error."""
        self._cluster, self._extender, self._clock, self._name = cluster, extender, clock, name
        self._chance = Random(seed)  # noqa: S311  # which of equal nodes is no secret
        self._queue = SchedulingQueue(clock)
        self._assumed: dict[Key, str] = {}
        """Pod -> the node that it has got and may not be bound to yet."""
        self.room = Room()
        """What the scheduler counts itself."""

    @property
    def idle(self) -> bool:
        """Whether no pod waits to be bound."""
        return not len(self._queue) and not self._assumed

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Schedules until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, self._cluster.pods)
            tasks.start_soon(self._follow, self._cluster.nodes)
            task_status.started()
            while True:
                await self._cycle(await self._queue.next(), tasks)

    async def _follow(self, objects: Objects) -> None:
        seen = objects.newest
        for each in objects:
            self._note(objects, each, gone=False)
        while True:
            for change in objects.since(seen):
                seen = change.version
                self._note(objects, change.object, gone=change.type == "DELETED")
            await objects.wait()

    def _note(self, objects: Objects, changed: Object, *, gone: bool) -> None:
        metadata = changed["metadata"]
        if objects is self._cluster.nodes:
            if gone:
                self.room.drop_node(metadata["name"])
            else:
                self.room.put_node(changed)
            self._queue.wake()
            return
        key, node = (metadata["namespace"], metadata["name"]), changed["spec"].get("nodeName")
        if node or gone:
            self._queue.remove(key)
            self._assumed.pop(key, None)
            self.room.drop_pod(key)
            self._queue.wake()
        if node and not gone and changed["status"].get("phase") not in FINISHED:
            self.room.put_pod(key, changed, node)
        if not node and not gone and key not in self._assumed and changed["spec"]["schedulerName"] == self._name:
            self._queue.add(key, priority(changed))

    async def _cycle(self, key: Key, tasks: TaskGroup) -> None:
        """Tries one pod."""
        try:
            pod = self._cluster.pods.get(key)
        except ApiError:
            self._queue.remove(key)
            self._queue.assume(key)
            return
        nodes = self.room.nodes_for(pod)
        try:
            passed, why = (
                await self._filter(pod, nodes) if nodes else ([], {"Insufficient resources": len(self._cluster.nodes)})
            )
            node = await self._best(pod, passed) if len(passed) > 1 else passed[0] if passed else None
        except ExtenderFailed as error:
            self.errors.append(str(error))
            self._queue.fail(key, priority(pod))
            return
        if node is None:
            self.refused[key] += 1
            self._tell_refused(key, why)
            self._queue.refuse(key)
            return
        self._assumed[key] = node
        self.room.put_pod(key, pod, node)
        self._queue.assume(key)
        tasks.start_soon(self._bind, key, pod, node)

    async def _filter(self, pod: Object, nodes: list[str]) -> tuple[list[str], Mapping[str, int]]:
        """The nodes that pass, and how many are refused for each reason. Raises ExtenderFailed."""
        answer = await self._ask("filter", {"Pod": as_sent(pod), "Nodes": None, "NodeNames": nodes})
        if answer.get("Error"):
            raise ExtenderFailed(answer["Error"])
        passed = answer.get("NodeNames") or []
        fit = set(passed)
        if unknown := fit - set(nodes):
            raise ExtenderFailed(f"claims filtered nodes {sorted(unknown)} which are not found in the input node list")
        failed = {**(answer.get("FailedNodes") or {}), **(answer.get("FailedAndUnresolvableNodes") or {})}
        return passed, Counter(text for node, text in failed.items() if node not in fit)

    async def _best(self, pod: Object, nodes: list[str]) -> str:
        """The node with the highest score, of equals any. Raises ExtenderFailed."""
        answer = await self._ask("prioritize", {"Pod": as_sent(pod), "Nodes": None, "NodeNames": nodes})
        scores = {each["Host"]: each["Score"] for each in answer or ()}
        ranked = [scores.get(node, 0) for node in nodes]
        highest = max(ranked)
        return self._chance.choice([node for node, score in zip(nodes, ranked, strict=True) if score == highest])

    async def _bind(self, key: Key, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        arguments = {"PodName": key[1], "PodNamespace": key[0], "PodUID": metadata["uid"], "Node": node}
        try:
            answer = await self._ask("bind", arguments) or {}
            if answer.get("Error"):
                raise ExtenderFailed(answer["Error"])
        except ExtenderFailed as error:
            self.errors.append(str(error))
            if self._assumed.pop(key, None) is not None:
                self.room.drop_pod(key)
                self._queue.fail(key, priority(pod))

    async def _ask(self, verb: Any, arguments: Mapping[str, Any]) -> Any:
        self.calls[verb] += 1
        return await self._extender.ask(verb, arguments)

    def _tell_refused(self, key: Key, why: Mapping[str, int]) -> None:
        """Writes the condition of a pod that fits nowhere, if it differs from the one that it has."""
        texts = ", ".join(f"{count} {text}" for text, count in sorted(why.items()))
        message = f"0/{len(self._cluster.nodes)} nodes are available: {texts}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        try:
            if condition not in self._cluster.pods.get(key)["status"].get("conditions", []):
                self._cluster.set_status(*key, conditions=[condition])
        except ApiError:  # it was deleted while it was tried
            return


def priority(pod: Object) -> int:
    """Of the pod; 0 where it says none."""
    return int(pod["spec"].get("priority") or 0)


def as_sent(pod: Object) -> Object:
    """The pod as a scheduler sends it: without kind, version and managed fields."""
    metadata = {name: value for name, value in pod["metadata"].items() if name != "managedFields"}
    return {"metadata": metadata, "spec": pod["spec"], "status": pod["status"]}
