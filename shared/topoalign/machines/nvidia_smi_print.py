"""
Prints a machine as `nvidia-smi topo -m` does, byte for byte, for people and for scripts that read this format.

Columns are separated by tabs. The header begins with a tab, `X` has a space on either side, and no line ends with
spaces. In the rows of GPUs, an empty cell precedes GPU NUMA ID, as drivers print it; rows of NICs end with their last
device. Unknown values are `N/A`. NUMA nodes that were only inferred have no column, as with older drivers. The wide
form adds columns on the right and changes nothing else, so that scripts for the first columns still work.
"""

from collections.abc import Mapping, Sequence

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Gpu, Nic, Topology

CPU_AFFINITY = "CPU Affinity"
NUMA_AFFINITY = "NUMA Affinity"
GPU_NUMA_ID = "GPU NUMA ID"
UNKNOWN = "N/A"

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""

TAB = 8


def print_matrix(topology: Topology, wide: bool = False, used_by: Mapping[DeviceID, str] | None = None) -> str:
    """The matrix with its legends. `wide` adds PCI address, id, memory and users (`used_by`) of each device."""
    rows = _matrix(topology)
    if wide:
        rows = _join_columns(rows, _wide(topology, used_by))
    text = "".join(f"{row.rstrip()}\n" for row in rows) + LEGEND
    named = [f"  {_label(nic)}: {clean(nic.id)}\n" for nic in topology.nics if nic.id != _label(nic)]
    return text + "\nNIC Legend:\n\n" + "".join(named) if named else text


def _matrix(topology: Topology) -> list[str]:
    devices: list[Gpu | Nic] = [*topology.gpus, *topology.nics]
    known = topology.nodes_known or not any(gpu.numa_affinity for gpu in topology.gpus)
    header = ["", *map(_label, devices), CPU_AFFINITY, *[NUMA_AFFINITY] * known, GPU_NUMA_ID]
    rows = ["\t".join(header)]
    for device in devices:
        cells = [_label(device)]
        for other in devices:
            link = topology.link_by_pair.get((device.id, other.id))
            cells.append(" X " if other is device else UNKNOWN if link is None else link.label)
        if isinstance(device, Gpu):
            memory_node = UNKNOWN if device.memory_node is None else str(device.memory_node)
            cells += [_format_ids(device.cpu_affinity), *[_format_ids(device.numa_affinity)] * known, "", memory_node]
        rows.append("\t".join(cells))
    return rows


def _label(device: Gpu | Nic) -> str:
    return f"GPU{device.index}" if isinstance(device, Gpu) else f"NIC{device.index}"


def _format_ids(ids: Sequence[int]) -> str:
    return format_cpuset(ids) or UNKNOWN


def _wide(topology: Topology, used_by: Mapping[DeviceID, str] | None) -> list[list[str]]:
    table = [["PCI Address", "Device", "Memory"]]
    for gpu in topology.gpus:
        memory = UNKNOWN if gpu.memory is None else f"{gpu.memory // MIB} MiB"
        table.append([gpu.pci or UNKNOWN, gpu.id, memory])
    table += [[nic.pci or UNKNOWN, nic.id, ""] for nic in topology.nics]
    if used_by is not None:
        table[0].append("Used by")
        for cells in table[1:]:
            cells.append(used_by.get(DeviceID(cells[1]), ""))
    return [[clean(cell, 128) for cell in cells] for cells in table]


def _join_columns(rows: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    # each column of the table begins at one tab stop to the right of the rows
    for column in zip(*table, strict=True):
        width = max(len(row.expandtabs(TAB)) for row in rows) // TAB + 1
        rows = [
            row + "\t" * (width - len(row.expandtabs(TAB)) // TAB) + cell
            for row, cell in zip(rows, column, strict=True)
        ]
    return list(rows)
