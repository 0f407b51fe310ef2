"""
Whose a directory is, and what that container is limited to, by the entries of the kubelet's checkpoint.

Two containers of one pod may have been given the same units: an app container takes over those of an init container. Which
of them starts, the units do not tell. The kubelet calls for all halves of a container, one right after the other, before it
starts it, and so there are these cases:

- The half that only one of the two has was called for just before: it is that one (`Calls`).
- One of them has this half alone: it is that one. Should it be the other, the call for its other half comes next, and writes
  over it.
- Both halves of the two are the same, and so are their limits: what a directory says stays.
"""

from collections.abc import Collection, Iterable, Sequence

from topoalign.allocator.allocate.unit_starts import of
from topoalign.allocator.containers.vcuda.limits import Limits
from topoalign.allocator.ports import Part
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.state.share_amounts import Holder

TOLD_SECONDS = 5.0
"""Between the calls for two halves of a container, at most: each takes milliseconds, and seconds on a busy node."""


def holders(resource: ResourceName, units: frozenset[DeviceID], parts: Iterable[Part]) -> list[Holder]:
    """The containers that have exactly these units, in the order of their names."""
    return sorted({Holder(*each[2:]) for each in parts if each[:2] == (resource, units)})


class Calls:
    """Which halves of containers were called for a short while ago, where a half told which container starts."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Holder, float]] = {}
        """Pod UID -> the container, and when it was told, in monotonic seconds."""

    def starting(
        self,
        resource: ResourceName,
        units: frozenset[DeviceID],
        parts: Sequence[Part],
        written: tuple[str, str] | None,
        at: float,
    ) -> Holder:
        """
        Which container starts, where the kubelet calls for this half at this monotonic second. `written`: whose its
        directory is. Raises Unavailable where that may be one of several pods, or none has it.
        """
        self._told = {pod: told for pod, told in self._told.items() if at - told[1] <= TOLD_SECONDS}
        found = holders(resource, units, parts)
        pods = {each.pod for each in found}
        if len(pods) != 1:
            raise Unavailable(
                f"the kubelet's checkpoint has the units for containers of {len(pods)} pods",
                "the kubelet starts the container again; see whether its device plugin directory can be read",
            )
        (pod,) = pods
        if len(found) == 1:
            self._told[pod] = found[0], at
            return found[0]
        told, _ = self._told.pop(pod, (None, at))
        if told in found:
            return told
        alone = [each for each in found if len([*of(each, parts)]) == 1]
        return next((each for each in alone or found if each == written), (alone or found)[0])


def limits_for(holder: Holder, parts: Collection[Part], hardware: Topology) -> Limits:
    """
    What a container is limited to: of equal parts of several GPUs to one, as the library looks at its first GPU alone. Of
    whole GPUs it has all memory, whatever it has asked for.
    """
    amounts = amounts_of(unit for part in of(holder, parts) for unit in part.devices)
    gpus = [gpu for gpu in hardware.gpus if gpu.id in amounts]
    cores = sum(each.cores for each in amounts.values())
    memory = sum(each.memory for each in amounts.values())
    if cores >= CORES:
        memory = max(memory, sum(gpu.memory or 0 for gpu in gpus))
    else:
        cores, memory = (amount // max(1, len(amounts)) for amount in (cores, memory))
    pci = next((gpu.pci for gpu in gpus if gpu.pci), "")
    return Limits(holder.pod, str(holder.container), cores, memory, pci[-12:].upper())
