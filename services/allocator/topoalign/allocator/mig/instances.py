"""
Creates MIG instances before an Allocate is answered, and destroys them when the allocation has ended.

The steps, and what the next start does if the process ended after each step:

    1  the log has the intent           no instance exists: the intent is removed
    2  the GPU instance is created      it is at the placement of the intent and did not exist before: destroyed
    3  its compute instance is created  the same
    4  the log has id and uuid          no allocation has it: destroyed
    5  the allocation is in the journal it stays
    6  the allocation has ended         as after 4
    7  the instance is destroyed        nothing exists with this id, placement and uuid: the entry is removed

Other users' instances are never touched. While the driver does not answer, an instance to destroy stays in the log and
its placement counts as taken. A placement is skipped if the driver has no free slices there, or the created instance
has the UUID of another container's instance: after a reboot the kubelet restarts that container without a call.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger, container_title
from topoalign.allocator.mig.instance_log import InstanceLog, OwnInstance
from topoalign.allocator.ports import Poll
from topoalign.allocator.reconciliation.displacement import devices_displaced_by
from topoalign.core import wire
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import DriverFault, NoFit, StateFault, TopoalignError, quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.maintenance import DevicesRequest
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile, find_place
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import gpus_by_instances, instances_of, lost_instances
from topoalign.runtime.clock import until_tick
from topoalign.runtime.tasks import wait_for_first


class GpuInstance(NamedTuple):
    """An existing GPU instance, of any user."""

    id: int
    """NVML id on its GPU. A later instance can get the same id."""
    profile: str
    """`1g.10gb`. Several profiles can have the same placements: on an A100, 3g.20gb and 4g.20gb at slice 0."""
    placement: MigPlacement
    uuids: frozenset[DeviceID]
    """UUIDs of the MIG devices in it, one for each compute instance."""


class InstanceInUse(DriverFault):
    """
    Raised if a MIG instance is not destroyed because processes use it.

    Remedy: End the processes that use it; `topoalign gpu usage` lists them.
    """


class PlaceTaken(NoFit):
    """
    Raised if the driver has no free slices at a placement that seemed free.

    Nothing was created, and the driver works.

    Remedy: Find out with `nvidia-smi mig -lgi` who uses the slices.
    """

    def __init__(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> None:
        super().__init__(
            f"{gpu}: the driver has no room for a MIG instance {profile} at slice {placement.start}",
            "see with `nvidia-smi mig -lgi` who has it",
        )


class InstanceMaker(Protocol):
    """Creates and destroys MIG instances. After a DriverFault, `there` shows the result later."""

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        """All GPU instances of a GPU. Raises DriverFault."""

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        """Creates a GPU instance with one compute instance that uses all of it. Raises DriverFault and PlaceTaken."""

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        """Destroys the GPU instance with this id and all in it, if it exists. Raises DriverFault, InstanceInUse."""


ASK_SECONDS = 5.0


async def report_fault(bus: Bus, node: NodeName, gpu: DeviceID, why: str) -> None:
    """Reports to discovery that MIG instances of a GPU cannot be changed, so that it publishes the GPU as unhealthy."""
    request = DevicesRequest(node=node, devices=(gpu,), reason=f"its MIG instances cannot be changed: {why}")
    with suppress(TopoalignError):  # discovery may be unavailable: the fault is reported again later
        answer = await bus.ask(wire.devices_subject(node, "report"), msgspec.json.encode(request), ASK_SECONDS)
        wire.decode_answer(answer, dict[DeviceID, DeviceHealth])


class CreatedInstance(NamedTuple):
    """The existing instance of a slot."""

    uuid: DeviceID
    amount: Amount
    """The container's amount of the GPU."""


class InstancesNeedKubelet(NoFit):
    """
    Raised for a request over the bus for slots that would become MIG instances.

    Remedy: Use `migStrategy` `single` or `mixed` on a node without a kubelet.
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        super().__init__(
            f"slots of {quoted(sorted(gpus))} become MIG instances, which are created only for a kubelet",
            "use migStrategy single or mixed on a node without a kubelet",
        )


def check_no_instances(hardware: Topology, allocations: Iterable[Allocation]) -> None:
    """Raises InstancesNeedKubelet for allocations with slots that become MIG instances."""
    by_instances = gpus_by_instances(hardware)
    if not by_instances:
        return
    gpus = {base_of(device) for each in allocations for device in each.device_ids} & by_instances.keys()
    if gpus:
        raise InstancesNeedKubelet(gpus)


log = structlog.get_logger("topoalign.allocator.mig")


class NoPlace(NoFit):
    """
    Raised if no profile with enough memory has a free placement on a GPU.

    Remedy: Request less memory, or wait until other containers end.
    """

    def __init__(self, gpu: DeviceID, memory: int) -> None:
        self.gpu = gpu
        super().__init__(
            f"{gpu} has no free place for a MIG instance of {memory} bytes",
            "ask for less memory, or wait until other containers have ended; `topoalign gpu list --json` shows the places",
        )


class Instances:
    """Creates and destroys the instances of one node, one at a time, because the driver does not support more."""

    def __init__(self, instance_log: InstanceLog, maker: InstanceMaker, when_changed: Callable[[], None]) -> None:
        """`when_changed` is called when `failing` has changed."""
        self._log = instance_log
        self._maker = maker
        self._when_changed = when_changed
        self._turn = anyio.Lock(fast_acquire=True)
        self._granting: set[DeviceID] = set()
        """UUIDs of instances for an Allocate that is not recorded yet."""
        self._over: set[OwnInstance] = set()
        """Instances that are known to be gone, although the log still has them."""
        self._used: set[OwnInstance] = set()
        """Instances to destroy when no process uses them any more; each is logged once."""
        self.failing: dict[DeviceID, str] = {}
        """GPU -> why its instances cannot be created or destroyed, until that works again."""

    @property
    def own(self) -> Sequence[OwnInstance]:
        """The own instances, including those being created and those to be destroyed."""
        return self._log.instances

    def note(self) -> str | None:
        """For /readyz: why instances cannot be created, or may be left over; None: neither."""
        reasons = [f"{gpu}: {why}" for gpu, why in self.failing.items()]
        reasons += [self._log.incomplete] if self._log.incomplete is not None else []
        return f"MIG instances: {'; '.join(reasons)}" if reasons else None

    async def make(
        self,
        slot: DeviceID,
        profiles: Sequence[MigProfile],
        memory: int,
        spared: Collection[MigPlacement] = (),
        in_use: Collection[DeviceID] = (),
    ) -> MigDevice:
        """
        Creates the smallest instance with at least this memory (bytes) for a slot. Uses a `spared` placement only if
        there is no other, and never a UUID that is `in_use`. The instance is protected until `release`. Raises NoPlace,
        DriverFault and StateFault.
        """
        gpu = base_of(slot)
        skipped = set[MigPlacement]()
        with anyio.CancelScope(shield=True):
            async with self._turn:
                try:
                    made: MigDevice | None = None
                    while made is None:
                        there = await self._maker.there(gpu)
                        noted = [each.placement for each in self.own if each.gpu == gpu]
                        taken = {*noted, *skipped, *(each.placement for each in there)}
                        found = find_place(profiles, {*taken, *spared}, memory) or find_place(profiles, taken, memory)
                        if found is None:
                            raise NoPlace(gpu, memory)
                        profile, place = found
                        before = tuple(sorted(each.id for each in there))
                        intent = OwnInstance(slot=slot, profile=profile.name, placement=place, before=before)
                        made = await self._create_as(intent, in_use)
                        skipped.add(place)
                except DriverFault as fault:
                    self._fails(gpu, fault)
                    raise
                self._works(gpu)
                self._granting.add(made.uuid)
                return made
        raise AssertionError("a shielded scope is not left early")

    async def _create_as(self, intent: OwnInstance, in_use: Collection[DeviceID]) -> MigDevice | None:
        self._log.replace((), (intent,))
        try:
            made = await self._maker.make(intent.gpu, intent.profile, intent.placement)
            if made.uuid not in in_use:
                noted = msgspec.structs.replace(intent, id=made.gpu_instance, uuid=made.uuid)
                self._log.replace((intent,), (noted,))
                return made
        except PlaceTaken as refusal:
            log.warning("a MIG instance cannot be created at its placement", slot=intent.slot, finding=refusal.finding)
            self._over.add(intent)  # an instance there is another user's
            self._forget(intent)
            return None
        except (DriverFault, StateFault):
            await self._undo_quietly(intent)
            raise
        log.warning(
            "a MIG instance is destroyed again: another container has its uuid", slot=intent.slot, uuid=made.uuid
        )
        await self._undo_quietly(intent)
        return None

    def has(self, slot: DeviceID, uuid: DeviceID) -> bool:
        """Whether this instance was created for this slot, in this boot of the node, and is not known to be gone."""
        return any(each.slot == slot and each.uuid == uuid for each in self.own if each not in self._over)

    def keep(self, uuid: DeviceID) -> None:
        """Protects an existing instance from `destroy_unused` until `release`."""
        self._granting.add(uuid)

    def release(self, uuid: DeviceID) -> None:
        """Ends the protection of `make` or `keep`: `destroy_unused` destroys the instance if no allocation has it."""
        self._granting.discard(uuid)

    async def destroy_unused(
        self, live: Callable[[], Collection[DeviceID]], held: Callable[[], Collection[DeviceID]] = tuple
    ) -> None:
        """Destroys own instances that no `live` allocation has, except for slots `held` without a recorded instance."""

        def is_wanted(own: OwnInstance) -> bool:
            return bool(own.uuid) and (own.uuid in self._granting or own.uuid in live() or own.slot in held())

        for each in self.own:
            if is_wanted(each):
                continue
            with anyio.CancelScope(shield=True):
                async with self._turn:
                    if each in self.own and not is_wanted(each):
                        await self._undo_quietly(each)

    def trust(self, running: Collection[DeviceID]) -> None:
        """Confirms instances as ours, because containers run with them. Raises StateFault."""
        known = [each for each in self.own if each.unconfirmed and each.uuid in running]
        if known:
            self._log.replace(known, [msgspec.structs.replace(each, unconfirmed=False) for each in known])

    def stamp(self) -> None:
        """Writes the current time to the log, to show that an agent is running. Raises StateFault."""
        if self.own:
            self._log.replace(())

    async def forget(self, missing: Collection[OwnInstance]) -> None:
        """Removes from the log the `missing` instances that the driver does not have either."""
        for own in missing:
            with anyio.CancelScope(shield=True), suppress(DriverFault, StateFault):  # they are checked again later
                async with self._turn:
                    if own not in self.own or own.uuid in self._granting:
                        continue
                    if not any(is_own(own, each) for each in await self._maker.there(own.gpu)):
                        log.warning(
                            "a MIG instance of this allocator is gone", gpu=own.gpu, slot=own.slot, uuid=own.uuid
                        )
                        self._over.add(own)
                        self._forget(own)

    async def probe(self) -> None:
        """Queries the driver for the GPUs whose instances it could not change. If it answers, they are tried again."""
        for gpu in [*self.failing]:
            async with self._turn:
                try:
                    await self._maker.there(gpu)
                except DriverFault as fault:
                    self._fails(gpu, fault)
                else:
                    self._works(gpu)

    async def _undo_quietly(self, own: OwnInstance) -> None:
        try:
            if own not in self._over:
                for each in await self._maker.there(own.gpu):
                    if not is_own(own, each):
                        continue
                    if own.unconfirmed:
                        log.warning(
                            "a MIG instance at a placement of ours is not destroyed: it may be another user's by now",
                            gpu=own.gpu,
                            uuids=sorted(each.uuids),
                            remedy="destroy it with nvidia-smi mig if no user needs it",
                        )
                    else:
                        await self._maker.destroy(own.gpu, each.id)
                self._over.add(own)
            self._forget(own)
            self._works(own.gpu)
        except InstanceInUse as fault:
            if own not in self._used:
                log.warning(
                    "a MIG instance is in use and is kept",
                    slot=own.slot,
                    finding=fault.finding,
                    remedy=fault.remedy,
                )
            self._used.add(own)  # other calls for this GPU may fail, so `probe` checks the driver
        except (DriverFault, StateFault) as fault:
            self._fails(own.gpu, fault)

    def _forget(self, own: OwnInstance) -> None:
        self._log.replace((own,))
        self._over.discard(own)
        self._used.discard(own)

    def _fails(self, gpu: DeviceID, fault: DriverFault | StateFault) -> None:
        if self.failing.get(gpu) != fault.finding:
            log.error("MIG instances cannot be changed", gpu=gpu, finding=fault.finding, remedy=fault.remedy)
            self.failing[gpu] = fault.finding
            self._when_changed()

    def _works(self, gpu: DeviceID) -> None:
        if self.failing.pop(gpu, None) is not None:
            log.info("MIG instances can be changed again", gpu=gpu)
            self._when_changed()


def is_own(own: OwnInstance, there: GpuInstance) -> bool:
    """Whether this existing instance is `own`. If the id is unknown, the instance must not have existed before."""
    if (there.profile, there.placement) != (own.profile, own.placement) or len(there.uuids) > 1:
        return False
    if own.id is None:
        return there.id not in own.before
    return there.id == own.id and (own.uuid in there.uuids or not there.uuids)


# Unused instances are destroyed whenever the record changes, and every few seconds after a failure. While the record is
# unconfirmed, or not yet compared with the kubelet's, nothing is destroyed, because containers may have instances that
# are not in the record.


COLLECT_SECONDS = 5.0
PROBE_SECONDS = 60.0
"""Time until a driver that could not change instances is tried again. Until then no pod is scheduled to the GPU."""
MOST_NAMED = 3
"""Maximum number of containers named in a note."""


async def collect_unused_instances(
    instances: Instances,
    ledger: Ledger,
    clock: Clock,
    polled: Callable[[], Poll | None],
    report: Callable[[DeviceID, str], Awaitable[None]] | None = None,
) -> None:
    """
    Destroys unused instances until cancelled. `polled` returns the kubelet's response at the last comparison; None:
    there was none, and allocations may be missing from an old copy of the record. `report` is called with each GPU
    whose instances cannot be changed, and the reason.
    """
    probed = clock.monotonic()
    reported = dict[DeviceID, str]()
    while True:
        version = ledger.version
        if not instances.own and not instances.failing:  # as on most nodes, which do not need to check each change
            await clock.sleep(until_tick(clock, COLLECT_SECONDS))
            continue
        poll = polled()
        if ledger.unconfirmed is None and ledger.state.topology is not None and poll is not None:
            shown = {device for holding in poll.listing.holdings for device in holding.devices}
            recorded = instances_of(ledger.state.allocations.values())
            with suppress(StateFault):  # then they stay unconfirmed
                instances.trust({uuid for slot, uuid in recorded.items() if slot in shown})
            seen = {gpu.id: {each.uuid for each in gpu.mig or ()} for gpu in ledger.state.hardware.gpus}
            # Discovery does not see these instances although it sees their GPU.
            missing = [each for each in instances.own if each.uuid and each.uuid not in seen.get(each.gpu, {each.uuid})]
            await instances.forget(missing)
            await instances.destroy_unused(lambda: live_of(ledger.state), lambda: unknown_of(ledger.state))
        if clock.monotonic() >= probed + PROBE_SECONDS:
            probed = clock.monotonic()
            with suppress(StateFault):  # without the stamp a later start may not destroy own instances
                instances.stamp()
            await instances.probe()
            reported = {}
        for gpu, why in sorted(instances.failing.items() - reported.items()):
            if report is not None:
                await report(gpu, why)
            reported[gpu] = why
        await wait_for_first(
            partial(ledger.wait_past, version), partial(clock.sleep, until_tick(clock, COLLECT_SECONDS))
        )


def live_of(state: NodeState) -> frozenset[DeviceID]:
    """The uuids of the instances that live allocations have."""
    return frozenset(instances_of(state.allocations.values()).values())


def unknown_of(state: NodeState) -> frozenset[DeviceID]:
    """Returns the slots of allocations without an instance and of displaced containers, which may have one."""
    live = state.allocations.values()
    without_instance = frozenset(device for each in live for device in each.device_ids - each.instances.keys())
    return without_instance | devices_displaced_by(live)


def lost_note(state: NodeState) -> str | None:
    """Names containers whose MIG instances are gone, at most `MOST_NAMED`, for /readyz; None: there are none."""
    lost = [container_title(each.owner) for each in state.allocations.values() if lost_instances(each, state.hardware)]
    more = f", and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    names = ", ".join(lost[:MOST_NAMED])
    return f"containers whose MIG instances are gone: {names}{more}; delete their pods" if lost else None
