"""
Machines by name, from public facts about them: for trials without the hardware, for tests and for the documentation.

The topologies are real: sockets, cores, NUMA nodes and their distances, PCIe switches, NVLinks, and the position of
each GPU and NIC. The names are artificial and readable: a GPU is `GPU-0`, and PCI addresses are numbered from the top.

Machines that were captured on real hardware (`make test-gpu`) are files in the folder `captured`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from topoalign.core.model.topology.model import Topology
from topoalign.machines.catalogue import systems

_MACHINES: dict[str, Callable[[], Topology]] = {
    "dgx1-volta": systems.dgx1_volta,
    "dgx2": systems.dgx2,
    "dgx-a100": systems.dgx_a100,
    "hgx-h100": systems.hgx_h100,
    "hgx-b200": systems.hgx_b200,
    "hgx-b200-gpu0-off": partial(systems.hgx_b200, 0),
    "hgx-b200-gpu0-half": partial(systems.hgx_b200, 9),
    "gb200-tray": systems.gb200_tray,
    "two-socket-8xpcie": systems.two_socket_8xpcie,
    "8x-nvlink-pairs": systems.nvlink_pairs,
    "8x-l40s": systems.l40s_8x,
    "8x-rtx4090": systems.rtx4090_8x,
    "a100-missing-bridge": systems.a100_missing_bridge,
    "epyc-nps4-4gpu": systems.epyc_nps4_4gpu,
    "cpu-only": systems.cpu_only,
}


CAPTURED = Path(__file__).parent / "captured"


def names() -> tuple[str, ...]:
    """All names of the catalogue, captured machines last."""
    return (*_MACHINES, *sorted(file.stem for file in CAPTURED.glob("*.json") if file.stem not in _MACHINES))


def machine(name: str) -> Topology:
    """The topology of a machine. Raises KeyError for a name that is not in `names()`."""
    if name in _MACHINES:
        return _MACHINES[name]()
    if name not in names():
        raise KeyError(name)
    from topoalign.machines import document  # only for machines that are in files

    return document.decode_machine((CAPTURED / f"{name}.json").read_bytes(), name).topology
