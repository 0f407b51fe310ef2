"""
Describes how two devices of a node are connected, and the score of a connection.

The classes are those of `nvidia-smi topo -m`. The scores are those of go-gpuallocator, so set scores are comparable.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from topoalign.core.model.ids import DeviceID


class PcieClass(StrEnum):
    """What the PCIe path between two devices crosses. The nearest class is first."""

    PSB = "PSB"
    """Only a switch on their common board (NVML: internal)."""
    PIX = "PIX"
    """At most one PCIe bridge or switch."""
    PXB = "PXB"
    """Several bridges, but not a host bridge."""
    PHB = "PHB"
    """The PCIe host bridge, typically the CPU."""
    NODE = "NODE"
    """Host bridges of the same NUMA node."""
    SYS = "SYS"
    """The interconnect between NUMA nodes."""


PCIE_SCORE = {kind: 60 - 10 * number for number, kind in enumerate(PcieClass)}
"""PSB 60, PIX 50, … SYS 10."""
NVLINK_SCORE = 100
"""Score of each fabric link between two GPUs, added to the score of the PCIe path, as in go-gpuallocator."""

NVML_LEVEL = {10 * number: kind for number, kind in enumerate(PcieClass)}
"""Value of NVML's nvmlGpuTopologyLevel_t -> class: 0 is PSB, 10 PIX, … 50 SYS."""


class LinkType(NamedTuple):
    """The type of the links between GPUs of one model."""

    name: str
    """For people, in the singular: `NVLink`, `xGMI link`."""
    gbps: float
    """GB/s of one link in each direction."""


LINK_TYPES = {
    **dict.fromkeys(("P100",), LinkType("NVLink", 18.0)),
    **dict.fromkeys(("V100", "A100", "A800", "A30"), LinkType("NVLink", 20.0)),
    **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), LinkType("NVLink", 20.6)),
    **dict.fromkeys(("B100", "B200", "B300", "GB200", "GB300"), LinkType("NVLink", 40.1)),
    **dict.fromkeys(("A6000", "A5500", "A5000", "A4500", "A40", "3090"), LinkType("NVLink", 12.0)),
}
"""Word of the product name -> type of the links. The rates are those that NCCL 2.30.7 assumes (`src/graph/topo.h`)."""


def link_type(model: str) -> LinkType | None:
    """The type of the links of a GPU by its product name, `NVIDIA H100 80GB HBM3`; None: unknown."""
    words = model.replace("-", " ").split()
    return next((LINK_TYPES[word] for word in words if word in LINK_TYPES), None)


def link_name(model: str) -> str:
    """The name of a link of a GPU with this product name, for people: `NVLink` if the model is unknown."""
    return found.name if (found := link_type(model)) else "NVLink"


class Link(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The connection of two devices. Each unordered pair of a node's GPUs and NICs has at most one `Link`."""

    a: DeviceID
    """Id of one device."""
    b: DeviceID
    """Id of the other device."""

    pcie: PcieClass | None = None
    """The PCIe path. None: unknown, for example if a pasted matrix shows only the fabric links of the pair."""

    fabric_links: int = 0
    """
    Number of links of the GPUs' own fabric (NVLink, xGMI). With a switch between the GPUs, the smaller number of links
    that one of them has to it.
    """

    @property
    def label(self) -> str:
        """The pair's cell in `nvidia-smi topo -m`. Fabric links hide the PCIe path. An unknown path is shown as SYS."""
        return f"NV{self.fabric_links}" if self.fabric_links else (self.pcie or PcieClass.SYS).value
