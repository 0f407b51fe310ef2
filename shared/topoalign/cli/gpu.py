"""`topoalign gpu`: device status, the pods that hold each device, and operator overrides."""

from collections.abc import Iterator, Sequence

import click

from topoalign.cli import gpu_usage, output
from topoalign.cli import link as links
from topoalign.cli.effects import Effect
from topoalign.cli.exit_codes import FAILURE
from topoalign.cli.gpu_partitioning import (
    format_remaining,
    format_strategy,
    holder_text,
    mig_document,
    partitioning_document,
)
from topoalign.cli.link import AnnouncedNode, NodeLink, on_node
from topoalign.core import wire
from topoalign.core.model.errors import quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import DevicesRequest, Override
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu
from topoalign.core.state.gpu_partitioning import GpuPartitioning, partitioning_by_gpu

NOT_ENFORCED = (
    "Limiter: none. Nothing limits what a container takes of a GPU in units or slots: amounts are counted, and not "
    "enforced."
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
def list_devices(link: NodeLink) -> None:
    """
    Show the status of each device, and which pods hold it; of partitioned GPUs also how they are shared, who has which
    share, and what is left.

    \b
    Examples:
      topoalign gpu list
      topoalign gpu list --json | jq '.devices[] | select(.state != "healthy")'
      topoalign gpu list --json | jq '.devices[] | {name, left: .division.left}'
      topoalign gpu list --json | jq '.devices[] | {name, mig: [.mig_profiles[]? | {name, free}]}'
    """
    status = links.read_node_or_machine(link.node_option, link.nats_option)
    divided = partitioning_by_gpu(status.state) if status.announced else {}
    if link.as_json:
        rows = [
            {
                **device_location(status, device),
                "id": device,
                **health_fields(health, degraded_gpus(status.topology).get(device)),
                "held_by": held_by(status, device),
                **({"division": partitioning_document(divided[device])} if device in divided else {}),
                **mig_document(status.topology.gpu_by_id.get(device)),
            }
            for device, health in list_health(status)
        ]
        output.print_json({"node": status.node, "devices": rows})
        return
    whole = all(each.is_whole for each in divided.values())
    output.columns(
        ("NAME", "DEVICE", "PCI", "HEALTH", "DIVIDED", "HELD BY", "LEFT", "WHY"),
        [
            row
            for device, health in list_health(status)
            for row in list_device_rows(status, device, health, None if whole else divided.get(device))
        ],
        without=("DIVIDED", "LEFT") if whole else (),
    )
    limiters = {offer.limited_by for offer in status.topology.offered if is_counted(offer)}
    if "none" in limiters:
        output.note(NOT_ENFORCED)


def is_counted(offer: Offer) -> bool:
    """Whether containers get amounts that the hardware does not enforce. It enforces slots that are MIG instances."""
    becomes_instances = offer.slots is not None and offer.slots.instances
    return offer.by_amounts and not becomes_instances


def list_device_rows(
    status: AnnouncedNode, device: DeviceID, health: DeviceHealth, partitioning: GpuPartitioning | None
) -> Iterator[tuple[object, ...]]:
    """The row of a device, and one more for each other holder of a partitioned GPU."""
    at = device_location(status, device)
    cells = (at["name"] or "-", device, at["pci"] or "-", format_state(health))
    degraded = degraded_gpus(status.topology).get(device)
    reasons = status.health_of(device).reason, degraded and f"degraded: {degraded}"
    reason = "; ".join(filter(None, reasons)) or "-"
    if partitioning is None:
        pods = held_by(status, device)
        yield (*cells, "-", "not known" if pods is None else " ".join(pods) or "-", "-", reason)
        return
    first, *others = [holder_text(each) for each in partitioning.held] or ["-"]
    yield (*cells, format_strategy(partitioning), first, format_remaining(partitioning), reason)
    yield from (("", "", "", "", "", other, "", "") for other in others)


def list_health(status: AnnouncedNode) -> Iterator[tuple[DeviceID, DeviceHealth]]:
    """Yields each GPU and NIC, followed by those parts of it that have a status of their own."""
    topology = status.topology
    for whole in (*topology.gpu_by_id, *topology.nic_by_id):
        yield whole, status.health_of(whole)
        for device in status.health:
            if device != whole and topology.parent_of(device) == whole:
                yield device, status.health_of(device)


def device_location(status: AnnouncedNode, device: DeviceID) -> dict[str, int | str | None]:
    """Index, name in `topo` and PCI address of a device; None for a part of a device."""
    whole = status.topology.gpu_by_id.get(device) or status.topology.nic_by_id.get(device)
    if whole is None:
        return {"index": None, "name": None, "pci": None}
    gpu = isinstance(whole, Gpu)
    return {"index": whole.index if gpu else None, "name": f"{'GPU' if gpu else 'NIC'}{whole.index}", "pci": whole.pci}


def health_fields(health: DeviceHealth, degraded: str | None = None) -> dict[str, object]:
    """The health of a device as fields of the JSON output. `degraded`: why the GPU is degraded, if it is."""
    known: dict[str, object] = {"state": health.state, "cordoned": health.cordoned, "reason": health.reason}
    return known | {"degraded": degraded} if degraded else known


def format_state(health: DeviceHealth) -> str:
    """The state of a device, and whether it is cordoned: `healthy, cordoned`."""
    return f"{health.state}, cordoned" if health.cordoned else health.state.value


def held_by(status: AnnouncedNode, device: DeviceID) -> tuple[str, ...] | None:
    """The pods that hold a device; None if they are unknown."""
    return status.holders.get(device, ()) if status.announced else None


@gpu.command(name="usage")
@on_node
def show_usage(link: NodeLink) -> None:
    """
    Show who uses each GPU now: the containers that hold it, and other processes that run on it.

    MEMORY and TIME are what processes use, as reported by the driver: bytes, and percent of the last second. HOLDS is
    `nothing` for processes without an allocation of the GPU: of the host, of other pods. `?` is not known.

    \b
    Examples:
      topoalign gpu usage --node gpu-1
      topoalign gpu usage --json | jq '.devices[] | select(.others != [])'
    """
    gpu_usage.print_usage(link)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown with the device's status.")
@on_node
def cordon(link: NodeLink, devices: Sequence[str], reason: str) -> None:
    """
    Stop giving out devices: the kubelet sees them as unhealthy. Containers that hold them keep them.

    A cordon survives restarts and reboots, until `uncordon` removes it.

    \b
    Examples:
      topoalign gpu cordon 3 --reason "fan is replaced at noon"
      topoalign gpu cordon 0000:07:00.0 mlx5_0 --node gpu-1
    """
    _send_override(link, "cordon", devices, reason)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@on_node
def uncordon(link: NodeLink, devices: Sequence[str]) -> None:
    """
    Remove the cordon of devices.

    \b
    Examples:
      topoalign gpu uncordon 3
    """
    _send_override(link, "uncordon", devices)


@gpu.command()
@click.argument("devices", metavar="ID...", nargs=-1, required=True)
@on_node
def heal(link: NodeLink, devices: Sequence[str]) -> int | None:
    """
    Forget the errors of devices, for example after a reset that the service did not notice.

    The newest reading of the driver still counts. The exit code is 1 if a device stays out of use.

    \b
    Examples:
      topoalign gpu heal 3
    """
    health = _send_override(link, "heal", devices)
    still = [device for device, known in health.items() if not known.usable]
    return FAILURE if still else None


def _send_override(
    link: NodeLink, word: Override, devices: Sequence[str], reason: str = ""
) -> dict[DeviceID, DeviceHealth]:
    effect = Effect(f"the {word} of {quoted(devices)}", "`topoalign gpu list` shows it; repeating it is safe")
    request = DevicesRequest(node=link.node, devices=tuple(devices), reason=reason)
    health: dict[DeviceID, DeviceHealth] = link.ask_discovery(
        wire.devices_subject(link.node, word), request, dict[DeviceID, DeviceHealth], effect
    )
    if link.as_json:
        output.print_json(
            {"node": link.node, "devices": {device: health_fields(known) for device, known in health.items()}}
        )
    else:
        output.columns(
            ("DEVICE", "HEALTH", "WHY"),
            [(device, format_state(known), known.reason or "-") for device, known in health.items()],
        )
    return health
