"""What the registry knows of a node when a pod is to be bound there: may it be bound now, and what does it wait for."""

from collections.abc import Callable, Sequence

from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.filter.quotas import Quotas
from topoalign.registry.scheduling.filter.scheduler import NotReadYet, Scheduler
from topoalign.registry.scheduling.model import PodToSchedule


class BindChecks:
    """Judges binds from the view of a scheduler (`binding.NodeChecks`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        behind: Callable[[], str | None],
        foreign: Callable[[NodeName], str],
        quotas: Quotas,
    ) -> None:
        """
        `behind`: why not all is known that an answer depends on. `foreign`: code of the refusal where others give out the
        node's GPUs; empty: nobody does.
        """
        self._scheduler = scheduler
        self._view = scheduler.view
        self._behind = behind
        self._foreign = foreign
        self._quotas = quotas

    def passes(self, node: NodeName, pod: PodToSchedule) -> bool:
        """As `NodeChecks.passes`."""
        return self._behind() is None and self._scheduler.passes(pod, node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """As `NodeChecks.assume`."""
        if holds_something(pod.request):
            self._view.assume(node, pod)

    def unassume(self, node: NodeName, uid: str) -> None:
        """As `NodeChecks.unassume`."""
        self._view.unassume(node, uid)

    def foreign(self, node: NodeName) -> str:
        """As `NodeChecks.foreign`."""
        return self._foreign(node)

    async def fits(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        As `NodeChecks.fits`, of a pod that its node has confirmed: only others that are pending, or end, can change that.
        Raises NotReadYet: without what is reserved and bound nobody would be pending; and as `Quotas.check_read`.
        """
        finding = self._behind()
        if finding is not None:
            raise NotReadYet(finding)
        self._quotas.check_read(pod, node)
        if not self._view.holds(node).has_others(pod.uid):
            return await self._scheduler.lone.refusal(node, pod)
        return await self._scheduler.fits_in_every_order(node, pod)

    def terminated(self, node: NodeName) -> Sequence[str]:
        """As `NodeChecks.terminated`."""
        return self._view.terminated(node)

    def is_being_freed(self, node: NodeName, pod: PodToSchedule) -> bool:
        """As `NodeChecks.is_being_freed`."""
        leaving = self._view.terminating(node) if pod.nominated == node else frozenset[str]()
        if not leaving and not self._view.terminated(node):
            return False
        return self._scheduler.would_admit_without(node, pod, leaving)

    def version_of(self, node: NodeName) -> int:
        """As `NodeChecks.version_of`."""
        return self._view.version_of(node)

    async def until_changed(self, node: NodeName, version: int) -> None:
        """As `NodeChecks.until_changed`."""
        await self._view.until_changed(node, version)
