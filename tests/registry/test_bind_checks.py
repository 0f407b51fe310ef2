"""What a bind is told of its node: what it may wait for there, and that nothing is known yet."""

import pytest
from decision_support import container, pod
from view_support import NODE, OneNode

from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.registry.ports import NotReadYet
from topoalign.registry.scheduling.binding.binding import BindChecks
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

pytestmark = pytest.mark.anyio
OTHER = NodeName("node-2")


class Site:
    """A node all of whose four GPUs pod `a` has."""

    def __init__(self) -> None:
        self.it, self.finding = OneNode(), list[str]()
        self.it.tell([*self.it.says.all(), *self.it.says.admit(asking(4, "a"), "a")])
        self.it.view.expect(NODE, PodToSchedule(uid="a", request=asking(4, "a")))
        self.it.view.renew()
        self.it.scheduler.behind = lambda: next(iter(self.finding), None)
        self.checks = BindChecks(self.it.scheduler, "")


def asking(gpus: int, name: str = "new") -> PodRequest:
    return pod(container("main", gpus=gpus), name=name)


def new(gpus: int, nominated: NodeName | None = None) -> PodToSchedule:
    return PodToSchedule(uid="new", request=asking(gpus), nominated=nominated)


@pytest.mark.parametrize(("nominated", "waits"), [(NODE, True), (OTHER, False), (None, False)])
def test_a_bind_waits_for_its_own_victims_to_end(nominated: NodeName | None, waits: bool) -> None:
    """Another pod is nominated for what others will leave. Nobody waits for a pod that is not being deleted."""
    site = Site()
    before = site.checks.is_being_freed(NODE, new(2, nominated))
    site.it.view.begin_termination(NODE, "a")

    assert (False, waits) == (before, site.checks.is_being_freed(NODE, new(2, nominated)))


def test_any_bind_waits_for_what_terminated_pods_leave() -> None:
    """The API server shows their end before the node does. It is not waited for where it leaves too little."""
    site = Site()
    site.it.view.end(NODE, "a")
    freed = [site.checks.is_being_freed(NODE, new(gpus)) for gpus in (4, 5)]
    site.it.tell(site.it.says.end("a"))

    assert ([True, False], False) == (freed, site.checks.is_being_freed(NODE, new(4)))


async def test_nothing_is_judged_before_all_is_known() -> None:
    site = Site()
    site.it.unmanaged.add(OTHER)
    passes = site.checks.passes(OTHER, new(1)), site.checks.passes(NODE, new(1))
    site.finding.append("pods of Kubernetes are not listed yet")

    assert (True, False) == passes
    assert not site.checks.passes(OTHER, new(1))
    with pytest.raises(NotReadYet, match="not listed"):
        await site.checks.fits(NODE, new(1))


def test_a_pod_that_gets_nothing_of_its_own_holds_nothing_in_its_bind() -> None:
    site = Site()
    for uid, request in (("new", asking(1)), ("plain", pod(container("main"), name="plain"))):
        site.checks.assume(NODE, PodToSchedule(uid=uid, request=request))
    assumed = site.it.view.pods_on(NODE).assumed
    site.checks.view.unassume(NODE, "new")

    assert ({"new"}, set()) == ({*assumed}, {*site.it.view.pods_on(NODE).assumed})
