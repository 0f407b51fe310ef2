"""
Destroys the MIG instances of ended allocations: whenever the record changes, and every few seconds after a failure.

GPUs whose instances cannot be changed are reported repeatedly, so that discovery publishes them as unhealthy.

While the record is unconfirmed, or not yet compared with the kubelet's, nothing is destroyed, because containers may have
instances that are not in it.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.release_log import container_title
from topoalign.allocator.mig.instance_log import OwnInstance
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


async def nobody(gpu: DeviceID, why: str) -> None:
    """A `report` that does nothing."""


async def collect_unused_instances(
    instances: Instances,
    ledger: Ledger,
    clock: Clock,
    polled: Callable[[], Poll | None],
    report: Callable[[DeviceID, str], Awaitable[None]] = nobody,
) -> None:
    """
    Destroys unused instances after each change of the record, and every `COLLECT_SECONDS`, until cancelled. `polled`: the
    kubelet's answer at the last comparison; None: there was none, and an old copy of the record may lack allocations.
    `report` is called with each GPU whose instances cannot be changed, and the reason.
    """
    probed = clock.monotonic()
    reported = dict[DeviceID, str]()
    while True:
        version = ledger.version
        if (
            not instances.own and not instances.failing
        ):  # as on most nodes: they need not look at each change of the record
            await clock.sleep(until_tick(clock, COLLECT_SECONDS))
            continue
        poll = polled()
        if ledger.unconfirmed is None and ledger.state.topology is not None and poll is not None:
            with suppress(StateFault):  # then they stay unconfirmed
                instances.trust(running_of(ledger.state, poll))
            await instances.forget(missing_of(ledger.state, instances.own))
            await instances.destroy_unused(lambda: live_of(ledger.state), lambda: unknown_of(ledger.state))
        if clock.monotonic() >= probed + PROBE_SECONDS:
            probed = clock.monotonic()
            with suppress(StateFault):  # without the stamp a later start may not destroy own instances
                instances.stamp()
            await instances.probe()
            reported = {}
        for gpu, why in sorted(instances.failing.items() - reported.items()):
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
    The slots that are held by records which do not say which instance they have, and those of containers that may run on
    although the kubelet gave their slots to others, who may have an instance of their own.
    """
    live = state.allocations.values()
    without_instance = frozenset(device for each in live for device in each.device_ids - each.instances.keys())
    return without_instance | devices_displaced_by(live)


def running_of(state: NodeState, poll: Poll) -> frozenset[DeviceID]:
    """Returns the uuids of the instances whose slots the kubelet reports with containers."""
    shown = {device for holding in poll.listing.holdings for device in holding.devices}
    return frozenset(uuid for slot, uuid in instances_of(state.allocations.values()).items() if slot in shown)


def missing_of(state: NodeState, own: Iterable[OwnInstance]) -> list[OwnInstance]:
    """Returns the own instances that discovery does not see although it sees their GPU."""
    gpus = state.hardware.gpu_by_id
    return [
        each
        for each in own
        if each.uuid and each.gpu in gpus and all(each.uuid != there.uuid for there in gpus[each.gpu].mig or ())
    ]


def lost_note(state: NodeState) -> str | None:
    """Names the containers whose MIG instances are gone, at most `MOST_NAMED`, for /readyz; None: there are none."""
    lost = [container_title(each.owner) for each in state.allocations.values() if lost_instances(each, state.hardware)]
    more = f", and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    names = ", ".join(lost[:MOST_NAMED])
    return f"containers whose MIG instances are gone: {names}{more}; delete their pods" if lost else None
