"""
What the node's kubelet says in its files, for predictions.

Its configuration tells by which rules it decides, its checkpoints which CPUs and how much memory containers have that never
called us, and which devices. Of pods that are gone nothing counts. The files are read in a thread that is not waited for
longer than a second. What they come to is decided elsewhere (`core.admission.prediction`), from what is read here and said
on the bus; what cannot be read is said in its place.
"""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import anyio
import msgspec
import structlog

from topoalign.core.admission.kubelet_devices import dropped_of
from topoalign.core.admission.prediction import kubelet_rules
from topoalign.core.model.errors import NotFound, TopoalignError, clean
from topoalign.core.model.ids import AllocationID, ContainerName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import configuration, cpu_checkpoint, device_checkpoint, memory_checkpoint, pod_directories
from topoalign.kubelet.files.listed_pods import ListedPods
from topoalign.kubelet.files.node_state import DEVICE_PLUGINS, Held, held_cpus, held_devices, held_memory
from topoalign.kubelet.files.settling import SETTLE_SECONDS, SOCKET, started

# Why nothing is known of an allocation or pod, in a sentence of its own for each reason.


REMEDY = "name an allocation's id, or a pod as NAMESPACE/NAME"


def lists_nothing(target: str) -> bool | None:
    """Stands for `DeviceAllocations.lists` on a node without a kubelet: it is not known which pods run."""
    return None


def absence(target: str, listed: bool | None, *, by_kubelet: bool) -> str:
    """
    The sentence with which `explain` answers for a target without allocation, decision or ending.

    `by_kubelet`: whether a kubelet admits the pods of this node; `listed`: whether it lists a pod of this name, None if it
    was not asked yet.

    Raises NotFound where no such pod is known to run. One that the kubelet refused is among them: it does not list it, and
    most often it has not asked for a device either.
    """
    if listed:
        return f"{clean(target, 300)} runs here and has no device of ours: none of its containers asked for one"
    if not by_kubelet:
        raise NotFound("allocation or pod", target, REMEDY)
    raise NotFound(
        "allocation or pod" if listed is None else "allocation or running pod",
        target,
        f"{REMEDY}; a pod that the kubelet refused is not known here: `kubectl describe pod` has its reason",
    )


READ_SECONDS = 1.0
LATE = "the kubelet's files could not be read in time"
OWN_SETTINGS = "the node's own settings stand for the kubelet's configuration"
LONGEST = 400
"""Characters of a reason."""

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
        `rules`: the node's own, for what the kubelet's configuration does not tell. `version`: the kubelet's; empty: not
        known.
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
        """Those whose entries `stamp` asks for, or that it asks for itself; parents first."""
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET)
        self._turn = anyio.Lock()
        self._reading = False
        self._noted: tuple[str, ...] = ()
        self._ended_pods = frozenset[str]()
        """UIDs of pods with an allocation that has ended. It may be released while the files still list the pod."""

    async def read(self, state: NodeState, ended: Sequence[AllocationID] = ()) -> KubeletObserved:
        """
        Reads all files as they are now, in at most `READ_SECONDS`; later than that the result says so (`unknown`).

        `state`: that of the node before this reading. `ended`: live allocations whose containers are
        known to have ended; what the files list for their pods counts no more. The devices of other plugins are in no file.
        """
        rules = kubelet_rules(self._rules, f"{OWN_SETTINGS}: {LATE}")
        found = KubeletObserved(version=self._version, rules=rules, ended=tuple(ended), unknown=LATE)
        with anyio.move_on_after(self._seconds):
            async with self._turn:
                if not self._reading:  # else a thread that nobody waits for any more hangs in there: one is enough
                    found = await anyio.to_thread.run_sync(self._read, state, tuple(ended), abandon_on_cancel=True)
        self._tell(missing(found))
        return found

    def stamp(self) -> tuple[object, ...]:
        """
        A value that differs once a file was changed, made or removed, or the kubelet was started. No file is read for
        it, and none is asked for outside the kubelet's root directory, as its configuration may be: that file system may
        hang alone, and a kubelet that has read it anew was started.
        """
        return tuple(map(version_of, self._stamped))

    def _tell(self, notes: tuple[str, ...]) -> None:
        """Logs once per change, not once per question."""
        if notes == self._noted:
            return
        self._noted = notes
        if notes:
            log.warning("predictions do not have all that the kubelet has", notes=notes)
        else:
            log.info("predictions have all that the kubelet has")

    def _read(self, state: NodeState, ended: tuple[AllocationID, ...]) -> KubeletObserved:
        self._reading = True
        try:
            return self._read_all(state, ended)
        finally:
            self._reading = False

    def _read_all(self, state: NodeState, ended: tuple[AllocationID, ...]) -> KubeletObserved:
        hardware = state.hardware
        rules = self._rules
        unknown = ""
        try:
            found = configuration.load_configuration(self._config, rules.placement)
            rules = msgspec.structs.replace(found, compat=rules.compat)
        except TopoalignError as error:
            unknown = f"{OWN_SETTINGS}: {error.finding}"
        pods = ListedPods(self._root, self._ended_pods_of(state, ended))
        cpus = given("CPUs", lambda: held_cpus(self._root, hardware, rules, pods))
        memory = given("memory", lambda: held_memory(self._root, hardware, rules, pods))
        devices = given("resources", lambda: held_devices(self._root, hardware, pods))
        held = Held(cpus=cpus.cpus, blocks=memory.blocks, devices=devices.devices)
        self._ended_pods = pods.ended & pods.uids
        return KubeletObserved(
            version=self._version,
            rules=kubelet_rules(rules, clean(unknown, LONGEST)),
            registered=tuple(sorted(devices.registered)) if devices.registered is not None else None,
            entries=entries_of(held, pods.is_known_to_run),
            dropped=dropped_of(state.allocations, devices.dropped),
            ended=ended,
            memory=dict(memory.memory),
            memory_doubt=clean(memory.doubt or "", LONGEST),
            cpus_unknown=clean(cpus.finding or "", LONGEST),
            memory_unknown=clean(memory.finding or "", LONGEST),
            checkpoint_unknown=clean(devices.finding or "", LONGEST),
            pods_unknown=clean(pods.trouble or "", LONGEST),
            notes=tuple(clean(note, LONGEST) for note in pods.findings),
            started=started(self._root),
            settle_seconds=self._settle_seconds,
        )

    def _ended_pods_of(self, state: NodeState, ended: Collection[AllocationID]) -> frozenset[str]:
        live = state.allocations
        over = {live[name].pod_uid for name in ended if name in live and live[name].owner is not None}
        running = {each.pod_uid for each in live.values() if each.id not in ended}  # a static pod keeps its UID
        return (self._ended_pods | over) - running - {""}


def given(what: str, read: Callable[[], Held]) -> Held:
    """The result of `read`; an empty one with the reason where that fails. `what` names it in the reason."""
    try:
        return read()
    except TopoalignError as error:
        return Held(finding=f"which {what} the kubelet has is not known: {error.finding}")


def entries_of(held: Held, is_mounted: Callable[[str], bool]) -> tuple[CheckpointEntry, ...]:
    """
    One entry for each container that holds something, sorted by pod UID and name.

    `is_mounted`: whether a pod of this UID has a mounted volume.
    """
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


def missing(kubelet: KubeletObserved) -> tuple[str, ...]:
    """The reasons for everything that could not be read; empty: all was."""
    found = (
        kubelet.unknown,
        kubelet.rules.unknown,
        kubelet.cpus_unknown,
        kubelet.memory_unknown,
        kubelet.checkpoint_unknown,
        kubelet.pods_unknown,
    )
    return tuple(each for each in found if each)


def version_of(path: Path) -> tuple[int, ...]:
    """Differs after every write; empty where there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
