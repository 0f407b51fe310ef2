"""C50: pods that no node can admit, of a controller that creates each failed one again at once, fail on no node."""

from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from topoalign.core.model.ids import NodeName
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.tools.simulate.cluster import simulated_cluster
from topoalign.tools.simulate.load import pods_of, read_shape
from topoalign.tools.simulate.report import explained

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

RUNAWAYS = 5
SHAPE = f"{RUNAWAYS}:gpus=4,cpus=4,memory=8"
"""A NUMA node of a dgx-a100 has two GPUs at most."""
NODE, POLICY, FOREVER = NodeName("node-0"), "single-numa-node", (600.0, 600.0)


class Controller:
    """Creates each pod that has failed again, at once and without end."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.created: list[str] = []
        self._cluster = cluster

    async def run(self) -> None:
        failed: set[str] = set()
        while True:
            for pod in list(self._cluster.pods):
                name = pod["metadata"]["name"]
                if pod["status"]["phase"] == "Failed" and name not in failed:
                    failed.add(name)
                    self.created.append(self._create_again(pod))
            await self._cluster.pods.wait()

    def _create_again(self, pod: dict[str, Any]) -> str:
        name, spec = f"again-{len(self.created)}", {key: pod["spec"][key] for key in ("containers", "schedulerName")}
        self._cluster.add_pod({"metadata": {"name": name, "namespace": "default"}, "spec": spec})
        return name


async def test_pods_that_fit_nowhere_fail_on_no_node(short_folder: Path) -> None:
    """
    The filter says what the kubelet would, so they wait with a reason, and a pod that fits is not held up. One that is bound
    past the scheduler fails once: the pod that replaces it waits like the others.
    """
    async with (
        simulated_cluster([NODE], ["dgx-a100"], [POLICY], 1, FOREVER, Random(0), short_folder) as world,
        anyio.create_task_group() as tasks,
    ):
        controller, api, node = Controller(world.api), world.api, world.nodes[0]
        tasks.start_soon(controller.run)
        for pod in pods_of([read_shape(SHAPE)], Random(0)):
            api.add_pod(pod)
        while not all(explained(pod) for pod in api.pods):
            await api.pods.wait()
        for pod in pods_of([read_shape("1:gpus=2")], Random(0)):
            api.add_pod({**pod, "metadata": {"name": "fits", "namespace": "default"}})
        while not node.admitted:
            await api.pods.wait()
        before = [each.taken.pod for each in node.refusals], list(controller.created)

        api.bind("default", "pod-0-0", {"target": {"name": NODE}})
        while not (controller.created and all(explained(each) for each in api.pods if "nodeName" not in each["spec"])):
            await api.pods.wait()
        waiting = [pod["metadata"]["name"] for pod in api.pods if "nodeName" not in pod["spec"]]
        tasks.cancel_scope.cancel()

    assert ([], []) == before
    assert (["fits"], ["pod-0-0"]) == (node.admitted, [each.taken.pod for each in node.refusals])
    assert "TopologyAffinityError" == node.refusals[0].reason
    assert ["again-0", "pod-0-1", "pod-0-2", "pod-0-3", "pod-0-4"] == sorted(waiting)
