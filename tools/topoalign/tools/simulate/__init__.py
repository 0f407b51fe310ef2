"""
A cluster in one command: described nodes, registries, a scheduler and pods that come and go, and what became of them.

`cluster` builds it, `node` is one node of it, `load` reads what pods there shall be, `foreign` binds some past the
registries, `reserved` compares what pods get with what was reserved for them, `report` counts, and `cases` tells of single
pods what explains them.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import anyio

from topoalign.core.model.ids import NodeName
from topoalign.runtime.tasks import background
from topoalign.tools.simulate.cluster import SimulatedCluster, Tls, simulated_cluster
from topoalign.tools.simulate.foreign import bind_foreign
from topoalign.tools.simulate.load import Shape, pods_of
from topoalign.tools.simulate.report import Report, is_foreign, report

LAST_SECONDS = (0.5, 3.0)
"""How long pods run."""
LOOK_SECONDS = 0.05
MOST_WAITING = 200
"""Pods that are created and not judged by a node yet. Others are created as these get their nodes."""

Progress = Callable[[int], None]
"""Told how many pods nodes have judged."""


async def simulate(  # noqa: PLR0913  # one parameter for each option
    nodes: int,
    machines: Sequence[str],
    policies: Sequence[str],
    shapes: Sequence[Shape],
    *,
    foreign: Sequence[Shape] = (),
    registries: int = 1,
    seed: int = 0,
    most_seconds: float = 600.0,
    shuffled: bool = False,
    tls: Tls | None = None,
    progress: Progress = lambda judged: None,
    at_half: Callable[[SimulatedCluster], None] = lambda cluster: None,
) -> Report:
    """
    Runs the cluster until every pod is bound and admitted or refused by its node, or for `most_seconds`.

    `foreign`: pods that another scheduler binds meanwhile. `at_half` is called once half of the pods are judged; `tls` and
    `shuffled` as for `simulated_cluster`. Raises NotReady, and what starting the parts raises.
    """
    chance = Random(seed)  # noqa: S311  # a seed repeats the load
    names = [NodeName(f"node-{number}") for number in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="ta-") as folder:
        async with simulated_cluster(
            names, machines, policies, registries, LAST_SECONDS, chance, Path(folder), tls, shuffled=shuffled
        ) as cluster:
            pods = pods_of(shapes, chance)
            began = time.monotonic()
            halved = False
            created = 0
            async with background() as tasks:
                tasks.start_soon(bind_foreign, cluster, pods_of(foreign, chance), chance)
                while (done := judged(cluster)) < len(pods) and time.monotonic() < began + most_seconds:
                    progress(done)
                    for pod in pods[created : done + MOST_WAITING]:
                        cluster.api.add_pod(pod)
                        created += 1
                    if not halved and 2 * done >= len(pods):
                        halved = True
                        at_half(cluster)
                    await anyio.sleep(LOOK_SECONDS)
            return report(cluster, len(pods), time.monotonic() - began)


def judged(cluster: SimulatedCluster) -> int:
    """How many pods the kubelet of a node has admitted or refused."""
    pods = (pod for node in cluster.nodes for pod in (*node.admitted, *(each.taken.pod for each in node.refusals)))
    return sum(not is_foreign(pod) for pod in pods)
