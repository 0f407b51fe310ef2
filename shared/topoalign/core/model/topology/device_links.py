"""
Describes how two devices of a node are connected, and the score of a connection.

The classes are those that `nvidia-smi topo -m` prints; the scores are go-gpuallocator's, so
that sets chosen here compare with sets chosen there.
"""

from enum import StrEnum

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


PCIE_SCORE = {
    PcieClass.PSB: 60,
    PcieClass.PIX: 50,
    PcieClass.PXB: 40,
    PcieClass.PHB: 30,
    PcieClass.NODE: 20,
    PcieClass.SYS: 10,
}
NVLINK_SCORE = 100
"""Of each NVLink between two GPUs; added to the score of the PCIe path, as upstream adds it."""

NVML_LEVEL = {
    0: PcieClass.PSB,
    10: PcieClass.PIX,
    20: PcieClass.PXB,
    30: PcieClass.PHB,
    40: PcieClass.NODE,
    50: PcieClass.SYS,
}
"""nvmlGpuTopologyLevel_t as NVML numbers it."""


class Link(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The connection of two devices. Each unordered pair of a node's GPUs and NICs has at most one `Link`."""

    a: DeviceID
    """Id of one device."""
    b: DeviceID
    """Id of the other device."""

    pcie: PcieClass | None = None
    """The PCIe path. None: not known, as where a pasted matrix shows only the NVLinks of a pair."""

    nvlinks: int = 0
    """NVLinks between two GPUs: direct ones, or through NVSwitch the smaller of both ends' links to the switch."""

    @property
    def label(self) -> str:
        """The cell of `nvidia-smi topo -m` for the pair: NVLinks hide the PCIe path; an unknown path shows as SYS."""
        return f"NV{self.nvlinks}" if self.nvlinks else (self.pcie or PcieClass.SYS).value
