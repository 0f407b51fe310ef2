"""
Reads the whole node from NVML and /sys.

The links between GPUs are read only when the set of GPUs changes, and once a minute, because reading them takes most
calls and they rarely change. But NVLinks come up late if the fabric manager starts late, and go down when they fail.

A GPU that fails does not affect the others. If it still reports its uuid, it is listed as unhealthy, with its last
values. Otherwise, it is omitted and reported as a finding. NVML is reopened at growing intervals while a GPU fails, and
once when the GPUs in /sys change, because a process that has NVML open does not see GPUs that return or are added.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from topoalign.core.model.errors import DriverFault, InvalidField, quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import NVML_LEVEL, Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.ports import Clock, Inventory, Listener
from topoalign.discovery.drivers.auto import files_below
from topoalign.discovery.drivers.nvml.gpu_reading import (
    End,
    Judged,
    NvLinkTable,
    Profiles,
    pair_ends,
    read_ends,
    read_gpu,
)
from topoalign.discovery.drivers.nvml.nvml_events import NvmlEvents
from topoalign.discovery.drivers.nvml.nvml_library import (
    GPU_IS_LOST,
    NO_PERMISSION,
    OF_THE_LIBRARY,
    RESET_REQUIRED,
    UNKNOWN,
    CallFailed,
    Handle,
    Library,
)
from topoalign.discovery.drivers.reading_health import nic_health, unhealthy
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.driver_thread import CallProgress, DriverThread

if TYPE_CHECKING:  # not needed before the first measurement
    from topoalign.core.model.processes import DeviceUse

_UUID = re.compile(r"[A-Za-z0-9_.:-]{1,96}")

LOST = {GPU_IS_LOST, RESET_REQUIRED}
"""Error codes of a GPU that works again only after a reset."""

REOPEN_SECONDS = 60.0
"""
The shortest time in seconds between two openings of NVML while a GPU fails. It is doubled after each reopening but the
first, up to `LONGEST_REOPEN_SECONDS`. Opening NVML wakes every GPU and fills the kernel log, and events of the other
GPUs are not received meanwhile.
"""
LONGEST_REOPEN_SECONDS = 960.0
REMEDY = "run nvidia-smi on the node; after an update of the driver, restart what uses it"
CONNECTIONS_SECONDS = 60.0
"""Seconds between two readings of the links while the GPUs stay the same."""

Pair = tuple[DeviceID, DeviceID]


@dataclass(frozen=True)
class Connections:
    """The links between the GPUs of one machine."""

    of: tuple[tuple[DeviceID, int, str | None], ...] = ()
    """The GPUs whose links were read: uuid, index, PCI address."""
    levels: Mapping[Pair, PcieClass | None] = field(default_factory=dict)
    nvlinks: NvLinkTable = field(default_factory=lambda: NvLinkTable({}, {}, ()))
    whole: bool = False
    """False: a GPU failed meanwhile, so the next reading reads the links again."""
    since: float = 0.0
    """When the links were read, in monotonic seconds."""


class NvmlDriver:
    """Reads NVML, and the files below a root, `/` for this host."""

    source = "nvml"

    def __init__(self, root: Path, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds and holds for each call."""
        self._root = root
        self._clock = clock
        self._thread = DriverThread("NVML", clock, deadline)
        self._turn = anyio.Lock(fast_acquire=True)
        """Held by a reading or a measurement, because the thread does one at a time."""
        self._nvml = Library()
        self._connections = Connections()
        self._profiles: Profiles = {}
        self._last: dict[DeviceID, Gpu] = {}
        """All GPUs that were ever read, with their last known values."""
        self._failing = False
        """Whether a GPU fails in the current reading."""
        self._nameless = False
        """Whether a GPU that is not lost does not report its uuid in the current reading."""
        self._tries = 0
        """How often NVML has been reopened because of a GPU that still fails."""
        self._opened = clock.monotonic()
        self._addresses: set[str | None] = set()
        """PCI addresses of the GPUs that /sys had when NVML was opened."""
        self._reopen = False
        """Whether the next reading opens NVML again."""
        self._answering: frozenset[DeviceID] = frozenset()
        """GPUs that answered all calls of the newest reading."""
        self._events = NvmlEvents(clock, deadline)

    async def read(self) -> Inventory:
        """Reads all GPUs and NICs. Raises DriverFault, for example if a call exceeds its deadline."""
        async with self._turn:
            if self._reopen:
                await self._events.let_go()
            inventory = await self._thread.run(self._read)
            self._events.listen_to(self._answering)
            return inventory

    async def measure(self) -> "tuple[DeviceUse, ...]":
        """Measures all GPUs and MIG instances that report their ids. Raises DriverFault as `read` does."""
        measured: tuple[DeviceUse, ...] = ()
        async with self._turn:
            # without the shield, cancellation would leave the thread busy, and the next reading would report a fault
            with anyio.CancelScope(shield=True):
                measured = await self._thread.run(self._measure)
        return measured

    async def watch(self, listener: Listener) -> None:
        """Receives events, beginning with the first reading in which NVML works."""
        await self._events.run(listener)

    def _measure(self, steps: CallProgress) -> "tuple[DeviceUse, ...]":
        from topoalign.discovery.drivers.nvml.use import read_gpu_use  # not needed before the first measurement

        try:
            if self._nvml.open(steps):
                self._reopen = True  # the next reading reopens NVML, and compares its GPUs with /sys
            devices, _ = self._devices()
            now = self._clock.wall()
            return tuple(
                use for uuid, (_, device) in devices.items() for use in read_gpu_use(self._nvml, device, uuid, now)
            )
        except CallFailed as error:
            raise DriverFault(f"NVML does not work: {error}", REMEDY) from error

    def _read(self, steps: CallProgress) -> Inventory:
        steps("a reading of /sys")
        files = files_below(self._root)
        self._failing = self._nameless = False
        addresses = {gpu.pci for gpu in files.gpus}
        try:
            if self._nvml.open(steps, anew=self._reopen):
                self._opened = self._clock.monotonic()
                self._addresses = addresses
                self._reopen = False
                self._profiles.clear()
            devices, findings = self._devices()
            judged = {uuid: self._read_gpu(i, uuid, device, files) for uuid, (i, device) in devices.items()}
            self._connect({uuid: device for uuid, (_, device) in devices.items()}, judged)
        except CallFailed as error:
            self._reopen = True
            raise DriverFault(f"NVML does not work: {error}", REMEDY) from error
        addresses_read = {each.gpu.pci for each in judged.values()}
        silent = [gpu.pci for gpu in files.gpus if gpu.pci is not None and gpu.pci not in addresses_read]
        reported = len(devices) + len(findings)
        if silent and reported < len(files.gpus):
            findings += (
                f"NVML reports {reported} of the {len(files.gpus)} GPUs in /sys: {quoted(silent)} left out, because"
                " another driver has them, or they are hidden from this service",
            )
        inventory = self._combine(files, judged, findings)
        self._last |= {gpu.id: gpu for gpu in inventory.topology.gpus}
        self._answering = frozenset(uuid for uuid, each in judged.items() if each.answers)
        self._reopen = addresses != self._addresses or self._is_reopen_due()
        return inventory

    def _combine(self, files: Topology, judged: Mapping[DeviceID, Judged], findings: tuple[str, ...]) -> Inventory:
        nvlinks = self._connections.nvlinks
        gpus = tuple(
            msgspec.structs.replace(
                each.gpu, switch_links=nvlinks.to_switch.get(uuid, 0), links_down=nvlinks.down.get(uuid, 0)
            )
            for uuid, each in judged.items()
        )
        links = _combine_links(files, gpus, self._connections)
        topology = msgspec.structs.replace(files, gpus=gpus, links=links)
        try:
            validate(topology)
        except InvalidField as error:
            raise DriverFault(f"NVML reports an impossible machine: {error.finding}", error.remedy) from error
        health: dict[DeviceID, DeviceHealth] = {uuid: each.health for uuid, each in judged.items()}
        return Inventory(
            topology=topology,
            health=health | {nic.id: nic_health(nic) for nic in files.nics},
            findings=(*findings, *(f for each in judged.values() for f in each.findings), *nvlinks.findings),
            awaiting_reset=frozenset(uuid for uuid, each in judged.items() if each.awaits_reset),
            nameless=self._nameless,
        )

    def _is_reopen_due(self) -> bool:
        self._tries *= self._failing
        pause = backoff_seconds(self._tries, REOPEN_SECONDS, LONGEST_REOPEN_SECONDS)
        anew = self._failing and self._clock.monotonic() - self._opened >= pause
        self._tries += anew
        return anew

    def _note_failure(self, error: CallFailed) -> None:
        if error.code in OF_THE_LIBRARY:
            raise error
        self._failing |= error.code != NO_PERMISSION  # reopening NVML would not grant permissions

    def _devices(self) -> tuple[dict[DeviceID, tuple[int, Handle]], tuple[str, ...]]:
        devices: dict[DeviceID, tuple[int, Handle]] = {}
        findings = []
        for index in range(int(self._nvml.ask("nvmlDeviceGetCount"))):
            try:
                device = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
                uuid = self._nvml.uuid(device)
                if not _UUID.fullmatch(uuid) or uuid in devices:
                    raise CallFailed("nvmlDeviceGetUUID", UNKNOWN, f"{quoted([uuid])} names no device, or two")
                devices[DeviceID(uuid)] = (index, device)
            except CallFailed as error:
                self._note_failure(error)
                self._nameless |= error.code not in LOST
                findings.append(f"GPU {index} does not answer and is left out: {error}")
        return devices, tuple(findings)

    def _read_gpu(self, index: int, uuid: DeviceID, device: Handle, files: Topology) -> Judged:
        try:
            return read_gpu(self._nvml, index, uuid, device, files, self._profiles)
        except CallFailed as error:
            self._note_failure(error)
            known = self._last.get(uuid) or files.gpu_by_id.get(uuid) or Gpu(id=uuid, index=index)
            finding = f"GPU {index} ({uuid}) fails: {error}"
            return Judged(
                msgspec.structs.replace(known, index=index),
                unhealthy(str(error)),
                (finding,),
                awaits_reset=error.code in LOST,
                answers=False,
            )

    def _connect(self, devices: Mapping[DeviceID, Handle], judged: Mapping[DeviceID, Judged]) -> None:
        of = tuple((uuid, each.gpu.index, each.gpu.pci) for uuid, each in judged.items())
        had = self._connections
        now = self._clock.monotonic()
        known = had.whole and had.of == of
        if known and now - had.since < CONNECTIONS_SECONDS:
            return
        ends: dict[DeviceID, list[End]] = {}
        levels: dict[Pair, PcieClass | None] = {}
        failing: list[str] = []
        for uuid, device in devices.items():
            try:
                ends[uuid] = read_ends(self._nvml, device)
                for peer in [each for each in ends if each != uuid]:
                    level = self._nvml.maybe("nvmlDeviceGetTopologyCommonAncestor", device, devices[peer])
                    levels[uuid, peer] = NVML_LEVEL.get(level)
            except CallFailed as error:
                self._note_failure(error)
                failing.append(f"the connections of {uuid} cannot be read: {error}")
        if failing and known:  # a GPU that fails keeps the NVLinks that it had
            findings = tuple(dict.fromkeys((*had.nvlinks.findings, *failing)))
            self._connections = replace(had, nvlinks=replace(had.nvlinks, findings=findings))
            return
        addresses = {uuid: address for uuid, _, address in of if address is not None}
        nvlinks = pair_ends(ends, addresses)
        self._connections = Connections(
            of=of,
            levels=levels,
            nvlinks=replace(nvlinks, findings=(*nvlinks.findings, *failing)),
            whole=not failing,
            since=now,
        )


def _combine_links(files: Topology, gpus: tuple[Gpu, ...], connections: Connections) -> tuple[Link, ...]:
    # the PCIe class of a pair of GPUs is NVML's if it reports one; all others are those of the files
    by_address = {gpu.pci: gpu.id for gpu in files.gpus}
    in_files = {gpu.id: by_address.get(gpu.pci, gpu.id) for gpu in gpus} | {nic.id: nic.id for nic in files.nics}
    links = []
    for a, b in combinations(in_files, 2):
        drawn = files.link_by_pair.get((in_files[a], in_files[b]))
        level = connections.levels.get((a, b)) or connections.levels.get((b, a))
        pcie = level or (drawn.pcie if drawn is not None else None)
        nvlinks = connections.nvlinks.pairs.get((a, b), 0)
        if pcie is not None or nvlinks:
            links.append(Link(a=a, b=b, pcie=pcie, fabric_links=nvlinks))
    return tuple(links)
