"""Finds the devices that an operator names: by index, uuid, PCI address or name."""

from collections.abc import Iterable, Sequence

from topoalign.core.model.errors import InvalidField, NotFound, clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology

MOST = 256
"""Devices in one request: more than any node has cards."""
MOST_LISTED = 32
"""Devices that an answer lists."""


def meant(topology: Topology, names: Sequence[str], former: Iterable[DeviceID] = ()) -> tuple[DeviceID, ...]:
    """
    The GPUs, NICs and MIG instances that these names stand for, each once: an id, a PCI address, `GPU3` or `NIC2` as
    `topoalign topo` prints them, or the index of a GPU. `former` devices, which the node may have no more, can be named by
    their ids.

    Raises NotFound for one that stands for nothing, and InvalidField for none or too many.
    """
    if not names or len(names) > MOST:
        raise InvalidField("devices", f"{len(names)} of them", f"name 1 to {MOST} devices")
    known = {str(device): device for device in former} | ways_to(topology)
    return tuple(dict.fromkeys(find_device(topology, known, name) for name in names))


def find_device(topology: Topology, known: dict[str, DeviceID], name: str) -> DeviceID:
    """The device of a name; `known`: name -> device. Raises NotFound with the devices of the node."""
    device = known.get(name) or known.get(name.lower()) or known.get(short(name.lower()))
    device = device or part_of_card(topology, known, name)
    if device is None:
        raise NotFound("device", name, f"name one of: {device_names(topology)}")
    return device


def part_of_card(topology: Topology, known: dict[str, DeviceID], name: str) -> DeviceID | None:
    """The MIG instance that `GPU3/MIG-…` names; None where that card does not have it, or the name is no such pair."""
    card, _, part = name.rpartition("/")
    device = known.get(part)
    if device is None or device not in topology.cards or topology.card_of(device) != known.get(card.lower()):
        return None
    return device


def ways_to(topology: Topology) -> dict[str, DeviceID]:
    """All that a device may be called, in lower case but for ids -> the device. Ids go before addresses, then indexes."""
    names: dict[str, DeviceID] = {str(gpu.index): gpu.id for gpu in topology.gpus}
    names |= {f"gpu{gpu.index}": gpu.id for gpu in topology.gpus}
    names |= {f"nic{nic.index}": nic.id for nic in topology.nics}
    names |= {nic.pci.lower(): nic.id for nic in topology.nics if nic.pci is not None}
    names |= {gpu.pci.lower(): gpu.id for gpu in topology.gpus if gpu.pci is not None}
    names |= {part.uuid: part.uuid for gpu in topology.gpus for part in gpu.mig or ()}
    return names | {device: device for device in (*topology.nic_by_id, *topology.gpu_by_id)}


def short(address: str) -> str:
    """`00000000:07:00.0`, as nvidia-smi prints it, and `07:00.0`, as lspci does, as sysfs writes them."""
    parts = address.split(":")
    if len(parts) == 2:
        return f"0000:{address}"
    return f"{parts[0][-4:]}:{parts[1]}:{parts[2]}" if len(parts) == 3 else address


def device_names(topology: Topology) -> str:
    """The devices of the node for an error message, at most MOST_LISTED."""
    names = [f"GPU{gpu.index} {clean(gpu.id)}" + (f" {clean(gpu.pci)}" if gpu.pci else "") for gpu in topology.gpus]
    names += [clean(part.uuid) for gpu in topology.gpus for part in gpu.mig or ()]
    names += [f"NIC{nic.index} {clean(nic.id)}" + (f" {clean(nic.pci)}" if nic.pci else "") for nic in topology.nics]
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return (", ".join(names[:MOST_LISTED]) or "none, this node has no devices") + more
