"""
Whose a directory is, and what that container is limited to, by the entries of the kubelet's checkpoint.

Two containers of one pod may have been given the same units: an app container takes over those of an init container. Which
of them starts, the units do not tell. The other half does: the kubelet calls for both before it starts a container. Where
both halves of the two are the same, so are their limits. So what a directory says already stays where the units alone do not
tell, and the call for the half that does tell writes over it.
"""

from collections.abc import Collection, Iterable, Sequence

from topoalign.allocator.ports import Part
from topoalign.allocator.share_starts import of
from topoalign.allocator.vcuda.limits import Limits
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.state.unit_amounts import Holder


def holders(resource: ResourceName, units: frozenset[DeviceID], parts: Iterable[Part]) -> list[Holder]:
    """The containers that have exactly these units, in the order of their names."""
    return sorted({Holder(*each[2:]) for each in parts if each[:2] == (resource, units)})


def starting_holder(found: Sequence[Holder], written: tuple[str, str] | None) -> Holder:
    """Which of these containers starts: the one whose directory it is already, else the first. Raises Unavailable."""
    if len({each.pod for each in found}) != 1:
        raise Unavailable(
            f"the kubelet's checkpoint has the units for containers of {len({each.pod for each in found})} pods",
            "the kubelet starts the container again; see whether its device plugin directory can be read",
        )
    return next((each for each in found if each == written), found[0])


def limits_for(holder: Holder, parts: Collection[Part], hardware: Topology) -> Limits:
    """What a container is limited to. Of whole GPUs it has all memory, whatever it has asked for."""
    amounts = amounts_of(unit for part in of(holder, parts) for unit in part.devices)
    gpus = [gpu for gpu in hardware.gpus if gpu.id in amounts]
    cores, memory = sum(each.cores for each in amounts.values()), sum(each.memory for each in amounts.values())
    if cores >= CORES:
        memory = max(memory, sum(gpu.memory or 0 for gpu in gpus))
    pci = next((gpu.pci for gpu in gpus if gpu.pci), "")
    return Limits(holder.pod, str(holder.container), cores, memory, pci[-12:].upper())
