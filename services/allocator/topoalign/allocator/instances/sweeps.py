"""
Destroys the MIG instances of allocations that have ended, soon after they have: whenever the record changes, and every few
seconds what failed before.

While the record is not confirmed, or not compared with what the kubelet says, nothing is destroyed: something may be held
that is not in it.
"""

from collections.abc import Callable
from functools import partial

from topoalign.allocator.instances.instances import Instances
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.displacement import devices_displaced_by
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.instance_amounts import instances_of
from topoalign.runtime.clock import until_tick
from topoalign.runtime.tasks import either

SWEEP_SECONDS = 5.0
PROBE_SECONDS = 60.0
"""After which a driver that could not change instances is asked again: a pod that comes before is not sent there."""


async def sweep_instances(instances: Instances, ledger: Ledger, clock: Clock, is_compared: Callable[[], bool]) -> None:
    """
    Sweeps after each change of the record, and every `SWEEP_SECONDS`, until cancelled. `is_compared`: whether the record has
    been compared with what the kubelet says: an old copy of it lacks what was given since.
    """
    probed = clock.monotonic()
    while True:
        version = ledger.version
        if (
            not instances.own and not instances.failing
        ):  # as on most nodes: they need not look at each change of the record
            await clock.sleep(until_tick(clock, SWEEP_SECONDS))
            continue
        if ledger.unconfirmed is None and ledger.state.topology is not None and is_compared():
            await instances.sweep(lambda: live_of(ledger.state), lambda: unknown_of(ledger.state))
        if clock.monotonic() >= probed + PROBE_SECONDS:
            probed = clock.monotonic()
            await instances.probe()
        await either(partial(ledger.wait_past, version), partial(clock.sleep, until_tick(clock, SWEEP_SECONDS)))


def live_of(state: NodeState) -> frozenset[DeviceID]:
    """The uuids of the instances that live allocations have."""
    return frozenset(instances_of(state.allocations.values()).values())


def unknown_of(state: NodeState) -> frozenset[DeviceID]:
    """
    The slots that are held by records which do not say which instance they have, and those of containers that may run on
    although the kubelet gave their slots to others, who may have an instance of their own.
    """
    live = state.allocations.values()
    unsaid = frozenset(device for each in live for device in each.device_ids - each.instances.keys())
    return unsaid | devices_displaced_by(live)
