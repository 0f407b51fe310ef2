"""
Adds the offers of the configuration to the topology that was read, and reports what cannot be offered.

A topology is published with its offers, so that every subscriber and every prediction knows what the kubelet is
offered. NVML renumbers GPUs when one is lost. A configuration that selects GPUs by index must not select other GPUs
then. So a GPU keeps its first index while this process runs.
"""

import structlog
from msgspec.structs import replace

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.configuration import Configuration, ConfigurationFinding
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.plugin_config.resource_offers import offer_resources
from topoalign.runtime.metrics import ServiceMetric

log = structlog.get_logger("topoalign.discovery")


class NodeOffering:
    """Computes the offers of one node from its configuration."""

    def __init__(self, file: ConfigurationFile) -> None:
        self._file = file
        self._configuration: Configuration | None = None
        """The configuration of the newest offers. Under another configuration, earlier offers are not considered."""
        self._findings: tuple[ConfigurationFinding, ...] = ()
        self._indexes: dict[DeviceID, int] = {}
        """GPU -> the index by which the configuration selects it."""

    def figures(self) -> list[ServiceMetric]:
        """Returns the metrics of the offers, for /metrics."""
        return [
            ServiceMetric(
                "gauge",
                "topoalign_discovery_configuration_refused",
                "1 while the configuration file is invalid and the previous one stays in use.",
                lambda: self._file.reason_not_current is not None,
            ),
            ServiceMetric(
                "gauge",
                "topoalign_discovery_offers_withheld",
                "Offers of the configuration that are withheld because the node is not in a state for them.",
                lambda: sum(finding.severe for finding in self._findings),
            ),
        ]

    def note(self) -> str | None:
        """For /readyz?verbose: why the node cannot offer what the configuration specifies; None: it can."""
        severe = [f"{finding}; {finding.remedy}" for finding in self._findings if finding.severe]
        return "; ".join(filter(None, [self._file.reason_not_current, *severe])) or None

    def offered(self, topology: Topology, had: Topology | None) -> Topology:
        """Returns the topology with its offers; `had` is the previous topology."""
        configuration = self._file.current
        before = had.offered if had is not None and configuration == self._configuration else ()
        found = offer_resources(self._as_first_seen(topology), configuration, before)
        self._configuration = configuration
        for finding in found.findings:
            if finding not in self._findings:
                write = log.error if finding.severe else log.warning
                write("configuration", field=finding.field, finding=finding.finding, remedy=finding.remedy)
        self._findings = found.findings
        usual = replace(topology, offers=None)
        order = {device: position for position, device in enumerate((*topology.gpu_by_id, *topology.nic_by_id))}
        made = tuple(
            replace(offer, devices=tuple(sorted(offer.devices, key=lambda device: order[topology.parent_of(device)])))
            for offer in found.offers
        )
        return usual if made == usual.offered else replace(topology, offers=made)

    def _as_first_seen(self, topology: Topology) -> Topology:
        present = topology.gpu_by_id
        indexes = {device: index for device, index in self._indexes.items() if device in present}
        for gpu in topology.gpus:
            taken = set(indexes.values())
            indexes.setdefault(gpu.id, gpu.index if gpu.index not in taken else 1 + max(taken))
        self._indexes = indexes
        gpus = sorted((replace(gpu, index=indexes[gpu.id]) for gpu in topology.gpus), key=lambda gpu: gpu.index)
        return replace(topology, gpus=tuple(gpus))
