"""
A whole cluster: pods are scheduled, bound, admitted and end, over HTTPS, NATS, kubelet sockets and an API server.

What the registry tells the scheduler is what the node's kubelet then decides, whichever registry is asked, and while one is
killed: no node refuses a pod, and no device is given twice. Pods that ask for it have NICs beside their GPUs.
"""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from certificate_support import Authority
from faults_support import THOROUGH

from topoalign.tools.simulate import simulate
from topoalign.tools.simulate.cluster import SimulatedCluster, Tls
from topoalign.tools.simulate.load import read_shape

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

NODES, TIMES = (20, 13) if THOROUGH else (3, 1)
SHAPES = (
    "18:gpus=1,cpus=4,memory=8",
    "10:gpus=2,cpus=8,memory=16",
    "3:gpus=4",
    "3:gpus=8",
    "3:gpus=2,cpus=4,memory=8,same-pcie",
    "2:gpus=4,same-pcie",
)

FOREIGN = ("60:gpus=1", "40:gpus=2,cpus=8,memory=16") if THOROUGH else ()
"""Pods that another scheduler binds meanwhile. On a busy machine the registry may learn of one after a second only."""


async def test_no_node_refuses_a_pod_though_a_registry_is_killed_midway(tmp_path: Path) -> None:
    tls_dir = tmp_path / "tls"
    authority = Authority(tmp_path / "ca")
    authority.issue(tls_dir, "registry", datetime(2100, 1, 1, tzinfo=UTC))

    def kill_one(cluster: SimulatedCluster) -> None:
        cluster.replicas[0].kill()

    found = await simulate(
        NODES,
        ["dgx-a100"],
        ["single-numa-node", "restricted"],
        [read_shape(text) for text in SHAPES for _ in range(TIMES)],
        foreign=[read_shape(text) for text in FOREIGN],
        registries=2,
        most_seconds=500.0,
        tls=Tls(tls_dir, authority.certificate),
        at_half=kill_one,
    )

    assert ({}, 0, 0, 0) == (found.refused, found.doubled, found.apart, found.unexplained)
    assert (found.pods, 0) == (found.admitted + found.overtaken, found.waiting)
