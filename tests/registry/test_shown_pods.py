"""Whoever waits for the watch of all pods to show one."""

import anyio
import pytest

from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedPods
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


async def test_a_pod_wakes_all_who_wait_for_it_although_one_gave_up() -> None:
    """Two binds of one pod: the scheduler has tried again."""
    shown, found = ReportedPods(), list[NodeName | None]()

    async def wait() -> None:
        found.append(await shown.node_of("uid", 600.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await all_tasks_blocked()
        given_up = await shown.node_of("uid", 0.0)
        shown.bind("uid", NODE)
        await all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert (None, [NODE]) == (given_up, found)
