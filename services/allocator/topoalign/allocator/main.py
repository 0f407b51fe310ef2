"""Runs the allocator of one node."""

from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from topoalign.allocator.admissions import Admissions
from topoalign.allocator.handouts import Handouts
from topoalign.allocator.journal import open_journal
from topoalign.allocator.kubelet.front import KubeletFront
from topoalign.allocator.kubelet.podresources import PodResourcesClient
from topoalign.allocator.kubelet_files import KubeletFiles
from topoalign.allocator.ledger import Ledger
from topoalign.allocator.service import Allocator, refuse_twin
from topoalign.allocator.settings import AllocatorSettings
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    settings = from_environment(AllocatorSettings, context.environment)
    rules = settings.rules
    await refuse_twin(context.hub or context.bus, settings.node)
    with open_journal(settings.state_dir, settings.node) as journal:
        ledger = Ledger(settings.node, journal, context.clock)
        handouts = front = files = None
        if settings.kubelet_dir:
            kubelet = PodResourcesClient(settings.pod_resources, Path(settings.kubelet_dir))
            handouts = Handouts(
                ledger,
                context.clock,
                kubelet,
                placement=rules.placement,
                gone_seconds=settings.gone_seconds,
                settle_seconds=settings.settle_seconds,
            )
            front = KubeletFront(
                handouts, Path(settings.kubelet_dir), context.clock, drain_seconds=settings.drain_seconds
            )
            files = KubeletFiles(settings.kubelet_configuration, settings.kubelet_root, rules)
            context.checks["kubelet"] = front.reason
        admissions = Admissions(
            ledger,
            context.bus,
            rules,
            kubelet_owns_devices=front is not None,
            kubelet_files=files,
            hint_seconds=settings.hint_seconds,
        )
        allocator = Allocator(
            ledger, context.bus, context.clock, admissions, handouts, reconcile_seconds=settings.reconcile_seconds
        )
        allocator.watch(context.metrics)
        context.checks["journal"] = lambda: ledger.fault
        context.checks["health"] = allocator.hearing.reason
        context.checks["topology"] = allocator.topology_unknown
        context.checks["outbox"] = allocator.outbox_full
        async with anyio.create_task_group() as tasks:
            await tasks.start(allocator.run)
            if front is not None:
                await tasks.start(front.run)
            task_status.started()
