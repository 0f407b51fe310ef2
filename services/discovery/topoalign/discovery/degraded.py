"""
Reports degraded GPUs: a warning in the log when a GPU becomes degraded, an entry when it recovers, and metrics.

Their health stays as it is, because a degraded GPU still works for pods with one GPU.
"""

from collections.abc import Mapping

import structlog

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.model import Topology
from topoalign.discovery.metrics import Metrics

REMEDY = (
    "compare with `nvidia-smi nvlink -s` and `nvidia-smi -q`; check that the fabric manager runs, then reset the GPU or "
    "have the board examined"
)

log = structlog.get_logger("topoalign.discovery")


class DegradedGpus:
    """Of one node."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._findings: Mapping[DeviceID, str] = {}

    def update(self, topology: Topology) -> None:
        """Compare the topology of the newest reading with the one before."""
        had = self._findings
        findings = degraded_gpus(topology)
        for gpu, finding in findings.items():
            if had.get(gpu) != finding:
                log.warning("a GPU is degraded", gpu=gpu, finding=finding, remedy=REMEDY)
        for gpu in had.keys() - findings.keys():
            log.info("a GPU is no longer degraded", gpu=gpu)
        self._findings = findings
        self._metrics.set_degraded({gpu.id: gpu.nvlinks_down for gpu in topology.gpus}, findings)
