"""
Describes how two devices of a node are connected, and the score of a connection.

The classes are those that `nvidia-smi topo -m` prints; the scores are go-gpuallocator's, so
that sets chosen here compare with sets chosen there.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from topoalign.core.model.ids import DeviceID


class PcieClass(StrEnum):
    """What lies between two devices on PCIe, the nearest first."""

    PSB = "PSB"
    """Nothing but a switch on their common board (NVML: internal)."""
    PIX = "PIX"
    """At most a single PCIe bridge or switch."""
    PXB = "PXB"
    """Several bridges, but not the host bridge."""
    PHB = "PHB"
    """The PCIe host bridge, typically the CPU."""
    NODE = "NODE"
    """Host bridges of the same NUMA node."""
    SYS = "SYS"
    """The interconnect between NUMA nodes."""


PCIE_SCORE = {kind: 60 - 10 * number for number, kind in enumerate(PcieClass)}
"""PSB 60, PIX 50, … SYS 10."""
NVLINK_SCORE = 100
"""Of each fabric link between two GPUs; added to the score of the PCIe path, as upstream adds it."""

NVML_LEVEL = {10 * number: kind for number, kind in enumerate(PcieClass)}
"""nvmlGpuTopologyLevel_t as NVML numbers it: 0 is PSB, 10 PIX, … 50 SYS."""


class LinkType(NamedTuple):
    """What the links between the GPUs of one model are."""

    name: str
    """For people, in the singular: `NVLink`, `xGMI link`."""
    gbps: float
    """GB/s of one link and direction."""


LINK_TYPES = {
    **dict.fromkeys(("P100",), LinkType("NVLink", 18.0)),
    **dict.fromkeys(("V100", "A100", "A800", "A30"), LinkType("NVLink", 20.0)),
    **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), LinkType("NVLink", 20.6)),
    **dict.fromkeys(("B100", "B200", "B300", "GB200", "GB300"), LinkType("NVLink", 40.1)),
    **dict.fromkeys(("A6000", "A5500", "A5000", "A4500", "A40", "3090"), LinkType("NVLink", 12.0)),
}
"""A word of the product name -> its links. Rates as NCCL 2.30.7 plans with (`src/graph/topo.h`)."""


def link_type(model: str) -> LinkType | None:
    """The links of a GPU by its product name, `NVIDIA H100 80GB HBM3`; None: not known."""
    words = model.replace("-", " ").split()
    return next((LINK_TYPES[word] for word in words if word in LINK_TYPES), None)


def link_name(model: str) -> str:
    """What people call a link of a GPU of this product name: `NVLink` where the model is not known."""
    return found.name if (found := link_type(model)) else "NVLink"


class Link(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The connection of two devices. Each unordered pair of a node's GPUs and NICs has at most one `Link`."""

    a: DeviceID
    """Id of one device."""
    b: DeviceID
    """Id of the other device."""

    pcie: PcieClass | None = None
    """The PCIe path. None: not known, as where a pasted matrix shows only the fabric links of a pair."""

    fabric_links: int = 0
    """Links of the GPUs' own fabric (NVLink, xGMI): direct ones, or through a switch the fewer of both ends' links to it."""

    @property
    def label(self) -> str:
        """The cell of `nvidia-smi topo -m` for the pair: fabric links hide the PCIe path; an unknown path shows as SYS."""
        return f"NV{self.fabric_links}" if self.fabric_links else (self.pcie or PcieClass.SYS).value
