"""Finds the devices that an operator names: by index, uuid, PCI address or name."""

from collections.abc import Iterable, Sequence

from topoalign.core.model.errors import InvalidField, NotFound, clean, quoted
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology

MOST = 256
"""Maximum number of devices in one request. No node has as many GPUs and NICs."""
MOST_LISTED = 32
"""Maximum number of devices that an error lists."""


def find_devices(topology: Topology, names: Sequence[str], former: Iterable[DeviceID] = ()) -> tuple[DeviceID, ...]:
    """
    Returns the GPUs, NICs and MIG instances with these names: an id, a PCI address, `GPU3` or `NIC2`, a GPU's index.
    `former` devices, possibly lost, are found only by id. Raises NotFound, and InvalidField for no names or too many.
    """
    if not names or len(names) > MOST:
        raise InvalidField("devices", f"{len(names)} of them", f"name 1 to {MOST} devices")
    known = {str(device): device for device in former} | _devices_by_name(topology)
    found: dict[DeviceID, None] = {}
    for name in names:
        device = known.get(name) or known.get(name.lower())
        # nvidia-smi prints the address `00000000:07:00.0`, lspci `07:00.0` and sysfs `0000:07:00.0`
        bus = name.lower().split(":")
        if device is None and len(bus) in (2, 3):
            domain = bus[0][-4:] if len(bus) == 3 else "0000"
            device = known.get(":".join((domain, *bus[-2:])))
        # `GPU3/MIG-…` names an instance only if it is one of that GPU
        gpu, _, instance = name.rpartition("/")
        part = known.get(instance)
        owner = topology.parents.get(part) if part is not None else None
        if device is None and owner is not None and owner == known.get(gpu.lower()):
            device = part
        if device is None:
            raise NotFound("device", name, f"name one of: {_device_names(topology)}")
        found[device] = None
    return tuple(found)


def _devices_by_name(topology: Topology) -> dict[str, DeviceID]:
    # in lower case except for ids; an id takes precedence over an address, and an address over an index
    names: dict[str, DeviceID] = {str(gpu.index): gpu.id for gpu in topology.gpus}
    names |= {f"gpu{gpu.index}": gpu.id for gpu in topology.gpus}
    names |= {f"nic{nic.index}": nic.id for nic in topology.nics}
    names |= {nic.pci.lower(): nic.id for nic in topology.nics if nic.pci is not None}
    names |= {gpu.pci.lower(): gpu.id for gpu in topology.gpus if gpu.pci is not None}
    names |= {each.uuid: each.uuid for gpu in topology.gpus for each in gpu.mig or ()}
    return names | {device: device for device in (*topology.nic_by_id, *topology.gpu_by_id)}


def _device_names(topology: Topology) -> str:
    names = [f"GPU{gpu.index} {clean(gpu.id)}" + (f" {clean(gpu.pci)}" if gpu.pci else "") for gpu in topology.gpus]
    names += [clean(part.uuid) for gpu in topology.gpus for part in gpu.mig or ()]
    names += [f"NIC{nic.index} {clean(nic.id)}" + (f" {clean(nic.pci)}" if nic.pci else "") for nic in topology.nics]
    return quoted(names, MOST_LISTED) or "none, this node has no devices"
