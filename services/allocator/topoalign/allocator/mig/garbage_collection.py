"""
Destroys the MIG instances of ended allocations: whenever the record changes, and every few seconds after a failure.

While the record is unconfirmed, or not yet compared with the kubelet's, nothing is destroyed, because containers may have
instances that are not in it.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.release_log import container_title
from topoalign.allocator.mig.instances import Instances
from topoalign.allocator.ports import Poll
from topoalign.allocator.reconciliation.displacement import devices_displaced_by
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import instances_of, lost_instances
from topoalign.runtime.clock import until_tick
from topoalign.runtime.tasks import wait_for_first

COLLECT_SECONDS = 5.0
PROBE_SECONDS = 60.0
"""After this time a driver that could not change instances is tried again. Until then no pod is scheduled to the GPU."""
MOST_NAMED = 3
"""Containers in a note."""


async def collect_unused_instances(
    instances: Instances,
    ledger: Ledger,
    clock: Clock,
    polled: Callable[[], Poll | None],
    report: Callable[[DeviceID, str], Awaitable[None]] | None = None,
) -> None:
    """
    Destroys unused instances until cancelled. `polled`: the kubelet's answer at the last comparison; None: there was
    none, and an old copy of the record may lack allocations. `report` is called with each GPU whose instances cannot be
    changed, and why.
    """
    probed = clock.monotonic()
    reported = dict[DeviceID, str]()
    while True:
        version = ledger.version
        if not instances.own and not instances.failing:  # as on most nodes, which need not look at each change
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
    """
    Returns the slots of records without an instance, and of displaced containers, which may have one of their own.
    """
    live = state.allocations.values()
    without_instance = frozenset(device for each in live for device in each.device_ids - each.instances.keys())
    return without_instance | devices_displaced_by(live)


def lost_note(state: NodeState) -> str | None:
    """Names containers whose MIG instances are gone, at most `MOST_NAMED`, for /readyz; None: there are none."""
    lost = [container_title(each.owner) for each in state.allocations.values() if lost_instances(each, state.hardware)]
    more = f", and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    names = ", ".join(lost[:MOST_NAMED])
    return f"containers whose MIG instances are gone: {names}{more}; delete their pods" if lost else None
