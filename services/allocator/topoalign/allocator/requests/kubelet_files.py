"""
What the node's kubelet says in its files, for predictions.

Its configuration tells by which rules it decides, its checkpoints which CPUs and how much memory containers have that never
called us; the devices are in our own record, as far as that is not behind the kubelet (`kubelet_devices`). Of pods that are
gone nothing counts. The files are read anew for each prediction, in a thread that is not waited for longer than a second.
What cannot be read is taken from what PodResources showed last, and from our own settings and record; that is said with the
answer.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import structlog

from topoalign.allocator.reconciliation.usage import spread
from topoalign.allocator.requests.kubelet_devices import (
    as_others,
    unaccounted,
    unrecorded,
    without_dropped,
    without_ended,
)
from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.events import Allocation, ContainerUsage, Owner
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import configuration
from topoalign.kubelet.files.listed_pods import ListedPods
from topoalign.kubelet.files.node_state import Container, Held, check_resources, held_cpus, held_devices, held_memory
from topoalign.kubelet.files.settling import SETTLE_SECONDS, settling
from topoalign.runtime.clock import SystemClock

READ_SECONDS = 1.0
LATE = ("the kubelet's files could not be read in time",)
INSTEAD = "what PodResources showed last counts instead"

log = structlog.get_logger("topoalign.allocator.requests.kubelet_files")


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction stands on."""

    state: NodeState
    rules: AdmissionRules
    registered: Mapping[ResourceName, frozenset[DeviceID]] | None = None
    """The resources that the kubelet has plugins for; None where its files do not tell."""
    missing: tuple[str, ...] = ()
    """What could not be read."""
    notes: tuple[str, ...] = ()
    """What is not as the kubelet has it, or may not be, and what else bears on it; `missing` is among it."""


class KubeletFiles:
    """Reads them."""

    def __init__(
        self,
        config: Path,
        root: Path,
        rules: AdmissionRules,
        seconds: float = READ_SECONDS,
        *,
        clock: Clock | None = None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        """`rules`: the node's own, for what the kubelet's configuration does not tell."""
        self._config, self._root, self._seconds = config, root, seconds
        self._clock, self._settle_seconds = clock or SystemClock(), settle_seconds
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET)
        self._turn = anyio.Lock()
        self._reading = False
        self._noted: tuple[str, ...] = ()

    async def known(self, state: NodeState, pod: PodRequest, ended: Sequence[Allocation] = ()) -> Known:
        """
        The state as the kubelet will have it when this pod comes, and its rules. Raises InvalidField as `check_resources`
        does.

        `ended`: allocations whose containers are known to have ended, which the record still has.
        """
        state, lagging = without_ended(state, ended)
        known = Known(state=state, rules=self._rules, missing=LATE, notes=LATE)
        with anyio.move_on_after(self._seconds):
            async with self._turn:
                if not self._reading:  # else a thread that nobody waits for any more hangs in there: one is enough
                    known = await anyio.to_thread.run_sync(self._read, state, ended, abandon_on_cancel=True)
        self._tell(known.missing)
        passed_over = check_resources(pod, state.hardware, known.registered)
        return msgspec.structs.replace(
            known, state=as_others(known.state, pod), notes=(*known.notes, *lagging, *passed_over)
        )

    def _tell(self, notes: tuple[str, ...]) -> None:
        """Logs once per change, not once per question."""
        if notes == self._noted:
            return
        self._noted = notes
        if notes:
            log.warning("predictions do not have all that the kubelet has", notes=notes)
        else:
            log.info("predictions have all that the kubelet has")

    def _read(self, state: NodeState, ended: Sequence[Allocation]) -> Known:
        self._reading = True
        try:
            return self._read_all(state, ended)
        finally:
            self._reading = False

    def _read_all(self, state: NodeState, ended: Sequence[Allocation]) -> Known:
        missing: list[str] = []
        rules = self._rules
        try:
            rules = configuration.load_configuration(self._config, rules.placement)
        except TopoalignError as error:
            missing.append(f"the node's own settings stand for the kubelet's configuration: {error.finding}")
        hardware = state.hardware
        pods = ListedPods(self._root)
        cpus = given("CPUs", lambda: held_cpus(self._root, hardware, rules, pods))
        memory = given("memory", lambda: held_memory(self._root, hardware, rules, pods))
        if state.usage is not None:
            cpus = cpus if cpus.finding is None else shown_cpus(state, cpus.finding)
            memory = memory if memory.finding is None else shown_memory(state, rules, memory.finding)
        devices = given("resources", lambda: held_devices(self._root, hardware, pods))
        missing += (held.finding for held in (cpus, memory, devices) if held.finding is not None)
        missing += [pods.trouble] if pods.trouble is not None else []
        state = without_dropped(state, devices)
        others = Held(cpus=cpus.cpus, blocks=memory.blocks, devices=unrecorded(state, devices, pods, ended)).allocations
        merged = msgspec.structs.replace(
            state,
            allocations={**state.allocations, **{allocation.id: allocation for allocation in others}},
            memory=memory.memory or state.memory,
        )
        starting = settling(self._root, self._clock.wall(), self._settle_seconds)
        waiting = unaccounted(state, devices)
        notes = (*missing, *pods.findings, *waiting, *(each for each in (memory.doubt, starting) if each is not None))
        return Known(
            state=merged,
            rules=rules,
            registered=devices.registered,
            missing=tuple(clean(each, 400) for each in missing),
            notes=tuple(clean(note, 400) for note in notes),
        )


def given(what: str, read: Callable[[], Held]) -> Held:
    """What this reads; nothing, and why, where it cannot be read."""
    try:
        return read()
    except TopoalignError as error:
        return Held(finding=f"which {what} the kubelet has is not known: {error.finding}")


def shown_cpus(state: NodeState, finding: str) -> Held:
    """What PodResources showed, in place of a file that told nothing because of `finding`."""
    cpus = {container_of(each.owner): parse_cpuset(each.cpus) for each in shown(state) if each.cpus}
    return Held(cpus=cpus, finding=f"{finding}; {INSTEAD}")


def shown_memory(state: NodeState, rules: AdmissionRules, finding: str) -> Held:
    """The same for memory. How a block is spread over several NUMA nodes is taken to be from the lowest on."""
    told = [block for each in shown(state) for block in each.memory]
    spread_out = spread(told, state.hardware, rules.reserved_memory)
    blocks = {
        container_of(each.owner): tuple(next(spread_out) for _ in each.memory) for each in shown(state) if each.memory
    }
    alone = NodeState(node=state.node)
    for allocation in Held(blocks=blocks).allocations:
        alone = alone.holding(allocation)
    return Held(blocks=blocks, memory=alone.memory, finding=f"{finding}; {INSTEAD}")


def shown(state: NodeState) -> tuple[ContainerUsage, ...]:
    return state.usage.containers if state.usage is not None else ()


def container_of(owner: Owner) -> Container:
    """PodResources knows no UIDs: the name of a pod stands for it."""
    return f"{owner.namespace}/{owner.pod}", owner.container
