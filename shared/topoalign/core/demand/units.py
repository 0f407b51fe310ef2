"""
What a container asks for of GPUs that are offered in units: hundredths of computing time, and blocks of memory.

A share is of one GPU, so both are. From 100 on computing time is that of whole GPUs, and their memory comes with them.

    20 of computing time, 16 blocks       a fifth of a GPU, and 4 GiB of it
    16 blocks                             4 GiB of a GPU, without a claim on its computing time
    200 of computing time                 two GPUs, with all of their memory
    20 of computing time                  refused: how much memory of the GPU is meant?
    150 of computing time, 16 blocks      refused: of one GPU there are 100, and of several only all
"""

from collections.abc import Mapping
from typing import NamedTuple

from topoalign.core.demand.quantities import Quantities
from topoalign.core.model.errors import NoFit
from topoalign.core.model.holdings import UnitKind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.unit_amounts import UnitsLeft

Left = Mapping[DeviceID, UnitsLeft]
"""GPU -> what is left of it."""


class InvalidShare(NoFit):
    """Raised for amounts of a GPU that cannot be meant."""

    code = "InvalidShare"


class Share(NamedTuple):
    """What one container asks for in units."""

    cores: int
    """Hundredths of computing time, of all GPUs together."""
    blocks: int
    """Of memory, of all GPUs together."""

    @property
    def gpus(self) -> int:
        """How many GPUs it is of."""
        return max(1, self.cores // CORES)

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


def share_of(topology: Topology, devices: Quantities) -> Share | None:
    """What is asked for in units on this machine; None: nothing is."""
    in_units = resources_in_units(topology)
    amounts: dict[UnitKind, int] = {}
    for resource, amount in devices.items() if in_units else ():
        if amount and (unit := in_units.get(resource)) is not None:
            amounts[unit] = amounts.get(unit, 0) + amount
    return Share(amounts.get("cores", 0), amounts.get("memory", 0)) if amounts else None


class UnitFields(NamedTuple):
    """The paths of the fields that ask for units, for people who are told that one of them is wrong."""

    cores: str = "computing time"
    memory: str = "memory"


def fields_of(topology: Topology) -> UnitFields:
    """The limits of a container by which units are asked for on this machine."""
    named = {unit: f"limits[{resource}]" for resource, unit in resources_in_units(topology).items()}
    plain = UnitFields()
    return UnitFields(cores=named.get("cores", plain.cores), memory=named.get("memory", plain.memory))


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
    Whether a GPU has enough left for a share, or for its part of one that is of whole GPUs. Where all computing time is
    held, memory alone would take some of it.
    """
    if share.whole:
        return left.unused
    return left.cores >= max(1, share.cores) and left.blocks >= share.blocks


def gpus_with_room(left: Left, share: Share) -> tuple[DeviceID, ...]:
    """Those of which a container could get a share, in the hardware's order."""
    return tuple(gpu for gpu, units in left.items() if has_room(units, share))
