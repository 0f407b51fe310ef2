"""
What a container asks for of GPUs that are offered in units: hundredths of computing time, and blocks of memory.

A share is of one GPU, so both are; or of several in equal parts, where the pod says so (`spread`). From 100 on computing
time is that of whole GPUs, and their memory comes with them.

    20 of computing time, 16 blocks       a fifth of a GPU, and 4 GiB of it
    16 blocks                             4 GiB of a GPU, without a claim on its computing time
    60 of computing time, 40 blocks,      30 and 20 of each of two GPUs
    spread over 2
    200 of computing time                 two GPUs, with all of their memory
    20 of computing time                  refused: how much memory of the GPU is meant?
    150 of computing time, 16 blocks      refused: of one GPU there are 100, and above that only whole ones

What is written as 0 is refused (`core.sharing.pod_checks`), although a kubelet would give nothing and start the container.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from topoalign.core.demand.quantities import Quantities
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.model.holdings import UnitKind
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.unit_amounts import UnitsLeft

USUAL_NAMES = (ResourceName("tencent.com/vcuda-core"), ResourceName("tencent.com/vcuda-memory"))
"""What units are called where the configuration does not say."""
Left = Mapping[DeviceID, UnitsLeft]
"""GPU -> what is left of it."""


class Share(NamedTuple):
    """What one container asks for in units."""

    cores: int
    """Hundredths of computing time, of all GPUs together."""
    blocks: int
    """Of memory, of all GPUs together."""
    cards: int = 1
    """Over how many GPUs it is spread in equal parts. Whole ones are told by computing time alone."""

    @property
    def gpus(self) -> int:
        """How many GPUs it is of."""
        return max(self.cards, self.cores // CORES)

    @property
    def of_each(self) -> "Share":
        """What it is of each GPU: of 60 and 40 over two 30 and 20. A remainder of blocks is rounded up."""
        return Share(self.cores // self.gpus, -(-self.blocks // self.gpus))

    @property
    def whole(self) -> bool:
        """Whether nobody else has anything of these GPUs."""
        return self.cores >= CORES


@made_once
def resources_in_units(topology: Topology) -> Mapping[ResourceName, UnitKind]:
    """Resource -> what it is units of, for those of GPUs in units."""
    return {offer.resource: offer.unit for offer in topology.offered if offer.unit is not None}


def unit_of(topology: Topology, resource: ResourceName) -> UnitKind | None:
    """What the resource is units of; None: it is no resource of units."""
    return resources_in_units(topology).get(resource)


def share_of(topology: Topology, devices: Quantities, cards: int) -> Share | None:
    """What is asked for in units on this machine, spread over so many GPUs; None: nothing is."""
    in_units = resources_in_units(topology)
    amounts: dict[UnitKind, int] = {}
    for resource, amount in devices.items() if in_units else ():
        if amount and (unit := in_units.get(resource)) is not None:
            amounts[unit] = amounts.get(unit, 0) + amount
    return Share(amounts.get("cores", 0), amounts.get("memory", 0), cards) if amounts else None


def asks_for_both_halves(topology: Topology, devices: Quantities) -> bool:
    """Whether computing time and memory are asked for in units on this machine: a kubelet asks for them one by one."""
    share = share_of(topology, devices, 1)
    return share is not None and share.cores > 0 and share.blocks > 0


class UnitFields(NamedTuple):
    """The paths of the fields that ask for units, for people who are told that one of them is wrong."""

    cores: str = "computing time"
    memory: str = "memory"


class UnitResources(NamedTuple):
    """By which names a machine offers GPUs in units, how large they are, and how else its GPUs are asked for."""

    units: tuple[tuple[ResourceName, UnitKind], ...]
    """In the order of the names."""
    most: int
    """Blocks of memory of the largest of its GPUs that are in units."""
    gpus: int
    """How many GPUs are in units."""
    others: tuple[ResourceName, ...]
    """Resources of GPUs that are whole, MIG instances or shared in another way, `nvidia.com/gpu` always. Ascending."""

    def fields(self, path: str) -> UnitFields:
        """The limits by which the container at this path, such as `spec.containers[0]`, asks for units."""
        named = {unit: f"{path}.resources.limits[{resource}]" for resource, unit in self.units}
        plain = UnitFields()
        return UnitFields(cores=named.get("cores", plain.cores), memory=named.get("memory", plain.memory))


@made_once
def unit_resources(topology: Topology) -> UnitResources | None:
    """What the machine offers in units; None: nothing."""
    in_units = resources_in_units(topology)
    if not in_units:
        return None
    others = {
        offer.resource
        for offer in topology.offered
        if offer.unit is None and any(topology.card_of(base) in topology.gpu_by_id for base in offer.devices)
    }
    most = max((offer.replicas for offer in topology.offered if offer.unit == "memory"), default=0)
    gpus = {gpu for offer in topology.offered if offer.unit is not None for gpu in offer.devices}
    ways = tuple(sorted({*others, GPU} - in_units.keys()))
    return UnitResources(tuple(sorted(in_units.items())), most, len(gpus), ways)


def names_of_units(offered: Iterable[UnitResources]) -> set[ResourceName]:
    """By which names units are asked for: those under which they are `offered`, and the usual ones."""
    return {*USUAL_NAMES, *(name for each in offered for name, _ in each.units)}


def check_share(share: Share, fields: UnitFields) -> None:
    """Raises InvalidShare for amounts that cannot be meant."""
    if share.cores > CORES and share.cores % CORES:
        raise InvalidShare(
            f"{fields.cores}: {share.cores} units of computing time, of which a GPU has {CORES}",
            f"ask for at most {CORES}, or for a multiple of {CORES} to get whole GPUs",
        )
    if share.whole and 0 < share.blocks < share.gpus:
        raise InvalidShare(
            f"{fields.memory}: {share.blocks} blocks of memory of {share.gpus} whole GPUs",
            "ask for none, as all memory of whole GPUs comes with them, or for a block of each at least",
        )
    if 0 < share.cores < CORES and not share.blocks:
        raise InvalidShare(
            f"{fields.memory}: no memory of the GPU beside {share.cores} units of its computing time",
            "say how many blocks of memory are needed, or ask for the whole GPU",
        )


def has_room(left: UnitsLeft, share: Share) -> bool:
    """
    Whether a GPU has enough left for a share, or for its part of one that is of several GPUs. Where all computing time is
    held, memory alone would take some of it.
    """
    if share.whole:
        return left.unused and left.all_blocks >= share.of_each.blocks
    part = share.of_each
    return left.cores >= max(1, part.cores) and left.blocks >= part.blocks


def gpus_with_room(left: Left, share: Share) -> tuple[DeviceID, ...]:
    """Those of which a container could get a share, in the hardware's order."""
    return tuple(gpu for gpu, units in left.items() if has_room(units, share))
