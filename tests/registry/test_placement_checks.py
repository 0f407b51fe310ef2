"""A bind is for nodes that Kubernetes leaves to the pod, and for pods of our scheduler, whoever asks for it."""

from typing import Any

import pytest
from api_server_support import pod_of, shown_pod
from registry_support import World
from view_support import NODE, OneNode

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.binding.binding import BindChecks, NodeForbidden, OtherScheduler
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
TAINT = {"key": "tenant", "value": "a", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("node", "spec", "code"),
    [
        ({}, {}, ""),
        ({}, {"schedulerName": "any"}, ""),
        ({"unschedulable": True}, {}, "NodeNotAllowed"),
        ({"taints": [TAINT]}, {}, "NodeNotAllowed"),
        ({"taints": [TAINT]}, {"tolerations": [{"key": "tenant", "operator": "Exists"}]}, ""),
        ({}, {"nodeSelector": {"tenant": "b"}}, "NodeNotAllowed"),
    ],
    ids=["allowed", "no scheduler is ours alone", "cordoned", "tainted", "tolerated", "not selected"],
)
async def test_a_pod_that_kubernetes_keeps_off_is_not_bound(
    node: dict[str, Any], spec: dict[str, Any], code: str
) -> None:
    """Nothing is reserved for it, either."""
    world = World()
    await world.say(*world.says.all())
    world.kubernetes.add_node(NODE)
    world.kubernetes.nodes.merge(("", NODE), {"spec": node})
    pod = shown_pod("a")
    pod["spec"].update(spec)
    uid = str(world.kubernetes.add_pod(pod)["metadata"]["uid"])
    found = ""
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await all_tasks_blocked()
        try:
            await scheduling.bind("ml", "a", uid, NODE)
        except TopoalignError as error:
            found = error.code
        reserved = scheduling.reservations.of_pod(uid)

    bound = world.kubernetes.pods.get(("ml", "a"))["spec"].get("nodeName")
    assert (code, None if code else NODE, bool(code)) == (found, bound, reserved == {})


@pytest.mark.parametrize(
    ("ours", "named", "raised"),
    [
        ("", "volcano", None),
        ("ours", "volcano", OtherScheduler),
        ("ours", "ours", None),
        ("ours", "default-scheduler", None),
        ("ours", "", None),
    ],
)
def test_where_ours_has_a_name_pods_of_others_are_left_to_them(
    ours: str, named: str, raised: type[Exception] | None
) -> None:
    """A pod that no webhook has seen may name Kubernetes' own, which may have the extender as well."""
    pod = shown_pod("a")
    pod["spec"].update({"schedulerName": named} if named else {})
    seen, other = pod_of(FakeCluster().add_pod(pod)), NodeName("other")
    it = OneNode()
    it.scheduler.allows = lambda pod, node: node == NODE
    checks = BindChecks(it.scheduler, ours)

    if raised is None:
        checks.check_placement(seen, NODE)
        raised = NodeForbidden
    with pytest.raises(raised):
        checks.check_placement(seen, other)
