"""
Defects planted on purpose where slots become MIG instances: in what is destroyed when nobody has it, and in who has it.
"""

from collections.abc import Callable, Collection
from contextlib import suppress

from topoalign.allocator.mig.instance_log import OwnInstance
from topoalign.allocator.mig.instances import Instances
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID


class LeakingInstances(Instances):
    """A call that failed has made nothing."""

    async def _undo_quietly(self, own: OwnInstance) -> None:
        if own.id is None:
            self._forget(own)
        else:
            await super()._undo_quietly(own)


class TidyingInstances(Instances):
    """What no container has is destroyed, whoever made it."""

    async def destroy_unused(
        self, live: Callable[[], Collection[DeviceID]], held: Callable[[], Collection[DeviceID]] = tuple
    ) -> None:
        await super().destroy_unused(live, held)
        with suppress(DriverFault):
            for gpu in sorted({own.gpu for own in self.own}):
                for each in await self._maker.there(gpu):
                    if each.uuids and each.uuids.isdisjoint({*live(), *self._granting}):
                        await self._maker.destroy(gpu, each.id)


class HastyInstances(Instances):
    """What was made is a container's only when that is recorded."""

    def keep(self, uuid: DeviceID) -> None:
        pass

    async def destroy_unused(
        self, live: Callable[[], Collection[DeviceID]], held: Callable[[], Collection[DeviceID]] = tuple
    ) -> None:
        self._granting.clear()
        await super().destroy_unused(live, held)
