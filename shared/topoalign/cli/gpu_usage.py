"""The table of `topoalign gpu usage`: who uses each GPU now, holders first, then all others."""

from collections.abc import Iterable, Iterator

import msgspec

from topoalign.cli import formatting, output
from topoalign.cli.formatting import binary
from topoalign.cli.link import NodeLink
from topoalign.core import wire
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.processes import GpuProcess, LibraryReading, Measurement
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.usage.attribution import (
    DeviceShares,
    HolderUse,
    NodeShares,
    OtherUse,
    Use,
    attribute_use,
    has_library,
    with_library,
)

TITLES = ("NAME", "DEVICE", "WHO", "HOLDS", "MEMORY", "TIME", "LIBRARY", "PROCESSES")
IN_ALL = "(in all)"
MOST_PIDS = 4
"""Maximum number of processes in a row; the JSON output has all."""

Row = tuple[str, str, str, str, str, str, str, str]


def print_usage(link: NodeLink) -> None:
    """Print the use of a node's GPUs, as a table or as JSON. Raises the errors of `link`."""
    measured: Measurement = link.ask_discovery(
        wire.discovery_subject(link.node, "use"), NodeRequest(node=link.node), Measurement
    )
    status = link.read_node()
    shares = attribute_use(status.state, measured)
    if has_library(status.state):
        try:
            reading: LibraryReading
            reading, _ = link.ask("library-use", NodeRequest(node=link.node), LibraryReading)
        except TopoalignError as error:  # the rest of the table is still known
            reading = LibraryReading(node=link.node, finding=error.finding)
        shares = with_library(shares, reading)
    if link.as_json:
        output.print_json(shares_document(shares, status.topology))
        return
    limited = any(holder.library is not None for device in shares.devices for holder in device.holders)
    rows = [row for device in shares.devices for row in list_use_rows(device, status.topology)]
    output.columns(TITLES, rows, without=() if limited else ("LIBRARY",))
    if shares.finding:
        output.note(f"it is not known where processes run: {shares.finding}")
    if shares.left_out:
        output.note(f"{shares.left_out} processes with less memory are left out")
    if shares.library_finding:
        output.note(f"it is not known what the libraries in containers count: {shares.library_finding}")


def shares_document(shares: NodeShares, topology: Topology) -> dict[str, object]:
    """The JSON output: the shares, with index, name and PCI address of each GPU."""
    devices = []
    for row in shares.devices:
        gpu = topology.gpu_by_id[row.gpu]
        named = {"index": gpu.index, "name": f"GPU{gpu.index}", "pci": gpu.pci}
        devices.append({**named, **msgspec.to_builtins(row)})
    return {**msgspec.to_builtins(shares), "devices": devices}


def list_use_rows(device: DeviceShares, topology: Topology) -> Iterator[Row]:
    """The rows of one GPU or instance: its total, its holders, all others. A GPU in MIG mode has only the total."""
    at = (f"GPU{topology.gpu_by_id[device.gpu].index}", device.device)
    if device.failure:
        yield (*at, f"not measured: {device.failure}", "", "?", "?", "", "")
    else:
        used = format_memory_use(device.memory_used, device.memory)
        yield (*at, IN_ALL, "", used, percent(device.utilization), "", "")
    is_mps = any(offer.sharing == "mps" for offer in topology.offers_by_base.get(device.device, ()))
    for holder in device.holders:
        what = describe_use(holder, device.memory, "MPS share" if is_mps else "time slice")
        count = holder.library
        counted = "" if count is None else f"{binary(count.memory)}, {percent(count.utilization)}"
        yield (*at, formatting.owner(holder.owner), what, *cells(holder.use, holder.memory, counted))
    for other in device.others:
        what = "?" if other.where == "unknown" else "nothing"  # it may belong to a holder
        yield (*at, name_other_use(other), what, *cells(other.use, None, ""))


def describe_use(holder: HolderUse, memory: int | None, share: str = "time slice") -> str:
    """The share of a container in a device with this much memory: `all of it`, `2 time slices`, `20 % and 4 GiB`."""
    if holder.cores is None or holder.memory is None:
        count = len(holder.devices)
        return "all of it" if holder.cores is not None else f"{count} {share}{'s' * (count > 1)}"
    if holder.cores == CORES and holder.memory >= (memory or 0) // MIB * MIB:
        return "all of it"
    return f"{holder.cores} % and {binary(holder.memory)}" if holder.cores else binary(holder.memory)


def name_other_use(other: OtherUse) -> str:
    """Names processes without an allocation: `ml/train/main`, `pod <uid>`, `host: /user.slice`."""
    if other.owner is not None:
        name = f"{other.owner.namespace}/{other.owner.pod}"
        return f"{name}/{other.owner.container}" if other.owner.container else name
    if other.where == "pod":
        container = next((each.identity.container for each in other.use.processes if each.identity is not None), "")
        return f"pod {other.pod_uid}" + (f", container {container}" if container else "")
    return f"host: {other.cgroup}" if other.where == "host" else "not known"


def cells(use: Use, given: int | None, counted: str) -> tuple[str, str, str, str]:
    """Memory, time, what the library in the container counts, and processes of a row."""
    return format_memory_use(use.memory, given), percent(use.utilization), counted, pids(use.processes)


def format_memory_use(used: int | None, total: int | None) -> str:
    """`12 GiB of 80 GiB`, or `12 GiB` without a total; `?` if the used memory is unknown."""
    text = "?" if used is None else binary(used)
    return text if total is None else f"{text} of {binary(total)}"


def percent(value: int | None) -> str:
    """`97%`, or `?`."""
    return "?" if value is None else f"{value}%"


def pids(processes: Iterable[GpuProcess]) -> str:
    """`4711 python3, 4712 python3 and 2 more`."""
    texts = [f"{each.pid} {each.identity.command if each.identity is not None else ''}".strip() for each in processes]
    more = len(texts) - MOST_PIDS
    return ", ".join(texts[:MOST_PIDS]) + (f" and {more} more" if more > 0 else "")
