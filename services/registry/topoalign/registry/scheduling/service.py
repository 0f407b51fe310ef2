"""Puts the scheduler's side of the registry together and runs it."""

from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from topoalign.client import Client
from topoalign.core.model.ids import ResourceName
from topoalign.core.scoring.scorers import scorer_of
from topoalign.registry.cluster import Cluster
from topoalign.registry.scheduling.scheduler import Scheduler
from topoalign.registry.scheduling.server import serve_scheduler
from topoalign.registry.scheduling.view import ClusterView
from topoalign.registry.service import PAUSE, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context


class Scheduling:
    """All that answers a scheduler, for one registry."""

    def __init__(
        self, context: Context, settings: RegistrySettings, client: Client, cluster: Cluster, registry: Registry
    ) -> None:
        """`client` and `cluster` are those of the registry, and keep usage."""
        self._context, self._settings, self._registry = context, settings, registry
        scorer = scorer_of(settings.scoring, settings.scoring_packing)
        self.view = ClusterView(cluster, lambda: client.unsettled, context.clock, scorer)
        self.scheduler = Scheduler(self.view, self.behind)
        context.checks["scheduler"] = self.behind

    def behind(self) -> str | None:
        """Readiness: why not all is known that an answer depends on."""
        checks: tuple[Callable[[], str | None], ...] = (
            self._registry.behind,
            self._registry.unasked,
            self.view.waiting,
        )
        return next(filter(None, (check() for check in checks)), None)

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; has started, with the URL of the extender, once that listens."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.view.run, self._registry.behind, PAUSE)
            await serve_scheduler(self._context, self._settings, self.scheduler, self.offers, task_status=task_status)

    def offers(self, resource: ResourceName) -> bool:
        """Whether some node offers this resource, or did."""
        return resource in self.view.resources
