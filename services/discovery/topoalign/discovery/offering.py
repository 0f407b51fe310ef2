"""
Adds the offers of the configuration to the hardware that was found, and reports what cannot be offered.

A topology is published with its offers, so every subscriber, predictions included, knows what the kubelet is offered.
NVML renumbers GPUs when one is lost. A configuration with indexes must not select other GPUs for that reason, so a GPU
keeps its first index as long as this process runs.
"""

from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.findings import Finding
from topoalign.plugin_config.offers import offers
from topoalign.plugin_config.watching import ConfigurationFile
from topoalign.runtime.figures import Figure

log = structlog.get_logger("topoalign.discovery")


class NodeOffering:
    """Of one node."""

    def __init__(self, file: ConfigurationFile) -> None:
        self._file = file
        self._made_by: Configuration | None = None
        """The configuration by which the newest offers were made: those made by another say nothing about what may stay."""
        self._findings: tuple[Finding, ...] = ()
        self._indexes: dict[DeviceID, int] = {}
        """Of GPUs, as the configuration means them."""

    def figures(self) -> list[Figure]:
        """For /metrics."""
        return [
            Figure(
                "gauge",
                "topoalign_discovery_configuration_refused",
                "1 while the configuration file is wrong and the one before stays in use.",
                lambda: self._file.trouble is not None,
            ),
            Figure(
                "gauge",
                "topoalign_discovery_offers_withheld",
                "Things that the configuration asks for and that are not offered because the node is not fit for it.",
                lambda: sum(finding.severe for finding in self._findings),
            ),
        ]

    def note(self) -> str | None:
        """For /readyz?verbose: what keeps the configuration from coming true."""
        severe = [f"{finding}; {finding.remedy}" for finding in self._findings if finding.severe]
        return "; ".join([*([self._file.trouble] if self._file.trouble is not None else []), *severe]) or None

    def offered(self, topology: Topology, had: Topology | None) -> Topology:
        """The topology with its offers; `had` is the one before."""
        configuration = self._file.current
        before = had.offered if had is not None and configuration == self._made_by else ()
        found = offers(self._as_first_seen(topology), configuration, before)
        self._made_by = configuration
        self._say(found.findings)
        usual = replace(topology, offers=None)
        made = tuple(replace(offer, devices=in_hardware_order(offer.devices, topology)) for offer in found.offers)
        return usual if made == usual.offered else replace(topology, offers=made)

    def _as_first_seen(self, topology: Topology) -> Topology:
        """The same with the indexes by which the configuration knows its GPUs."""
        present = topology.gpu_by_id
        indexes = {device: index for device, index in self._indexes.items() if device in present}
        for gpu in topology.gpus:
            taken = set(indexes.values())
            indexes.setdefault(gpu.id, gpu.index if gpu.index not in taken else 1 + max(taken))
        self._indexes = indexes
        gpus = sorted((replace(gpu, index=indexes[gpu.id]) for gpu in topology.gpus), key=lambda gpu: gpu.index)
        return replace(topology, gpus=tuple(gpus))

    def _say(self, findings: tuple[Finding, ...]) -> None:
        """What is new, each once."""
        for finding in findings:
            if finding not in self._findings:
                say = log.error if finding.severe else log.warning
                say("configuration", field=finding.field, finding=finding.finding, remedy=finding.remedy)
        self._findings = findings


def in_hardware_order(devices: Sequence[DeviceID], topology: Topology) -> tuple[DeviceID, ...]:
    """In the order of their cards in the hardware as it is now."""
    order = {card: place for place, card in enumerate((*topology.gpu_by_id, *topology.nic_by_id))}
    return tuple(sorted(devices, key=lambda device: order[topology.card_of(device)]))
