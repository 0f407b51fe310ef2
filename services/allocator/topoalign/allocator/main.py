"""Runs the allocator of one node."""

from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from topoalign.allocator.device_allocations import DeviceAllocations
from topoalign.allocator.device_plugin.containers import Containers
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.allocator.requests.absence import lists_nothing
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.requests.kubelet_files import KubeletFiles
from topoalign.allocator.requests.kubelet_watch import KubeletWatch
from topoalign.allocator.service import Allocator, refuse_twin
from topoalign.allocator.settings import AllocatorSettings
from topoalign.allocator.takeover import Vacancy, asked, hardware_known, open_in_turn
from topoalign.runtime.context import Context
from topoalign.runtime.settings import from_environment


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    settings = from_environment(AllocatorSettings, context.environment)
    rules = settings.rules
    configuration = context.configuration
    ready = partial(hardware_known, context.bus, settings.node, context.clock) if settings.take_over else None
    async with open_in_turn(settings.state_dir, settings.node, context.clock, ready) as journal:
        await refuse_twin(context.hub or context.bus, settings.node)
        ledger = Ledger(settings.node, journal, context.clock)
        hearing = HardwareWatch(ledger, context.bus, context.clock)
        containers = Containers(lambda: configuration.current, settings.cdi_dir)
        handouts = front = watch = None
        if settings.kubelet_dir:
            kubelet = PodResourcesClient(settings.pod_resources, Path(settings.kubelet_dir))
            handouts = DeviceAllocations(
                ledger,
                context.clock,
                kubelet,
                placement=rules.placement,
                gone_seconds=settings.gone_seconds,
                settle_seconds=settings.settle_seconds,
                ensure_fresh=hearing.ensure_fresh,
            )
            front = KubeletFront(
                handouts,
                Path(settings.kubelet_dir),
                context.clock,
                containers=containers,
                pod_resources=settings.pod_resources,
                drain_seconds=settings.drain_seconds,
            )
            files = KubeletFiles(
                settings.kubelet_configuration,
                settings.kubelet_root,
                rules,
                version=settings.kubelet_version,
                settle_seconds=settings.settle_seconds,
            )
            watch = KubeletWatch(ledger, files, context.clock, kubelet.devices, handouts.ended)
            context.checks["kubelet"] = front.reason
            context.checks["containers"] = containers.reason
        admissions = Admissions(
            ledger,
            context.bus,
            rules,
            kubelet_owns_devices=front is not None,
            kubelet=watch,
            hint_seconds=settings.hint_seconds,
            ensure_fresh=hearing.ensure_fresh,
            lists=handouts.lists if handouts is not None else lists_nothing,
        )
        allocator = Allocator(
            ledger,
            context.bus,
            context.clock,
            hearing,
            admissions,
            handouts,
            reconcile_seconds=settings.reconcile_seconds,
            hub=context.hub,
        )
        allocator.watch(context.metrics, lambda: len(journal.set_aside))
        context.notes.setdefault("configuration", lambda: configuration.trouble)
        context.checks["journal"] = lambda: ledger.fault
        context.checks["record"] = allocator.record_in_doubt
        context.checks["devices"] = allocator.devices_given_twice
        context.checks["health"] = hearing.reason
        context.checks["topology"] = allocator.topology_unknown
        context.checks["outbox"] = allocator.outbox_full
        context.notes["outbox"] = allocator.outbox.speaker.note
        async with anyio.create_task_group() as tasks:
            await tasks.start(allocator.run)
            tasks.start_soon(configuration.keep_up, context.clock, context.reload.wait)
            if watch is not None:
                tasks.start_soon(watch.run)
            if front is not None and handouts is not None:
                tasks.start_soon(containers.run, handouts, context.clock)
                await tasks.start(front.run)
            task_status.started()
            await asked(settings.state_dir, context.clock)
            context.life["successor"] = Vacancy(settings.state_dir, context.clock).trouble
            context.superseded.set()
