"""Builds and runs the allocator of one node."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.hami_core.feedback import Feedback
from topoalign.allocator.containers.hami_core.shared_files import SharedFiles
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.journal import FileJournal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.metrics.allocator_metrics import figures
from topoalign.allocator.metrics.use_series import UseSeries
from topoalign.allocator.mig.instance_log import InstanceLog
from topoalign.allocator.mig.instances import Instances, collect_unused_instances, lost_note, report_fault
from topoalign.allocator.mig.nvml_instances import NvmlInstances
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import KubeletFiles, KubeletWatch
from topoalign.allocator.service import Allocator, refuse_duplicate_agent
from topoalign.allocator.settings import AllocatorSettings
from topoalign.allocator.takeover import Vacancy, hardware_known, open_in_turn, wait_for_successor
from topoalign.plugin_config.configuration import Configuration
from topoalign.runtime.boot import boot_id
from topoalign.runtime.context import Context
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.runtime.settings import from_environment

UNBOUND_SECONDS = 30.0
"""Seconds for which an allocation is kept that the kubelet does not report (`DeviceAllocations`)."""
DRIVER_SECONDS = 10.0
"""Time limit of each NVML call that creates or destroys a MIG instance."""


class KubeletSide:
    """The parts of the allocator that exist only on a node with a kubelet."""

    def __init__(
        self,
        settings: AllocatorSettings,
        context: Context,
        ledger: Ledger,
        hardware_watch: HardwareWatch,
        containers: Containers,
    ) -> None:
        """Creates the parts without starting them. Raises InvalidField for invalid settings."""
        rules = settings.rules
        clock = context.clock
        self._ledger = ledger
        self._configuration = context.configuration
        self._bus = context.bus
        self._clock = clock
        self.pod_resources = PodResourcesClient(settings.pod_resources, Path(settings.kubelet_dir))
        self.reservations = NodeReservationList(ledger, context.hub or context.bus, clock)
        self.changes = DirectoryChanges()
        instance_log = InstanceLog(settings.state_dir, boot_id() or "", clock.monotonic)
        self.instances = Instances(
            instance_log, NvmlInstances(clock, DRIVER_SECONDS), lambda: ledger.move(ledger.state)
        )
        self.limiter = VcudaLimiter(lambda: self.configuration.flags.vcuda_root, lambda: ledger.state.hardware)
        self.allocations = DeviceAllocations(
            ledger,
            self.pod_resources,
            settings,
            unbound_seconds=UNBOUND_SECONDS,
            ensure_fresh=hardware_watch.ensure_fresh,
            reservations=self.reservations,
            starting=self.limiter.starting,
            instances=self.instances,
            by_variable_alone=self.by_variable_alone,
        )
        self.front = KubeletFront(
            self.allocations,
            Path(settings.kubelet_dir),
            clock,
            containers=containers,
            pod_resources=self.pod_resources.channel,
            drain_seconds=settings.drain_seconds,
            changes=self.changes,
        )
        files = KubeletFiles(
            settings.kubelet_configuration,
            settings.kubelet_root,
            rules,
            version=settings.kubelet_version,
            settle_seconds=settings.settle_seconds,
        )
        self.watch = KubeletWatch(
            ledger, files, clock, self.pod_resources.devices, self.allocations.ended, self.changes
        )
        self.predictions = Predictions(
            ledger,
            rules,
            self.watch,
            kubelet_owns_devices=True,
            confirmed=self.reservations.expect,
            by_variable_alone=self.by_variable_alone,
        )
        self.shared_files = SharedFiles(self.hami_root, lambda: ledger.state, clock)

    async def keep_up(self, series: UseSeries) -> None:
        """
        Runs the background tasks until cancelled: watches the kubelet's files and the memory use of containers,
        maintains the files of the limiters, and destroys unused MIG instances.
        """
        clock = self._clock
        report = partial(report_fault, self._bus, self._ledger.node)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.changes.run)
            tasks.start_soon(self.watch.run)
            tasks.start_soon(series.keep_watch, clock)
            tasks.start_soon(
                collect_unused_instances, self.instances, self._ledger, clock, lambda: self.allocations.polled, report
            )
            tasks.start_soon(self.limiter.run, self.allocations, clock)
            tasks.start_soon(DirectoryCleanup(self.hami_root).run, self.allocations, clock)
            feedback = Feedback(self.hami_root, self.has_priorities, lambda: self.allocations.state)
            tasks.start_soon(feedback.run, clock)

    @property
    def configuration(self) -> Configuration:
        """The newest configuration."""
        return self._configuration.current

    def hami_root(self) -> str:
        """`flags.hamiRoot`; empty: none."""
        return self.configuration.flags.hami_root

    def has_priorities(self) -> bool:
        """Whether low-priority containers wait for high-priority ones on their GPU (`Feedback`)."""
        slots = self.configuration.sharing.slots
        return slots is not None and slots.priorities

    def by_variable_alone(self) -> bool:
        """Whether NVIDIA_VISIBLE_DEVICES is the only list of a container's GPUs."""
        return self.configuration.flags.plugin.by_variable_alone


async def serve(context: Context, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """
    Runs the allocator service until it is cancelled, or until a successor requests the state directory.

    Reports that it has started once its endpoints answer. Raises StateFault if the record cannot be used or another
    allocator answers for the node, and InvalidField for invalid settings.
    """
    settings = from_environment(AllocatorSettings, context.environment)
    configuration = context.configuration
    ready = partial(hardware_known, context.bus, settings.node, context.clock) if settings.take_over else None
    async with open_in_turn(settings.state_dir, settings.node, context.clock, ready) as journal:
        await refuse_duplicate_agent(context.hub or context.bus, settings.node)
        ledger = Ledger(settings.node, journal, context.clock)
        hardware_watch = HardwareWatch(ledger, context.bus, context.clock)
        containers = Containers(lambda: configuration.current, settings.cdi_dir)
        kubelet = KubeletSide(settings, context, ledger, hardware_watch, containers) if settings.kubelet_dir else None
        admissions = Admissions(
            ledger,
            context.bus,
            settings.rules,
            kubelet_owns_devices=kubelet is not None,
            predictions=kubelet.predictions if kubelet is not None else None,
            hint_seconds=settings.hint_seconds,
            ensure_fresh=hardware_watch.ensure_fresh,
        )
        allocator = Allocator(
            ledger,
            context.bus,
            hardware_watch,
            admissions,
            kubelet.allocations if kubelet is not None else None,
            reconcile_seconds=settings.reconcile_seconds,
            reservations=kubelet.reservations if kubelet is not None else None,
            hub=context.hub,
            endpoints=[kubelet.shared_files.endpoint()] if kubelet is not None else (),
        )
        library = kubelet.shared_files.read if kubelet is not None else None
        series = UseSeries(ledger, context.bus, settings.metrics_names, library, announces=kubelet is not None)
        register_reports(context, allocator, journal, kubelet, containers, series)
        async with kubelet.pod_resources if kubelet is not None else nullcontext(), anyio.create_task_group() as tasks:
            await tasks.start(allocator.run)
            tasks.start_soon(configuration.keep_up, context.clock, context.reload.wait)
            if kubelet is not None:
                tasks.start_soon(containers.run, kubelet.allocations, context.clock)
                tasks.start_soon(kubelet.keep_up, series)
                await tasks.start(kubelet.front.run)
            await tasks.start(serve_display, settings.display, context, ledger)
            task_status.started()
            await wait_for_successor(settings.state_dir, context.clock)
            context.life["successor"] = Vacancy(settings.state_dir, context.clock).restart_reason
            context.superseded.set()


async def serve_display(path: str, context: Context, ledger: Ledger, *, task_status: TaskStatus[None]) -> None:
    """
    Serves gpu-manager's display on this socket until cancelled; if the path is empty, serves nothing. Reports that it
    has started once its HTTP handlers are registered in this process.
    """
    if path:
        from topoalign.allocator.metrics.display import Display  # most nodes do not serve it

        display = Display(lambda: ledger.state, UseSeries(ledger, context.bus, ()).shares)
        context.pages.update(display.pages())
        task_status.started()
        await display.run(Path(path), context.clock)
    else:
        task_status.started()


def register_reports(
    context: Context,
    allocator: Allocator,
    journal: FileJournal,
    kubelet: KubeletSide | None,
    containers: Containers,
    series: UseSeries,
) -> None:
    """
    Registers the allocator's metrics for /metrics, and its checks and notes for /readyz; a note does not make the
    process unready. `series`: the metrics of the use of GPUs.
    """
    context.series.append(series.write)
    context.collectors.extend(figures(allocator, lambda: len(journal.set_aside), lambda: journal.syncs))
    if kubelet is not None:
        context.collectors.extend([kubelet.limiter.figure(), kubelet.shared_files.figure()])
        context.notes["instances"] = kubelet.instances.note
        context.notes["lost instances"] = lambda: lost_note(allocator.ledger.state)
        context.checks["kubelet"] = kubelet.front.reason
        context.checks["containers"] = containers.reason
    context.checks["journal"] = lambda: allocator.ledger.faults.newest
    context.checks["record"] = allocator.record_unconfirmed
    context.checks["devices"] = allocator.devices_given_twice
    context.checks["health"] = allocator.hardware_watch.reason
    context.checks["topology"] = allocator.topology_unknown
    context.checks["outbox"] = allocator.outbox_full
    context.notes.setdefault("configuration", lambda: context.configuration.reason_not_current)
    context.notes["outbox"] = allocator.outbox.facts.note
