"""
A kubelet as the allocator meets it, in memory: its device manager, its PodResources, its checkpoint, and its bad moments.

Its rules are those of kubelet v1.36.3, cm/devicemanager: devices are taken for a container before the plugin is asked, and
given back if it refuses; init containers that end leave their devices to later containers of their pod; what a pod held is
freed when the next pod is admitted, not when it ends, and stays in the checkpoint until that is written, at the next
allocation or when the plugin says something of its devices; after a restart the allocations are read from the checkpoint,
which may be lost, no device is healthy until the plugin has registered anew, and for a while the list of pods is shorter
than what runs. A pod has a directory from when its containers start until a while after it was deleted; one that was refused
has none, although its entries stay as those of all pods do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import anyio
from simulation.pods import Container, Directories, Pod
from simulation.starts import IN_TURN, Answer, Starts

from topoalign.allocator.ports import KubeletListing, ReportedDevices, ResourceEntry
from topoalign.core.model.errors import TopoalignError, Unavailable
from topoalign.core.model.events import ContainerUsage, Owner
from topoalign.core.model.ids import ContainerName, DeviceID, Namespace, ResourceName
from topoalign.core.ports import Clock

DEFAULT = Namespace("default")
STARTING_SECONDS = (0.0, 0.0, 0.02, 1.0)
"""From the last Allocate of a pod until its directory is made and its containers run."""
Entries = dict[tuple[str, ContainerName, ResourceName], frozenset[DeviceID]]
"""(pod UID, container, resource) -> devices, as in the checkpoint."""


class Plugin(Protocol):
    """The device plugin's side of the socket. A call may break off with Unavailable: nobody knows what it did."""

    async def prefer(
        self, resource: ResourceName, available: list[DeviceID], must_include: list[DeviceID], size: int
    ) -> tuple[DeviceID, ...]: ...

    async def allocate(self, resource: ResourceName, devices: Sequence[DeviceID]) -> Answer: ...

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None: ...


@dataclass
class Kubelet:
    """One node's kubelet; `restart` makes it lose what a process loses."""

    chance: Random
    clock: Clock
    serial: bool = True
    """Whether pods are admitted one at a time, as real kubelets do."""
    calls_at_start: bool = False
    """Whether the plugin was registered by an older version, which had PreStartContainer called."""
    entries: Entries = field(default_factory=dict)
    file: Entries = field(default_factory=dict)
    """The entries as they were written down last."""
    version: int = 0
    """Of the file."""
    mounted: bool = True
    """Whether the directories of pods can be read."""
    up: bool = True
    readable: bool = True
    """Whether its checkpoint can be read."""
    wanted: dict[str, Pod] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    """Pods whose containers run, whatever becomes of the kubelet."""
    used: Entries = field(default_factory=dict)
    """What the containers of these really use, whatever the kubelet knows of it."""
    answers: dict[tuple[str, ContainerName, ResourceName], Answer] = field(default_factory=dict)
    """What the plugin has answered for each of them."""
    began: list[Callable[[Pod, Container], None]] = field(default_factory=list)
    """Told each container that begins to run."""
    lost: set[str] = field(default_factory=set)
    """Pods that run, and of whose devices the kubelet knows nothing since it lost its checkpoint."""
    undelivered: set[str] = field(default_factory=set)
    """Pods without volumes whose end, if they have ended, nobody may have received, nor may anybody hear of it later."""
    told: set[str] = field(default_factory=set)
    """Pods that this kubelet has told this agent of: it has shown them, or written them down, and was asked since."""
    hidden: set[str] = field(default_factory=set)
    """Pods that run, and that it has not received yet after its start."""
    starts: int = 1
    since: float = 0.0
    plugin: Plugin | None = None
    healthy: dict[ResourceName, tuple[DeviceID, ...]] = field(default_factory=dict)
    refusals: list[TopoalignError] = field(default_factory=list)
    """Why pods were not admitted."""

    def __post_init__(self) -> None:
        self.directories, self.starts_in_turn = Directories(self.clock), Starts(self)
        self._begin()

    def _begin(self) -> None:
        self.since = self.clock.wall()
        self.entries = dict(self.file)
        self.found = self.version
        """The version of the file that it began with."""
        self.taken = {(resource, d) for (_, _, resource), devices in self.entries.items() for d in devices}
        self._begun: set[str] = set()
        """Pods whose admission this kubelet has begun."""
        self._in_flight: list[tuple[ResourceName, frozenset[DeviceID]]] = []
        self._turn = anyio.Lock() if self.serial else anyio.Semaphore(10)

    # what happens to it

    def restart(self, hidden: set[str]) -> None:
        """Its memory is gone. Its calls break off: whoever makes them is to be cancelled beforehand."""
        self.begin_unheard()
        self.plugin, self.healthy = None, {}
        self.starts += 1
        self.hidden = hidden & self.admitted
        self.up = True
        self._begin()

    def begin_unheard(self) -> None:
        """Who tells of ended pods, or who listens, is another one from now on, and may never have told or heard of these."""
        self.undelivered |= self.directories.now().unreadable - self.wanted.keys()
        self.told.clear()

    def lists(self, plugin: Plugin, healthy: dict[ResourceName, tuple[DeviceID, ...]]) -> None:
        """What the plugin says on its stream: all its devices that are healthy."""
        if self.up:
            self.plugin, self.healthy = plugin, healthy
            self._write()

    def unregistered(self) -> None:
        """The plugin's stream ended: all its devices are unhealthy."""
        self.plugin, self.healthy = None, {}

    def remove(self, uid: str) -> None:
        """The pod is gone: its containers have ended. Its devices are freed when the next pod comes."""
        self.end(uid)
        self.directories.delete(uid)

    def end(self, uid: str) -> None:
        """The containers have ended, and nobody deletes the pod: it is not active any more, and its directory stays."""
        self.wanted.pop(uid, None)
        if uid not in self.told:
            self.undelivered.add(uid)
        self.directories.tear_down(uid)
        for pods in (self.admitted, self.hidden, self.lost):
            pods.discard(uid)
        self.used = {key: devices for key, devices in self.used.items() if key[0] != uid}
        self.answers = {key: answer for key, answer in self.answers.items() if key[0] != uid}
        self.starts_in_turn.at.pop(uid, None)

    def reboot(self) -> None:
        """No container runs any more; the pods are to come again."""
        self.admitted.clear()
        self.used.clear()
        self.lost.clear()
        self.starts_in_turn.at.clear()

    def lose_checkpoint(self) -> None:
        """As it stops: the file is gone, and with the next start all that is known of devices."""
        self.file = {}
        self.version += 1
        self.lost |= self.admitted

    # what it tells

    def listing(self) -> KubeletListing:
        """PodResources and the checkpoint as they are now."""
        if not self.up:
            raise Unavailable("PodResources does not answer", "look at the kubelet")
        shown = [pod for uid, pod in self.wanted.items() if uid not in self.hidden]
        is_own = self.version > self.found
        self.told |= {pod.uid for pod in shown if any(self.holdings(pod))}
        self.told |= {uid for uid, _, _ in self.file} if is_own and self.readable else set()
        self.undelivered -= self.told
        return KubeletListing(
            kubelet=(self.starts,),
            since=self.since,
            pods=len(shown) + 1,  # there are always some that ask for no device
            holdings=tuple(holding for pod in shown for holding in self.holdings(pod)),
            written=(self.version,),
            is_own=is_own,
            directories=self.directories.now() if self.mounted else None,
            checkpoint=self.checkpoint() if self.readable else None,
            parts=tuple(ResourceEntry(key[2], devices, key[0], key[1]) for key, devices in self.file.items())
            if self.readable
            else (),
            usage=tuple(self.usage(shown)),
        )

    def holdings(self, pod: Pod) -> Iterator[ReportedDevices]:
        """Of app containers and sidecars: plain init containers are not shown."""
        for container in pod.containers:
            for resource in container.limits:
                devices = self.entries.get((pod.uid, container.name, resource))
                if devices and container.role != "init":
                    owner = Owner(namespace=DEFAULT, pod=pod.name, container=container.name)
                    uid = pod.uid if self.readable and self.file.get((pod.uid, container.name, resource)) else ""
                    yield ReportedDevices(
                        owner=owner, resource=resource, devices=devices, pod_uid=uid if self.mounted else ""
                    )

    def usage(self, shown: list[Pod]) -> Iterator[ContainerUsage]:
        """Of all containers but plain init containers, with devices or without."""
        for pod in shown:
            given: dict[Owner, dict[ResourceName, tuple[DeviceID, ...]]] = {}
            for container in pod.containers:
                if container.role != "init":
                    given[Owner(namespace=DEFAULT, pod=pod.name, container=container.name)] = {}
            for holding in self.holdings(pod):
                given[holding.owner][holding.resource] = tuple(sorted(holding.devices))
            yield from (ContainerUsage(owner=owner, devices=devices) for owner, devices in given.items())

    def role_of(self, key: tuple[str, ContainerName, ResourceName]) -> str:
        """What the container of an entry is in its pod."""
        return next(each.role for each in self.wanted[key[0]].containers if each.name == key[1])

    def checkpoint(self) -> frozenset[tuple[ResourceName, DeviceID]]:
        return frozenset((resource, d) for (_, _, resource), devices in self.file.items() for d in devices)

    # what it does

    async def admit(self, uid: str) -> bool:
        """Gives the pod its devices and starts it, or leaves it be. True once it runs."""
        async with self._turn:
            pod = self.wanted.get(uid)
            if pod is not None and uid in self.admitted and uid in self.starts_in_turn.at:
                return await self.starts_in_turn.start(pod)
            if pod is None or uid in self.admitted or uid in self._begun:
                return False
            self._begun.add(uid)
            self.collect()
            reusable: set[tuple[ResourceName, DeviceID]] = set()
            try:
                for container in pod.containers:
                    for number, (resource, size) in enumerate(container.limits.items()):
                        if number and pod.breaks and container is pod.containers[-1]:
                            raise Unavailable(f"the plugin of {resource} has gone", "wait until it is back")
                        devices = await self._give(pod, container, resource, size, reusable)
                        places = {(resource, device) for device in devices}
                        reusable = reusable | places if container.role == "init" else reusable - places
                    self._write()
            except TopoalignError as error:
                self.refusals.append(error)
                self.end(uid)
                self._rebuild()
                return False
            if pod.refused:  # by another manager: its entries stay until the next pod comes
                self.end(uid)
                return False
        await anyio.sleep(self.chance.choice(STARTING_SECONDS))
        if uid not in self.wanted:  # deleted meanwhile
            return False
        self.directories.make(pod)
        if any(not IN_TURN.isdisjoint(container.limits) for container in pod.containers):
            return await self.starts_in_turn.start(pod)
        self.admitted.add(uid)
        for container in pod.containers:
            self.begin(pod, container)
        if self.plugin is not None and self.calls_at_start:
            try:
                for (holder, _, resource), devices in list(self.used.items()):
                    if holder == uid and self.plugin is not None:
                        await self.plugin.pre_start(resource, sorted(devices))
            except TopoalignError:
                self.remove(uid)  # its container failed to start, and its pod with it
                return False
        return True

    def begin(self, pod: Pod, container: Container) -> None:
        """A container begins to run with what it was given."""
        own = {key: devices for key, devices in self.entries.items() if key[:2] == (pod.uid, container.name)}
        self.admitted.add(pod.uid)
        self.used |= own
        for told in self.began:
            told(pod, container)

    def collect(self) -> None:
        """Frees what pods held that are no more (UpdateAllocatedDevices)."""
        gone = [key for key in self.entries if key[0] not in self.wanted]
        for key in gone:
            del self.entries[key]
        if gone:
            self._rebuild()

    def _write(self) -> None:
        """After every admission, and whenever the plugin says something of its devices."""
        self.file = dict(self.entries)
        self.version += 1

    def _rebuild(self) -> None:
        """What is in flight stays taken (kubernetes 137534 is how it was when it did not)."""
        held = [*((resource, devices) for (_, _, resource), devices in self.entries.items()), *self._in_flight]
        self.taken = {(resource, device) for resource, devices in held for device in devices}

    async def _give(
        self,
        pod: Pod,
        container: Container,
        resource: ResourceName,
        size: int,
        reusable: set[tuple[ResourceName, DeviceID]],
    ) -> frozenset[DeviceID]:
        key = pod.uid, container.name, resource
        plugin, healthy = self.plugin, self.healthy.get(resource, ())
        if plugin is None or not healthy:
            raise Unavailable(f"no healthy devices present; cannot allocate unhealthy devices {resource}", "wait")
        if had := self.entries.get(key):
            if not had <= set(healthy):
                raise Unavailable(f"previously allocated devices are no longer healthy: {resource}", "wait")
            return had  # from before a reboot, or before a restart of this kubelet in the middle of it
        reused = sorted(device for kind, device in reusable if kind == resource)[:size]
        available = [device for device in healthy if (resource, device) not in self.taken]
        if len(reused) + len(available) < size:
            raise Unavailable(f"requested number of devices unavailable for {resource}", "wait")
        chosen = list(reused)
        if len(chosen) < size and self.chance.random() < 0.8:
            preferred = await plugin.prefer(resource, [*reused, *available], reused, size)
            # its lock was free meanwhile, so it looks again
            available = [device for device in available if (resource, device) not in self.taken]
            chosen += [device for device in preferred if device in available]
        self.chance.shuffle(available)
        chosen += [device for device in available if device not in chosen][: size - len(chosen)]
        if len(chosen) < size:
            raise Unavailable(f"requested number of devices unavailable for {resource}", "wait")
        devices = frozenset(chosen)
        self.taken |= {(resource, device) for device in devices}
        flight = resource, devices - set(reused)
        self._in_flight.append(flight)
        turn = self._turn
        try:
            self.answers[key] = await plugin.allocate(resource, chosen)
        finally:
            if turn is self._turn:  # else the kubelet has restarted meanwhile
                self._in_flight.remove(flight)
        self.entries[key] = devices
        return devices
