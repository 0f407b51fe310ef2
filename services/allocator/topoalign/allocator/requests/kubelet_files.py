"""
Reads the files of the node's kubelet, for predictions.

The kubelet's configuration contains the rules by which it decides. Its checkpoints contain the CPUs, the memory and the
devices of containers, including containers for which it never called the allocator. The files are read in a thread, for
at most a second. The result is published for `core.admission.prediction`. Unreadable data is replaced by the reason.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import nothing_ended
from topoalign.allocator.reconciliation.pod_resources import Listed
from topoalign.core.admission.kubelet_devices import dropped_of
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.errors import TopoalignError, Unavailable, clean
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, ContainerName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import (
    cpu_checkpoint,
    device_checkpoint,
    kubelet_configuration,
    memory_checkpoint,
    pod_directories,
)
from topoalign.kubelet.files.node_state import (
    DEVICE_PLUGINS,
    SETTLE_SECONDS,
    SOCKET,
    ManagerHoldings,
    held_cpus,
    held_devices,
    held_memory,
    started,
)
from topoalign.kubelet.files.pod_directories import ListedPods
from topoalign.kubelet.files.reading import file_version
from topoalign.runtime.clock import until_tick
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.runtime.thread_reader import ThreadReader

READ_SECONDS = 1.0
LATE = "the kubelet's files could not be read in time"
OWN_SETTINGS = "the node's own settings stand for the kubelet's configuration"
LONGEST = 400
"""Maximum length of a reason in characters."""

log = structlog.get_logger("topoalign.allocator.requests.kubelet_files")


class KubeletFiles:
    """Reads the kubelet's configuration and checkpoints into a `KubeletObserved`."""

    def __init__(
        self,
        config: Path,
        root: Path,
        rules: AdmissionRules,
        seconds: float = READ_SECONDS,
        *,
        version: str = "",
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        """
        `rules`: the node's, for settings not in the kubelet's configuration. `version`: the kubelet's; empty: unknown.
        """
        self._config = config
        self._root = root
        self._seconds = seconds
        self._version = version
        self._settle_seconds = settle_seconds
        paths = (
            config,
            root / cpu_checkpoint.NAME,
            root / memory_checkpoint.NAME,
            root / DEVICE_PLUGINS / device_checkpoint.NAME,
            root / SOCKET,
            root / pod_directories.NAME,
        )
        self._stamped = [path for path in paths if path.is_relative_to(root)]
        self.directories = (root, root / DEVICE_PLUGINS, root / pod_directories.NAME)
        """The directories whose changes may change `stamp`; parents first."""
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET)
        self._reader: ThreadReader[KubeletObserved] = ThreadReader()
        self._noted: tuple[str, ...] = ()
        self._ended_pods = frozenset[str]()
        """UIDs of ended pods that the files still list. Their allocations may have been released already."""

    async def read(self, state: NodeState, ended: Sequence[AllocationID] = ()) -> KubeletObserved:
        """
        Reads all files within the time limit (`READ_SECONDS` by default). If that takes longer, the result has the
        reason (`unknown`). `state`: the node's state before this reading. `ended`: live allocations whose containers
        have ended. Pods of which all allocations have ended do not count as holders of devices, CPUs or memory.
        """
        try:
            found = await self._reader.read(lambda: self._read(state, tuple(ended)), self._seconds)
        except TimeoutError:
            rules = to_kubelet_rules(self._rules, f"{OWN_SETTINGS}: {LATE}")
            found = KubeletObserved(version=self._version, rules=rules, ended=tuple(ended), unknown=LATE)
        self._log_unreadable(found)
        return found

    def stamp(self) -> tuple[object, ...]:
        """
        A value that changes if a file is changed, created or removed, or if the kubelet starts. Files outside its root
        directory are omitted: their file system may hang, and the kubelet reads them only when it starts.
        """
        return tuple(map(file_version, self._stamped))

    def _log_unreadable(self, found: KubeletObserved) -> None:
        """Logs the reasons for missing data when they change."""
        parts = (
            found.unknown,
            found.rules.unknown,
            found.cpus_unknown,
            found.memory_unknown,
            found.checkpoint_unknown,
            found.pods_unknown,
        )
        notes = tuple(each for each in parts if each)
        if notes == self._noted:
            return
        self._noted = notes
        if notes:
            log.warning("predictions lack data of the kubelet", notes=notes)
        else:
            log.info("predictions have all data of the kubelet")

    def _read(self, state: NodeState, ended: tuple[AllocationID, ...]) -> KubeletObserved:
        hardware = state.hardware
        rules = self._rules
        unknown = ""
        try:
            found = kubelet_configuration.load_configuration(self._config, rules.placement)
            rules = msgspec.structs.replace(found, compat=rules.compat)
        except TopoalignError as error:
            unknown = f"{OWN_SETTINGS}: {error.finding}"
        live = state.allocations
        over = {live[name].pod_uid for name in ended if name in live and live[name].owner is not None}
        running = {each.pod_uid for each in live.values() if each.id not in ended}  # a static pod keeps its UID
        pods = ListedPods(self._root, (self._ended_pods | over) - running - {""})
        cpus = read_or_explain("CPUs", lambda: held_cpus(self._root, hardware, rules, pods))
        memory = read_or_explain("memory", lambda: held_memory(self._root, hardware, rules, pods))
        devices = read_or_explain("resources", lambda: held_devices(self._root, hardware, pods))
        held = ManagerHoldings(cpus=cpus.cpus, blocks=memory.blocks, devices=devices.devices)
        self._ended_pods = pods.ended & pods.uids
        return KubeletObserved(
            version=self._version,
            rules=to_kubelet_rules(rules, clean(unknown, LONGEST)),
            registered=tuple(sorted(devices.registered)) if devices.registered is not None else None,
            entries=held_entries(held, pods.is_known_to_run),
            dropped=dropped_of(state.allocations, devices.dropped),
            ended=ended,
            memory=dict(memory.memory),
            memory_doubt=clean(memory.uncertainty or "", LONGEST),
            cpus_unknown=clean(cpus.finding or "", LONGEST),
            memory_unknown=clean(memory.finding or "", LONGEST),
            checkpoint_unknown=clean(devices.finding or "", LONGEST),
            pods_unknown=clean(pods.reason_unknown or "", LONGEST),
            notes=tuple(clean(note, LONGEST) for note in pods.findings),
            started=started(self._root),
            settle_seconds=self._settle_seconds,
        )


def read_or_explain(what: str, read: Callable[[], ManagerHoldings]) -> ManagerHoldings:
    """The result of `read`; if that fails, an empty result with the reason, in which `what` names the data."""
    try:
        return read()
    except TopoalignError as error:
        return ManagerHoldings(finding=f"which {what} the kubelet has is not known: {error.finding}")


def held_entries(held: ManagerHoldings, is_mounted: Callable[[str], bool]) -> tuple[CheckpointEntry, ...]:
    """One entry for each container, sorted by pod UID and name. `is_mounted`: whether the pod has a mounted volume."""
    return tuple(
        CheckpointEntry(
            pod_uid=uid,
            container=ContainerName(container),
            cpus=format_cpuset(held.cpus.get((uid, container), ())),
            memory=held.blocks.get((uid, container), ()),
            devices=dict(held.devices.get((uid, container), {})),
            mounted=is_mounted(uid),
        )
        for uid, container in sorted({*held.cpus, *held.blocks, *held.devices})
    )


POLL_SECONDS = 0.5
"""Seconds between two polls: changes are published within a second."""
REREAD_SECONDS = 5.0
"""Seconds between two readings of files whose modification times have not changed."""
LAGS = "the record may lag behind the kubelet, and what containers had that have ended meanwhile counts as held"
"""The reason in answers while it is unknown which containers have ended."""
PAUSE_SECONDS = 10.0
"""Seconds from a reading that timed out to the next one."""


class KubeletWatch:
    """
    Reads the kubelet's files and the devices of its plugins into the ledger, which publishes them in `UsageObserved`.
    So the node and every subscriber predict from the same facts.

    Only the modification times of the files are polled: every half second, or, on an idle node, half a second after the
    kernel reports a change in their directories. Files and devices are read after a change, and at least every five
    seconds, because a pod's volumes disappear without changing these times. A pod that ends does not change them
    either. So while allocations are live, PodResources is polled every half second for ended containers.

    Devices are polled every half second while other plugins have devices or the poll fails, because the kubelet keeps
    its checkpoint when a plugin disconnects (v1.36.3, devicemanager `PluginDisconnected`).

    If the files cannot be read in time, the last reading stays, with its time. A retry follows after `PAUSE_SECONDS`.
    """

    def __init__(
        self,
        ledger: Ledger,
        files: KubeletFiles,
        clock: Clock,
        devices: Callable[[Collection[ResourceName]], Awaitable[Listed]] | None = None,
        ended: Callable[[], Awaitable[Sequence[Allocation]]] = nothing_ended,
        changes: DirectoryChanges | None = None,
    ) -> None:
        """
        `devices` returns the devices of all plugins except those of the given resources; None: not read. `ended`
        returns ended containers' live allocations. Both raise Unavailable. `changes`: None: no changes are reported.
        """
        self._ledger = ledger
        self._files = files
        self._clock = clock
        self._devices = devices
        self._ended = ended
        self._changes = changes or DirectoryChanges()
        self._turn = anyio.Lock(fast_acquire=True)
        self._begun = self._done = 0
        """Of the readings by `read_all`: how many have begun, and the number of the last completed one."""
        self._stamp: tuple[object, ...] | None = None
        """The stamp of the last reading; None: the files must be read again."""
        self._read_at = 0.0
        """Monotonic seconds."""
        self._again = 0.0
        """Monotonic seconds before which `poll` does not begin a reading, after one that timed out."""
        self._answer: tuple[Listed | None, str] = (None, "")
        """The devices of the last poll, or None and why they are unknown."""
        self._is_ended_known = True
        """Whether the last reading knew which containers have ended."""
        self._last: tuple[KubeletObserved, float] | None = None
        """The last reading that did not time out, and its Unix time in seconds."""

    async def run(self) -> None:
        """
        Polls every `POLL_SECONDS` while an allocation is live or a file may have changed, and every `REREAD_SECONDS`, until
        cancelled.
        """
        while True:
            change = self._changes.next_change
            is_watched = self._known() is not None and self._changes.watch(*self._files.directories)
            await self.poll()
            is_idle = not self._may_have_gone() and not self._ledger.state.allocations
            if is_watched and is_idle and self._clock.monotonic() >= self._again:
                await self._changes.wait(change, self._clock, until_tick(self._clock, REREAD_SECONDS))
                if not change.is_set():
                    self._stamp = None
                    continue
            await self._clock.sleep(until_tick(self._clock, POLL_SECONDS))

    async def read_all(self) -> None:
        """Reads all files and devices now. One reading serves all callers that came before it began."""
        begun = self._begun
        async with self._turn:
            if self._done <= begun:
                self._begun += 1
                await self._read(self._changed())
                self._done = self._begun

    async def poll(self) -> None:
        """As `read_changed`, but also reads if another container has ended. Reads nothing without the topology."""
        ended = set[AllocationID]()
        if self._known() is not None:
            with suppress(Unavailable):
                ended = {each.id for each in await self._ended()}
                self._stamp = self._stamp if self._is_ended_known else None
        async with self._turn:
            if self._ledger.state.topology is None:
                return
            known = self._known()
            if known is not None and self._clock.monotonic() < self._again:
                self._observe(known, *await self._listed())
            else:
                if known is not None and not ended <= {*known.ended}:
                    self._stamp = None
                await self._read_changed()

    async def read_changed(self) -> None:
        """Reads the files if one has changed or the reading is older than `REREAD_SECONDS`, and the devices if necessary."""
        async with self._turn:
            await self._read_changed()

    async def _read_changed(self) -> None:
        known = self._known()
        stamp = self._changed()
        if known is None or stamp != self._stamp or self._clock.monotonic() >= self._read_at + REREAD_SECONDS:
            await self._read(stamp)
        else:
            self._observe(known, *(await self._listed() if self._may_have_gone() else self._answer))

    def _known(self) -> KubeletObserved | None:
        """The last published reading."""
        usage = self._ledger.state.usage
        return usage.kubelet if usage is not None else None

    def _changed(self) -> tuple[object, ...]:
        """A value that changes if a file or the hardware changes."""
        topology = self._ledger.state.topology
        place = (topology.epoch, topology.revision) if topology is not None else ()
        return (*self._files.stamp(), place)

    async def _read(self, stamp: tuple[object, ...]) -> None:
        """Reads the files and devices. `stamp`: from before the reading, so that later changes are read again."""
        found: list[tuple[Listed | None, str]] = []

        async def ask() -> None:
            found.append(await self._listed())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            notes: tuple[str, ...] = ()
            ended: list[AllocationID] = []
            try:
                ended = [each.id for each in await self._ended()]
            except Unavailable as error:
                notes = (f"{error.finding}: {LAGS}",)
            self._is_ended_known = not notes
            kubelet = await self._files.read(self._ledger.state, ended)
        self._read_at = self._again = self._clock.monotonic()
        if kubelet.unknown:
            self._stamp = None
            self._again += PAUSE_SECONDS
        else:
            self._stamp = stamp
            self._last = kubelet, self._clock.wall()
        if kubelet.unknown and self._last is not None:
            last, at = self._last
            stale = f"{kubelet.unknown}: what was read at {datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ} counts"
            kubelet = msgspec.structs.replace(last, ended=kubelet.ended, stale=stale)
        self._observe(msgspec.structs.replace(kubelet, notes=(*kubelet.notes, *notes)), *found[0])

    def _may_have_gone(self) -> bool:
        """Whether other plugins may have disconnected, which the files do not show."""
        listed, _ = self._answer
        return listed is None or not listed.keys() <= self._ledger.state.hardware.offers_of.keys()

    async def _listed(self) -> tuple[Listed | None, str]:
        """Polls the devices of all plugins; None with the reason if they are unknown."""
        if self._devices is None:
            return None, ""
        try:
            self._answer = await self._devices(self._ledger.state.hardware.offers_of.keys()), ""
        except Unavailable as error:
            self._answer = None, clean(error.finding, LONGEST)
        return self._answer

    def _observe(self, kubelet: KubeletObserved, listed: Listed | None, unknown: str) -> None:
        """Publishes the reading with the `listed` devices, except topoalign's own, which discovery publishes."""
        unconfirmed = clean(self._ledger.unconfirmed or "", LONGEST)
        ours = self._ledger.state.hardware.offers_of
        others = {name: parts for name, parts in listed.items() if name not in ours} if listed is not None else None
        found = msgspec.structs.replace(kubelet, devices=others, devices_unknown=unknown, record_doubt=unconfirmed)
        self._ledger.observe(kubelet=found)
