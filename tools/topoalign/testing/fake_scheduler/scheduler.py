"""
The cycle of a scheduler: which nodes a pod may go to, which is best, and its Binding, made by the extender.

    pod -> its nominated node, if it has one -> nodes with room by count -> filter -> prioritize, if two or more are left
        -> assumed -> bind, beside the next pod
        -> none is left: preempt, victims are deleted, and the pod waits for their end

A pod that no node takes is refused with a condition, which is itself an event, as every change of a node or of a bound pod.
So is a bind that fails: kube-scheduler treats an assumed pod that it forgets as a deleted one (v1.36,
handleBindingCycleError).
Without an extender the scheduler counts by itself, and makes the Binding.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup, TaskStatus

from topoalign.core.ports import Clock
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Object, Objects
from topoalign.testing.fake_scheduler.extender import TIMEOUT_SECONDS, Extender, ExtenderFailed
from topoalign.testing.fake_scheduler.preemption import (
    Preemption,
    arguments_of,
    chosen_node,
    is_eligible,
    victims_on,
)
from topoalign.testing.fake_scheduler.queue import Key, SchedulingQueue
from topoalign.testing.fake_scheduler.room import Room, key_of, priority_of

FINISHED = ("Succeeded", "Failed")


class Filtered(NamedTuple):
    """What filter answered."""

    passed: list[str]
    unresolvable: Collection[str]
    """Refused nodes where preemption would not help."""
    texts: Mapping[str, int]
    """Text of a refusal -> how many nodes."""


class FakeScheduler:
    """Schedules the pods of a cluster that name it as their scheduler."""

    def __init__(
        self,
        cluster: FakeCluster,
        extender: Extender | None,
        clock: Clock,
        *,
        name: str = "default-scheduler",
        seed: int = 0,
        cycle_seconds: float = 0.0,
    ) -> None:
        """
        `extender`: None: the scheduler binds by its own counts. `cycle_seconds`: what it does itself for each pod, before
        its extender is called.
        """
        self.calls: Counter[str] = Counter()
        """Calls of the extender by verb."""
        self.refused: Counter[Key] = Counter()
        """How often each pod fitted nowhere."""
        self.failed: Counter[Key] = Counter()
        """Events `FailedScheduling` of each pod, for refusals and for errors."""
        self.errors: list[str] = []
        """What the extender answered that was an error."""
        self.preemptions: list[Preemption] = []
        self.room = Room()
        """What the scheduler counts itself."""
        self._cluster = cluster
        self._extender = extender
        self._clock = clock
        self._name = name
        self._cycle_seconds = cycle_seconds
        self._chance = Random(seed)  # noqa: S311  # which of equal nodes is no secret
        self._queue = SchedulingQueue(clock)
        self._assumed: dict[Key, str] = {}
        """Pod -> the node that it has got and may not be bound to yet."""
        self._bound: dict[Key, Object] = {}
        """The pods that are bound and have not ended, in the order in which that was seen."""
        self._priorities: Counter[int] = Counter()
        """Priority -> how many bound pods have it."""

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
                key = await self._queue.next()
                if self._cycle_seconds:
                    await self._clock.sleep(self._cycle_seconds)
                await self._cycle(key, tasks)

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
        if objects is self._cluster.nodes:
            self._note_node(changed, gone=gone)
        else:
            self._note_pod(changed, gone=gone)

    def _note_node(self, node: Object, *, gone: bool) -> None:
        if gone:
            self.room.drop_node(node["metadata"]["name"])
            self._queue.wake(has_room=False)
        else:
            self._queue.wake(has_room=self.room.put_node(node))

    def _note_pod(self, pod: Object, *, gone: bool) -> None:
        key = key_of(pod)
        node = pod["spec"].get("nodeName")
        finished = pod["status"].get("phase") in FINISHED
        if node or gone:
            self._queue.remove(key)
            self._assumed.pop(key, None)
        if gone or (node and finished):
            self.room.drop_pod(key)
            if self._bound.pop(key, None) is not None:
                self._priorities[priority_of(pod)] -= 1
            self._queue.wake()
        elif node:
            self.room.put_pod(key, pod, node)
            self._priorities[priority_of(pod)] += key not in self._bound
            self._bound[key] = pod
            self._queue.wake(has_room=False)
        elif key not in self._assumed and pod["spec"]["schedulerName"] == self._name:
            self.room.nominate(key, pod, pod["status"].get("nominatedNodeName") or "")
            if not pod["spec"].get("schedulingGates"):
                self._queue.add(key, priority_of(pod))

    async def _cycle(self, key: Key, tasks: TaskGroup) -> None:
        """Tries one pod."""
        try:
            pod = self._cluster.pods.get(key)
        except ApiError:
            self._queue.remove(key)
            self._queue.assume(key)
            return
        on_nominated = self._bound_to(pod["status"].get("nominatedNodeName") or "")
        nominated = await self._nominated_node(pod)
        nodes = [nominated] if nominated else self.room.nodes_for(pod)
        try:
            filtered = await self._filter(pod, nodes) if nodes and not nominated else Filtered(nodes, (), {})
            passed = filtered.passed
            node = await self._best(pod, passed) if len(passed) > 1 else passed[0] if passed else None
        except ExtenderFailed as error:
            self._fail(key, pod, error)
            return
        if node is None:
            await self._refuse(key, pod, nodes, filtered, on_nominated)
            return
        if key in self._bound:  # by an earlier bind, which was taken for failed
            self._queue.assume(key)
            return
        self._assumed[key] = node
        self.room.put_pod(key, pod, node)
        self._queue.assume(key)
        tasks.start_soon(self._bind, key, pod, node)

    async def _nominated_node(self, pod: Object) -> str:
        """The pod's nominated node if it passes alone; empty: there is none, it does not pass, or the call failed."""
        node = pod["status"].get("nominatedNodeName")
        if not node or not self.room.with_room(pod, [node]):
            return ""
        try:
            return node if (await self._filter(pod, [node])).passed else ""
        except ExtenderFailed as error:
            self.errors.append(str(error))  # kube-scheduler only logs it
            return ""

    async def _filter(self, pod: Object, nodes: list[str]) -> Filtered:
        """Raises ExtenderFailed."""
        if self._extender is None:
            return Filtered(nodes, (), {})
        answer = await self._call("filter", {"Pod": as_sent(pod), "Nodes": None, "NodeNames": nodes})
        if answer.get("Error"):
            raise ExtenderFailed(answer["Error"])
        passed = answer.get("NodeNames") or []
        fit = set(passed)
        if unknown := fit - set(nodes):
            raise ExtenderFailed(f"claims filtered nodes {sorted(unknown)} which are not found in the input node list")
        unresolvable = answer.get("FailedAndUnresolvableNodes") or {}
        failed = {**(answer.get("FailedNodes") or {}), **unresolvable}
        return Filtered(passed, unresolvable.keys(), Counter(text for node, text in failed.items() if node not in fit))

    async def _best(self, pod: Object, nodes: list[str]) -> str:
        """The node with the highest score, of equals any. Raises ExtenderFailed."""
        if self._extender is None:
            return self._chance.choice(nodes)
        answer = await self._call("prioritize", {"Pod": as_sent(pod), "Nodes": None, "NodeNames": nodes})
        scores = {each["Host"]: each["Score"] for each in answer or ()}
        ranked = [scores.get(node, 0) for node in nodes]
        highest = max(ranked)
        return self._chance.choice([node for node, score in zip(nodes, ranked, strict=True) if score == highest])

    async def _bind(self, key: Key, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        arguments = {"PodName": key[1], "PodNamespace": key[0], "PodUID": metadata["uid"], "Node": node}
        try:
            if self._extender is None:
                self._bind_itself(key, node)
                return
            answer = await self._call("bind", arguments) or {}
            if answer.get("Error"):
                raise ExtenderFailed(answer["Error"])
        except ExtenderFailed as error:
            if self._assumed.pop(key, None) is not None:
                self.room.drop_pod(key)
                with suppress(ApiError):  # it was deleted meanwhile
                    newest = self._cluster.pods.get(key)
                    self.room.nominate(key, newest, newest["status"].get("nominatedNodeName") or "")
                self._fail(key, pod, error)
                self._queue.wake()
            else:  # the Binding was made, or the pod is gone
                self.errors.append(str(error))

    def _bind_itself(self, key: Key, node: str) -> None:
        """Raises ExtenderFailed."""
        try:
            self._cluster.bind(*key, {"target": {"name": node}})
        except ApiError as error:
            raise ExtenderFailed(error.message) from error

    def _fail(self, key: Key, pod: Object, error: ExtenderFailed) -> None:
        """The pod is tried again after a pause, with an event `FailedScheduling` (reason SchedulerError)."""
        self.errors.append(str(error))
        self.failed[key] += 1
        self._queue.fail(key, priority_of(pod))

    def _bound_to(self, node: str) -> list[Object]:
        """The pods of a node; none where it has no name."""
        return [each for each in self._bound.values() if each["spec"]["nodeName"] == node] if node else []

    async def _refuse(
        self, key: Key, pod: Object, nodes: list[str], filtered: Filtered, on_nominated: Collection[Object]
    ) -> None:
        """
        The pod fits nowhere: it waits for an event, and for the end of its victims if others can make way for it.
        `on_nominated`: the pods of its nominated node when the cycle began, as in kube-scheduler's snapshot.
        """
        self.refused[key] += 1
        self.failed[key] += 1
        texts = Counter(filtered.texts)
        lacking = self.room.nodes_beside(nodes)
        if lacking:
            texts["Insufficient resources"] += len(lacking)
        node, victims = await self._preempt(key, pod, lacking, filtered, on_nominated)
        self._write_refusal(key, texts, node)
        for each in victims:
            with suppress(ApiError):  # it has ended meanwhile
                self._cluster.delete_pod(*key_of(each), grace=None)
        self._queue.refuse(key, by_extender=bool(nodes))

    async def _preempt(
        self,
        key: Key,
        pod: Object,
        lacking: Collection[str],
        filtered: Filtered,
        on_nominated: Collection[Object],
    ) -> tuple[str, list[Object]]:
        """The node that is nominated for the pod, and the pods that make way there; empty where none does."""
        if not any(count and priority < priority_of(pod) for priority, count in self._priorities.items()):
            return "", []
        nominated = pod["status"].get("nominatedNodeName") or ""
        if not is_eligible(pod, on_nominated, is_unresolvable=nominated in filtered.unresolvable):
            return "", []
        running: dict[str, list[Object]] = {node: [] for node in lacking}
        for each in self._bound.values():
            running.get(each["spec"]["nodeName"], []).append(each)
        found = {node: victims_on(self.room, pod, node, pods) for node, pods in running.items()}
        victims = {node: pods for node, pods in found.items() if pods}
        if victims and self._extender is not None:
            try:
                answer = await self._call("preempt", arguments_of(as_sent(pod), victims))
                kept = (answer or {}).get("NodeNameToMetaVictims") or {}
                victims = {node: self._named_by(kept[node]) for node in victims if node in kept}
            except ExtenderFailed as error:
                self.errors.append(str(error))
                return "", []
        if not victims:
            return "", []
        node = chosen_node(victims)
        self.preemptions.append(Preemption(key, node, tuple(key_of(each) for each in victims[node])))
        return node, victims[node]

    def _named_by(self, answered: Mapping[str, Any]) -> list[Object]:
        """The victims on a node. Raises ExtenderFailed for one that is not bound any more."""
        uids = {each["UID"] for each in answered["Pods"]}
        named = [each for each in self._bound.values() if each["metadata"]["uid"] in uids]
        if len(named) < len(uids):
            raise ExtenderFailed("preempt: a victim is not found on its node")
        return named

    async def _call(self, verb: Any, arguments: Mapping[str, Any]) -> Any:
        assert self._extender is not None, "a scheduler with an extender"
        self.calls[verb] += 1
        with anyio.move_on_after(TIMEOUT_SECONDS):
            return await self._extender.ask(verb, arguments)
        raise ExtenderFailed(f"{verb}: no answer within {TIMEOUT_SECONDS:g} s")

    def _write_refusal(self, key: Key, why: Mapping[str, int], node: str) -> None:
        """Writes the condition and the nominated node of a pod that fits nowhere, if they differ from what it has."""
        texts = ", ".join(f"{count} {text}" for text, count in sorted(why.items()))
        message = f"0/{len(self._cluster.nodes)} nodes are available: {texts}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        try:
            status = self._cluster.pods.get(key)["status"]
            changes: dict[str, Any] = {}
            if condition not in status.get("conditions", []):
                changes["conditions"] = [condition]
            if node and status.get("nominatedNodeName") != node:
                changes["nominatedNodeName"] = node
            if changes:
                self._cluster.set_status(*key, **changes)
        except ApiError:  # it was deleted while it was tried
            return


def as_sent(pod: Object) -> Object:
    """The pod as a scheduler sends it: without kind, version and managed fields."""
    metadata = {name: value for name, value in pod["metadata"].items() if name != "managedFields"}
    return {"metadata": metadata, "spec": pod["spec"], "status": pod["status"]}
