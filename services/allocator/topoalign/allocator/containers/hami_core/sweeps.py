"""
Keeps the directories of containers that are limited by HAMi-core, every few seconds and when the agent has started.

A directory whose slots are in the record or in the kubelet's checkpoint, or whose pod is there, stays; one that is missing
for slots in the record or the checkpoint is made again. Any other is taken away, and removed some entries at a time, in a
thread: to give a large file's blocks back may take a file system seconds. Without an answer of the kubelet, or where its
checkpoint cannot be read, nothing is removed.
"""

import errno
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import structlog
from anyio import to_thread

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.hami_core import directories
from topoalign.allocator.containers.hami_core.directories import Owner
from topoalign.allocator.ports import Poll
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import clean
from topoalign.core.model.holdings import base_of, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import until_tick

SWEEP_SECONDS = 5.0
NOBODY = Owner(AllocationID(""))
"""Of a directory of slots that the checkpoint has and the record has not: an init container's, which may run once more."""

log = structlog.get_logger("topoalign.allocator.containers.hami_core")
Held = tuple[ResourceName, frozenset[DeviceID]]


class Allocations(Protocol):
    """What a sweep asks of the allocator."""

    @property
    def state(self) -> NodeState:
        """What is known of the node now."""

    @property
    def polled(self) -> Poll | None:
        """What the kubelet answered last; None: nothing yet, or it did not answer."""


class Sweeps:
    """Restores and removes directories below one root."""

    def __init__(self, root: Callable[[], str]) -> None:
        """`root`: `flags.hamiRoot` of the newest configuration, empty: there is none."""
        self._root = root
        self._owners: dict[str, Owner | None] = {}
        """Directory -> whose it is, by what is written in it."""
        self._names: dict[Held, str] = {}

    async def run(self, allocations: Allocations, clock: Clock) -> None:
        """Sweeps every `SWEEP_SECONDS` until cancelled. Logs once why it fails."""
        failing = None
        while True:
            try:
                try:
                    self.sweep(allocations.state, allocations.polled)
                finally:
                    await to_thread.run_sync(self.remove_leftovers)
                failing = None
            except OSError as error:
                if failing != (reason := f"{error.strerror}: {error.filename}"):
                    log.warning("the directories of containers cannot be kept", reason=clean(reason, 200))
                failing = reason
            await clock.sleep(until_tick(clock, SWEEP_SECONDS))

    def sweep(self, state: NodeState, poll: Poll | None) -> None:
        """One of them. Raises OSError once all that can be done is done."""
        if not (configured := self._root().rstrip("/")):
            return
        if poll is not None and poll.listing.checkpoint is None:
            poll = None
        root = Path(configured)
        failure = None
        held = self._held(state)
        shown = self._shown(poll)
        limited = [name for (resource, _), name in self._names.items() if is_limited(state, resource)]
        limited += [name for name, resource in shown.items() if is_limited(state, resource)]
        present = directories.listed(root)
        self._owners = {name: self._owners.get(name) or directories.owner_of(root, name) for name in present}
        for name in present:
            owner = self._owners[name]
            try:
                if name in held:
                    if (now := held[name]) is not None and now != owner:
                        directories.write_owner(root, name, now)
                        self._owners[name] = now
                elif poll is not None and name not in shown and not has_pod(owner, poll):
                    limiter_files.remove(root, name)
            except OSError as error:
                failure = error
        try:
            for name in {*limited} - self._owners.keys():
                if (owner := held.get(name, NOBODY)) is not None:
                    directories.make_locks(root)
                    directories.prepare(root, name, owner)
        except OSError as error:
            failure = error
        if failure is not None:
            raise failure

    def remove_leftovers(self) -> None:
        """Goes on removing what was taken away. Raises OSError where some of it cannot be removed."""
        if configured := self._root().rstrip("/"):
            try:
                limiter_files.remove_leftovers(Path(configured))
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # the next one goes on
                    raise

    def _held(self, state: NodeState) -> dict[str, Owner | None]:
        """Directory of slots that are held, by the record -> whose it is. None: of a container that was displaced."""
        pairs = {pair: Owner(each.id, each.pod_uid) if each is not None else None for each, pair in held_slots(state)}
        self._names = {pair: self._name(pair) for pair in pairs}
        return {self._names[pair]: owner for pair, owner in pairs.items()}

    def _shown(self, poll: Poll | None) -> dict[str, ResourceName]:
        """The directories of slots in the kubelet's checkpoint -> the resource, without entries of pods that are gone."""
        if poll is None:
            return {}
        pods = poll.listing.directories
        return {
            self._name((each.resource, each.devices)): each.resource
            for each in poll.listing.parts
            if are_slots(each.devices) and (pods is None or not pods.is_gone(each.pod_uid))
        }

    def _name(self, pair: Held) -> str:
        """`name_of`, remembered for slots in the record."""
        return self._names.get(pair) or directories.name_of(*pair)


def is_limited(state: NodeState, resource: ResourceName) -> bool:
    """Whether slots of this resource are limited by HAMi-core now."""
    return any(each.limiter == "hami-core" for each in state.hardware.offers_of.get(resource, ()))


def held_slots(state: NodeState) -> Iterator[tuple[Allocation | None, Held]]:
    """The slots of each allocation of the record; None as the allocation: of one that was displaced."""
    for each in state.allocations.values():
        for former in each.displaced:
            yield from ((None, (name, frozenset(ids))) for name, ids in former.devices.items() if are_slots(ids))
    for each in state.allocations.values():
        yield from ((each, (name, frozenset(ids))) for name, ids in each.from_kubelet.items() if are_slots(ids))


def are_slots(devices: Collection[DeviceID]) -> bool:
    """Whether these may be slots, also of a configuration that is not there any more: ids with a number behind a device."""
    return any(base_of(each) != each and unit_kind(each) is None for each in devices)


def has_pod(owner: Owner | None, poll: Poll) -> bool:
    """Whether the pod of a directory's owner is there still."""
    pods = poll.listing.directories
    return owner is not None and bool(owner.pod_uid) and pods is not None and not pods.is_gone(owner.pod_uid)
