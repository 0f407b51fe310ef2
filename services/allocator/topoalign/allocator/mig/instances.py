"""
The MIG instances that containers get: made before an Allocate is answered, destroyed when its allocation has ended.

The steps, and what a start does if the process ended after one of them:

    1  the intent is in the book        nothing is there: the intent goes
    2  the GPU instance is made         it is at the place of the intent, and was not there before: destroyed
    3  its compute instance is made     the same
    4  the book has id and uuid         no allocation has it: destroyed
    5  the allocation is in the journal it stays
    6  the allocation has ended         as after 4
    7  the instance is destroyed        nothing is there with this id, place and uuid: the entry goes

So an instance is there for every allocation that has one, and for no other; those of others are never touched. While the
driver does not answer, what is to be destroyed stays in the book, its place counts as taken, and it is tried again.

What is known to be gone is not ours again, whatever is made at its place, also while the book cannot be written; and what is
doubted (`OwnInstance.doubted`) goes from the book without being destroyed. An instance of another profile, or that is
divided, is not ours either.

A place is passed over where the driver has no room after all, and where it makes an instance with a uuid that another
container was told: after a reboot a kubelet starts that container again, and asks nobody.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import anyio
import msgspec
import structlog

from topoalign.allocator.mig.instance_log import InstanceBook, OwnInstance
from topoalign.core import wire
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import DriverFault, NoFit, StateFault, TopoalignError, quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.maintenance import DevicesRequest
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile, find_place
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus
from topoalign.core.state.share_amounts import gpus_by_instances

# What is asked of the driver about the MIG instances of a GPU.


class GpuInstance(NamedTuple):
    """A GPU instance that is there, whoever made it."""

    id: int
    """NVML's id of it on its GPU, which a later instance may have again."""
    profile: str
    """`1g.10gb`. Several profiles may have the same places: on an A100 3g.20gb and 4g.20gb at slice 0."""
    placement: MigPlacement
    uuids: frozenset[DeviceID]
    """Of the MIG devices in it, one for each compute instance."""


class InstanceInUse(DriverFault):
    """Raised where an instance is not destroyed because processes use it; the driver works."""

    code = "InstanceInUse"


class PlaceTaken(NoFit):
    """Raised where the driver has no room for an instance at a place that seemed free: nothing was made, and it works."""

    code = "PlaceTaken"

    def __init__(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> None:
        super().__init__(
            f"{gpu}: the driver has no room for a MIG instance {profile} at slice {placement.start}",
            "see with `nvidia-smi mig -lgi` who has it",
        )


class InstanceMaker(Protocol):
    """
    Makes and destroys MIG instances. Each call ends within a time limit: DriverFault says that it failed, or that nothing is
    known of it because the driver does not answer. What such a call has done after all is seen by `there`.
    """

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        """All GPU instances of a GPU. Raises DriverFault."""

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        """
        Makes a GPU instance of this profile at this place, and one compute instance of all of it. Raises DriverFault, and
        PlaceTaken.
        """

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        """Destroys the GPU instance with this id and all in it, if it is there. Raises DriverFault, InstanceInUse."""


# Tells discovery of GPUs whose driver makes no MIG instances, so that their health says it: what the registry sends
# pods by, and what people look at, is the health that discovery publishes.


ASK_SECONDS = 5.0


async def report_fault(bus: Bus, node: NodeName, gpu: DeviceID, why: str) -> None:
    """Reports that MIG instances of a GPU cannot be changed. Where discovery does not answer, the kubelet alone knows it."""
    request = DevicesRequest(node=node, devices=(gpu,), reason=f"its MIG instances cannot be changed: {why}")
    with suppress(TopoalignError):  # a discovery of an earlier version does not know the word
        answer = await bus.ask(wire.devices_subject(node, "report"), msgspec.json.encode(request), ASK_SECONDS)
        wire.decode_answer(answer, dict[DeviceID, DeviceHealth])


# The MIG instance of a slot.


class Made(NamedTuple):
    """The instance of a slot, which is there."""

    uuid: DeviceID
    amount: Amount
    """What the container holds of the GPU by it."""


# What a node without a kubelet cannot give: instances are made when a kubelet calls Allocate.


class InstancesNeedKubelet(NoFit):
    """Raised for a request over the bus for slots that would become MIG instances."""

    code = "InstancesNeedKubelet"

    def __init__(self, gpus: Iterable[str]) -> None:
        super().__init__(
            f"slots of {quoted(sorted(gpus))} become MIG instances, which are made for a kubelet alone",
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
    """Raised where no profile with enough memory has a free place on a GPU."""

    code = "NoPlace"

    def __init__(self, gpu: DeviceID, memory: int) -> None:
        self.gpu = gpu
        super().__init__(
            f"{gpu} has no free place for a MIG instance of {memory} bytes",
            "ask for less memory, or wait until other containers have ended; `topoalign gpu list --json` shows the places",
        )


class Instances:
    """Makes and destroys the instances of one node. One thing at a time: the driver does not do more."""

    def __init__(self, book: InstanceBook, maker: InstanceMaker) -> None:
        self._book = book
        self._maker = maker
        self.when_changed: Callable[[], None] = lambda: None
        """Called when `failing` has changed."""
        self._turn = anyio.Lock(fast_acquire=True)
        self._granting: set[DeviceID] = set()
        """Made for an Allocate that is not recorded yet."""
        self._over: set[OwnInstance] = set()
        """Known to be gone, though the book still has them."""
        self._used: set[OwnInstance] = set()
        """To be destroyed when processes have left them, which the log has."""
        self.failing: dict[DeviceID, str] = {}
        """GPU -> why instances of it cannot be made or destroyed: until that works again."""

    @property
    def own(self) -> Sequence[OwnInstance]:
        """The instances that are ours, those included that are being made or are to be destroyed."""
        return self._book.instances

    def note(self) -> str | None:
        """What is to be said of instances, for /readyz: those that cannot be made, or may be left over. None: nothing."""
        said = [f"{gpu}: {why}" for gpu, why in self.failing.items()]
        said += [self._book.doubt] if self._book.doubt is not None else []
        return f"MIG instances: {'; '.join(said)}" if said else None

    async def make(
        self,
        slot: DeviceID,
        profiles: Sequence[MigProfile],
        memory: int,
        spared: Collection[MigPlacement] = (),
        told: Collection[DeviceID] = (),
    ) -> MigDevice:
        """
        Makes the smallest instance with so many bytes for a slot of a GPU; in a `spared` place only if there is no other,
        and never with a uuid that other containers were `told`.
        It is kept from `sweep` until `release`, which the caller owes whatever becomes of the Allocate. Raises
        NoPlace, DriverFault and StateFault; then nothing is left over, or it is in the book.
        """
        made: MigDevice | None = None
        with anyio.CancelScope(shield=True):
            async with self._turn:
                try:
                    made = await self._made(slot, profiles, memory, spared, told)
                except DriverFault as fault:
                    self._fails(base_of(slot), fault)
                    raise
                self._works(base_of(slot))
                self._granting.add(made.uuid)
        assert made is not None, "nobody leaves a shielded scope early"
        return made

    async def _made(
        self,
        slot: DeviceID,
        profiles: Sequence[MigProfile],
        memory: int,
        spared: Collection[MigPlacement],
        told: Collection[DeviceID],
    ) -> MigDevice:
        gpu = base_of(slot)
        passed = set[MigPlacement]()
        while True:
            there = await self._maker.there(gpu)
            noted = [each.placement for each in self.own if each.gpu == gpu]
            taken = {*noted, *passed, *(each.placement for each in there)}
            found = find_place(profiles, {*taken, *spared}, memory) or find_place(profiles, taken, memory)
            if found is None:
                raise NoPlace(gpu, memory)
            profile, place = found
            before = tuple(sorted(each.id for each in there))
            intent = OwnInstance(slot=slot, profile=profile.name, placement=place, before=before)
            made = await self._made_as(intent, told)
            if made is not None:
                return made
            passed.add(place)

    async def _made_as(self, intent: OwnInstance, told: Collection[DeviceID]) -> MigDevice | None:
        """The instance of an intent. None: it is not to be had at this place, and is not there."""
        self._book.replace((), (intent,))
        try:
            made = await self._maker.make(intent.gpu, intent.profile, intent.placement)
            if made.uuid not in told:
                self._book.replace((intent,), (noted_as(intent, made),))
                return made
        except PlaceTaken as refusal:
            log.warning("a MIG instance is not made where it was to be", slot=intent.slot, finding=refusal.finding)
            self._over.add(intent)  # what is there now is somebody else's
            self._forget(intent)
            return None
        except (DriverFault, StateFault):
            await self._undo_quietly(intent)
            raise
        log.warning("a MIG instance is undone: another container was told its uuid", slot=intent.slot, uuid=made.uuid)
        await self._undo_quietly(intent)
        return None

    def has(self, slot: DeviceID, uuid: DeviceID) -> bool:
        """Whether this instance was made for this slot, in this boot of the node, and is not known to be gone."""
        return any(each.slot == slot and each.uuid == uuid for each in self.own if each not in self._over)

    def keep(self, uuid: DeviceID) -> None:
        """Keeps an instance that is there from `sweep`, whatever becomes of its record, until `release`."""
        self._granting.add(uuid)

    def release(self, uuid: DeviceID) -> None:
        """The next `sweep` destroys an instance that was made or kept, unless an allocation has it by then."""
        self._granting.discard(uuid)

    async def sweep(
        self, live: Callable[[], Collection[DeviceID]], held: Callable[[], Collection[DeviceID]] = tuple
    ) -> None:
        """
        Destroys the instances that are ours and that neither a `live` allocation has nor one that is about to be recorded;
        of those that were never known to be made, what is there. What fails stays in the book for the next sweep.

        `held`: slots that are held and of which no record has the instance, as after a lost journal. Their instances stay.
        Both are asked for before each instance: others may be recorded while one is destroyed.
        """

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
        """Doubts no more that the instances with these uuids are ours: containers run with them. Raises StateFault."""
        known = [each for each in self.own if each.doubted and each.uuid in running]
        if known:
            self._book.replace(known, [msgspec.structs.replace(each, doubted=False) for each in known])

    def stamp(self) -> None:
        """Notes that somebody looks after what is in the book. Raises StateFault."""
        if self.own:
            self._book.replace(())

    async def forget(self, missing: Collection[OwnInstance]) -> None:
        """
        Forgets those of the instances that discovery is `missing` which the driver does not have either: somebody has
        destroyed them, or the GPU was reset.
        """
        for own in missing:
            with anyio.CancelScope(shield=True), suppress(DriverFault, StateFault):  # they are looked for again
                async with self._turn:
                    if own not in self.own or own.uuid in self._granting:
                        continue
                    if not any(is_own(own, each) for each in await self._maker.there(own.gpu)):
                        log.warning("a MIG instance of ours has gone", gpu=own.gpu, slot=own.slot, uuid=own.uuid)
                        self._over.add(own)
                        self._forget(own)

    async def probe(self) -> None:
        """Asks the driver about the GPUs whose instances it could not change: where it answers, they are tried again."""
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
                    if is_own(own, each):
                        await self._clear(own, each)
                self._over.add(own)
            self._forget(own)
            self._works(own.gpu)
        except InstanceInUse as fault:
            if own not in self._used:
                log.warning("a MIG instance stays for now", slot=own.slot, finding=fault.finding, remedy=fault.remedy)
            self._used.add(own)  # others of its GPU may fail, so whether the driver works is asked elsewhere (`probe`)
        except (DriverFault, StateFault) as fault:
            self._fails(own.gpu, fault)

    async def _clear(self, own: OwnInstance, there: GpuInstance) -> None:
        """Destroys what is there of an instance of ours, unless that may be somebody else's."""
        if own.doubted:
            log.warning(
                "a MIG instance at a place of ours is left alone: it may be somebody else's by now",
                gpu=own.gpu,
                uuids=sorted(there.uuids),
                remedy="destroy it with nvidia-smi mig if nobody needs it",
            )
        else:
            await self._maker.destroy(own.gpu, there.id)

    def _forget(self, own: OwnInstance) -> None:
        """Takes an instance that is over out of the book. Raises StateFault."""
        self._book.replace((own,))
        self._over.discard(own)
        self._used.discard(own)

    def _fails(self, gpu: DeviceID, fault: DriverFault | StateFault) -> None:
        if self.failing.get(gpu) != fault.finding:
            log.error("MIG instances cannot be changed", gpu=gpu, finding=fault.finding, remedy=fault.remedy)
            self.failing[gpu] = fault.finding
            self.when_changed()

    def _works(self, gpu: DeviceID) -> None:
        if self.failing.pop(gpu, None) is not None:
            log.info("MIG instances can be changed again", gpu=gpu)
            self.when_changed()


def noted_as(intent: OwnInstance, made: MigDevice) -> OwnInstance:
    """The entry of an instance that was made."""
    return msgspec.structs.replace(intent, id=made.gpu_instance, uuid=made.uuid)


def is_own(own: OwnInstance, there: GpuInstance) -> bool:
    """
    Whether an instance that is there is this one of ours: of its profile, at its place, and with one MIG device at most.
    With an id, that one, and it has our MIG device or none; without one, what was not there before.
    """
    if (there.profile, there.placement) != (own.profile, own.placement) or len(there.uuids) > 1:
        return False
    if own.id is None:
        return there.id not in own.before
    return there.id == own.id and (own.uuid in there.uuids or not there.uuids)
