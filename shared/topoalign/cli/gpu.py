"""`topoalign gpu`: device status, the pods that hold each device, and operator overrides."""

import os
from collections.abc import Iterator, Mapping, Sequence

import click

from topoalign.cli import link as links
from topoalign.cli import output, usage
from topoalign.cli.divisions import document, holder_text, left_text, mig_document, way_text
from topoalign.cli.effects import printing
from topoalign.cli.errors import FAILURE
from topoalign.cli.link import Link, NodeStatus, on_node
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import Override
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu
from topoalign.core.state.gpu_partitioning import GpuPartitioning, partitioning_by_gpu

NOT_ENFORCED = (
    "Limiter: none. Nothing limits what a container takes of a GPU in units or slots: amounts are counted, and not "
    "enforced."
)
UNTOLD = (
    "Limiter: not told, by a discovery of an earlier version. It is not known whether anything limits what a container "
    "takes of a GPU in units or slots."
)


@click.group()
def gpu() -> None:
    """
    Show the status of GPUs and NICs, or override it.

    Name a device as `topo` prints it (GPU3, NIC2), by its id or its PCI address; a GPU also by its index alone, a MIG
    instance by its uuid.

    \b
    Examples:
      topoalign gpu list
      topoalign gpu usage
      topoalign gpu cordon GPU3 --reason "fan is replaced at noon"
      topoalign gpu uncordon GPU3
      topoalign gpu heal GPU-8d1c7f32-9a0b-4c11-8c0e-2f5d1b1a7e55
    """


@gpu.command(name="list")
@on_node
def list_devices(link: Link) -> None:
    """
    Show the status of each device, and which pods hold it; of GPUs that are divided also how, who has which part, and what
    is left.

    \b
    Examples:
      topoalign gpu list
      topoalign gpu list --json | jq '.devices[] | select(.state != "healthy")'
      topoalign gpu list --json | jq '.devices[] | {name, left: .division.left}'
      topoalign gpu list --json | jq '.devices[] | {name, mig: [.mig_profiles[]? | {name, free}]}'
    """
    status = links.discovered_or_read(link.node_option, link.nats_option, os.environ)
    divided = partitioning_by_gpu(status.state) if status.announced else {}
    if link.as_json:
        rows = [
            {
                **places(status, device),
                "id": device,
                **facts(health, degraded_gpus(status.topology).get(device)),
                "held_by": held_by(status, device),
                **({"division": document(divided[device])} if device in divided else {}),
                **mig_document(status.topology.gpu_by_id.get(device)),
            }
            for device, health in every(status)
        ]
        output.document({"node": status.node, "devices": rows})
        return
    if all(each.is_whole for each in divided.values()):
        output.columns(
            ("NAME", "DEVICE", "PCI", "HEALTH", "HELD BY", "WHY"),
            [
                (*named_cells(status, device), word(health), holders_cell(status, device), why(status, device))
                for device, health in every(status)
            ],
        )
    else:
        output.columns(
            ("NAME", "DEVICE", "PCI", "HEALTH", "DIVIDED", "HELD BY", "LEFT", "WHY"),
            [row for device, health in every(status) for row in rows_of(status, device, health, divided.get(device))],
        )
    limiters = {offer.limited_by for offer in status.topology.offered if is_counted(offer)}
    if "none" in limiters:
        output.note(NOT_ENFORCED)
    if None in limiters:
        output.note(UNTOLD)


def is_counted(offer: Offer) -> bool:
    """Whether containers get amounts that the hardware does not limit, as it does where slots become MIG instances."""
    becomes_instances = offer.slots is not None and offer.slots.instances
    return offer.by_amounts and not becomes_instances


def rows_of(
    status: NodeStatus, device: DeviceID, health: DeviceHealth, division: GpuPartitioning | None
) -> Iterator[tuple[str, ...]]:
    """The row of a device, and one more for each other holder of a GPU that is divided."""
    cells = (*named_cells(status, device), word(health))
    reason = why(status, device)
    if division is None:
        yield (*cells, "-", holders_cell(status, device), "-", reason)
        return
    first, *others = [holder_text(each) for each in division.held] or ["-"]
    yield (*cells, way_text(division), first, left_text(division), reason)
    yield from (("", "", "", "", "", other, "", "") for other in others)


def why(status: NodeStatus, device: DeviceID) -> str:
    """The reason of a device's health; of a degraded GPU also the finding."""
    finding = degraded_gpus(status.topology).get(device)
    reasons = status.health_of(device).reason, finding and f"degraded: {finding}"
    return "; ".join(filter(None, reasons)) or "-"


def named_cells(status: NodeStatus, device: DeviceID) -> tuple[str, str, str]:
    """Name, id and PCI address of a device; a part has its id alone."""
    at = places(status, device)
    return str(at["name"] or "-"), device, str(at["pci"] or "-")


def holders_cell(status: NodeStatus, device: DeviceID) -> str:
    """The pods that hold a device."""
    pods = held_by(status, device)
    return "not known" if pods is None else " ".join(pods) or "-"


def every(status: NodeStatus) -> Iterator[tuple[DeviceID, DeviceHealth]]:
    """All cards, and after each card those parts of it that something is said of."""
    topology = status.topology
    for card in (*topology.gpu_by_id, *topology.nic_by_id):
        yield card, status.health_of(card)
        for device in status.health:
            if device != card and topology.card_of(device) == card:
                yield device, status.health_of(device)


def places(status: NodeStatus, device: DeviceID) -> dict[str, int | str | None]:
    """Index, name in `topo` and PCI address of a card; a part has none of its own."""
    card = status.topology.gpu_by_id.get(device) or status.topology.nic_by_id.get(device)
    if card is None:
        return {"index": None, "name": None, "pci": None}
    gpu = isinstance(card, Gpu)
    return {"index": card.index if gpu else None, "name": f"{'GPU' if gpu else 'NIC'}{card.index}", "pci": card.pci}


def facts(health: DeviceHealth, degraded: str | None = None) -> dict[str, object]:
    """The health of a device as fields of the JSON output; `degraded`: the finding, of a degraded GPU."""
    known: dict[str, object] = {"state": health.state, "cordoned": health.cordoned, "reason": health.reason}
    return known | {"degraded": degraded} if degraded else known


def word(health: DeviceHealth) -> str:
    """The state of a device, and whether it is cordoned: `healthy, cordoned`."""
    return f"{health.state}, cordoned" if health.cordoned else health.state.value


def held_by(status: NodeStatus, device: DeviceID) -> tuple[str, ...] | None:
    """The pods that hold a device; None where that is not known."""
    return status.holders.get(device, ()) if status.announced else None


@gpu.command(name="usage")
@on_node
def show_usage(link: Link) -> None:
    """
    Show who uses each GPU now: the containers that hold it, and whoever else runs on it.

    MEMORY and TIME are what processes use, as the driver tells: bytes, and percent of the last second. HOLDS says `nothing`
    for processes that were not given the GPU: of the host, of other pods. `?` is not known.

    \b
    Examples:
      topoalign gpu usage --node gpu-1
      topoalign gpu usage --json | jq '.devices[] | select(.others != [])'
    """
    usage.show(link)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown with the device's status.")
@on_node
def cordon(link: Link, devices: Sequence[str], reason: str) -> None:
    """
    Stop giving out devices: the kubelet sees them as unhealthy. Containers that hold them keep them.

    A cordon survives restarts and reboots, until `uncordon` removes it.

    \b
    Examples:
      topoalign gpu cordon 3 --reason "fan is replaced at noon"
      topoalign gpu cordon 0000:07:00.0 mlx5_0 --node gpu-1
    """
    tell(link, "cordon", devices, reason)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@on_node
def uncordon(link: Link, devices: Sequence[str]) -> None:
    """
    Remove the cordon of devices.

    \b
    Examples:
      topoalign gpu uncordon 3
    """
    tell(link, "uncordon", devices)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@on_node
def heal(link: Link, devices: Sequence[str]) -> int | None:
    """
    Forget the errors of devices, for example after a reset that the service did not notice.

    The newest reading of the driver still counts. The exit code is 1 if a device stays out of use.

    \b
    Examples:
      topoalign gpu heal 3
    """
    health = tell(link, "heal", devices)
    still = [device for device, known in health.items() if not known.usable]
    return FAILURE if still else None


def tell(link: Link, word: Override, devices: Sequence[str], reason: str = "") -> Mapping[DeviceID, DeviceHealth]:
    """Send the override to the node's discovery, and print the resulting health of each device."""
    health = link.tell(word, devices, reason)
    with printing(links.spoken(word, devices)):
        show(link, health)
    return health


def show(link: Link, health: Mapping[DeviceID, DeviceHealth]) -> None:
    """Print the health of these devices, as a table or as JSON."""
    if link.as_json:
        output.document({"node": link.node, "devices": {device: facts(known) for device, known in health.items()}})
        return
    output.columns(
        ("DEVICE", "HEALTH", "WHY"), [(device, word(known), known.reason or "-") for device, known in health.items()]
    )
