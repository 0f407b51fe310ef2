"""Finds the devices that an operator names: by index, uuid, PCI address or name."""

from collections.abc import Iterable, Sequence

from topoalign.core.model.errors import InvalidField, NotFound, clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology

MOST = 256
"""Devices in one request: more than any node has GPUs and NICs."""
MOST_LISTED = 32
"""Devices that an answer lists."""


def find_devices(topology: Topology, names: Sequence[str], former: Iterable[DeviceID] = ()) -> tuple[DeviceID, ...]:
    """
    Returns the GPUs, NICs and MIG instances with these names, each once. A name is an id, a PCI address, `GPU3` or `NIC2` as
    `topoalign topo` prints them, or the index of a GPU. `former` devices, which the node may have lost, are found by id
    only.

    Raises NotFound for an unknown name, and InvalidField for no name or too many.
    """
    if not names or len(names) > MOST:
        raise InvalidField("devices", f"{len(names)} of them", f"name 1 to {MOST} devices")
    known = {str(device): device for device in former} | devices_by_name(topology)
    return tuple(dict.fromkeys(find_device(topology, known, name) for name in names))


def find_device(topology: Topology, known: dict[str, DeviceID], name: str) -> DeviceID:
    """Returns the device of a name; `known`: name -> device. Raises NotFound, which lists the devices of the node."""
    device = known.get(name) or known.get(name.lower()) or known.get(full_address(name.lower()))
    device = device or find_instance(topology, known, name)
    if device is None:
        raise NotFound("device", name, f"name one of: {device_names(topology)}")
    return device


def find_instance(topology: Topology, known: dict[str, DeviceID], name: str) -> DeviceID | None:
    """Returns the MIG instance that `GPU3/MIG-…` names. None if the GPU does not have it, or for another form of name."""
    gpu, _, instance = name.rpartition("/")
    device = known.get(instance)
    if device is None or device not in topology.cards or topology.card_of(device) != known.get(gpu.lower()):
        return None
    return device


def devices_by_name(topology: Topology) -> dict[str, DeviceID]:
    """
    Maps names to devices, in lower case except for ids. An id takes precedence over an address, and that over an index.
    """
    names: dict[str, DeviceID] = {str(gpu.index): gpu.id for gpu in topology.gpus}
    names |= {f"gpu{gpu.index}": gpu.id for gpu in topology.gpus}
    names |= {f"nic{nic.index}": nic.id for nic in topology.nics}
    names |= {nic.pci.lower(): nic.id for nic in topology.nics if nic.pci is not None}
    names |= {gpu.pci.lower(): gpu.id for gpu in topology.gpus if gpu.pci is not None}
    names |= {each.uuid: each.uuid for gpu in topology.gpus for each in gpu.mig or ()}
    return names | {device: device for device in (*topology.nic_by_id, *topology.gpu_by_id)}


def full_address(address: str) -> str:
    """Returns a PCI address in the form of sysfs. nvidia-smi prints `00000000:07:00.0`, and lspci `07:00.0`."""
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
