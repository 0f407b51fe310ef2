"""
Converts GPU shares that are requested by Koordinator's names to units of the GPUs that a node offers.

In both, computing time is in hundredths of a GPU. Units of memory are blocks of 256 MiB. Bytes are rounded up to whole
blocks. Hundredths of the memory are rounded down, but to at least one block, so that two halves fit on a GPU. A whole
GPU is all units of a GPU that has no units in use. Example for a GPU with 318 blocks:

    koordinator.sh/gpu: 50             50 units of computing time, 159 blocks
    koordinator.sh/gpu-memory: 10Gi    40 blocks
    koordinator.sh/gpu: 100            100 units of computing time, 318 blocks

The rules of units apply: if all computing time of a GPU is held, nothing of the GPU is free. A container that holds all
computing time has the GPU exclusively.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from topoalign.core.deviceshare.koordinator_names import CORE, GPU_BYTES, RATIO, WHOLE
from topoalign.core.deviceshare.request_combinations import GpuDemand
from topoalign.core.model.holdings import Amount, UnitKind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import offered_in_units

UNITS: tuple[UnitKind, ...] = ("cores", "memory")


class GpuUnits(NamedTuple):
    """The units of one GPU that a container can get: free units, and units to reuse from init containers of its pod."""

    names: Mapping[UnitKind, ResourceName]
    """The resources under which the units are allocated."""
    cores: DeviceSet
    blocks: DeviceSet
    all_blocks: int
    """The number of memory blocks that the GPU has."""
    left: Collection[DeviceID]
    """The units to reuse from init containers. They are allocated first."""

    @property
    def total(self) -> dict[str, int]:
        """What the GPU has, as Koordinator counts it."""
        return {CORE: CORES, RATIO: WHOLE, GPU_BYTES: self.all_blocks * MEMORY_BLOCK}

    def used(self, *, shared: bool) -> dict[str, int]:
        """What is in use of the GPU, as Koordinator counts it."""
        cores = len(self.cores)
        blocks = len(self.blocks)
        if (cores, blocks) == (CORES, self.all_blocks):
            return {}
        # a whole GPU needs all units, and a share needs units of both kinds
        if not (shared and cores and blocks):
            return self.total
        # the most hundredths of memory that need no more than the free blocks
        ratio = min(WHOLE, (WHOLE * (blocks + 1) - 1) // self.all_blocks)
        # a container that holds only memory counts as using one hundredth of computing time
        return {
            CORE: CORES - min(cores, CORES - 1),
            RATIO: WHOLE - ratio,
            GPU_BYTES: (self.all_blocks - blocks) * MEMORY_BLOCK,
        }

    def given(self, gpu: GpuDemand) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """The units of the GPU that a container gets. The GPU must have enough."""
        amount = amount_of_each_gpu(gpu, self.all_blocks)
        found = {
            self.names["cores"]: _take_first_units(self.cores, self.left, amount.cores),
            self.names["memory"]: _take_first_units(self.blocks, self.left, amount.memory // MEMORY_BLOCK),
        }
        return {name: tuple(units) for name, units in found.items() if units}


def amount_of_each_gpu(gpu: GpuDemand, all_blocks: int) -> Amount:
    """The amount that a demand needs of each GPU, for a GPU with this number of memory blocks."""
    if not gpu.shared:
        return Amount(cores=CORES, memory=all_blocks * MEMORY_BLOCK)
    size = gpu.each.get(GPU_BYTES)
    blocks = all_blocks * gpu.each.get(RATIO, 0) // WHOLE if size is None else -(-size // MEMORY_BLOCK)
    return Amount(cores=gpu.each.get(CORE, 0), memory=max(1, blocks) * MEMORY_BLOCK)


def _take_first_units(units: DeviceSet, before: Collection[DeviceID], amount: int) -> DeviceSet:
    first = (units & units.devices.some(before)).first(amount)
    return first | (units - first).first(amount - len(first))


@computed_once
def unit_resources_by_gpu(topology: Topology) -> Mapping[DeviceID, Mapping[UnitKind, ResourceName]]:
    """GPU in units -> kind of unit -> the resource under which its units are allocated."""
    found: dict[DeviceID, dict[UnitKind, ResourceName]] = {}
    for offer in topology.offered:
        if offer.unit is not None:
            for gpu in offer.devices:
                found.setdefault(gpu, {})[offer.unit] = offer.resource
    return {gpu: names for gpu, names in found.items() if len(names) == len(UNITS)}


def units_to_give(state: NodeState, left: Collection[DeviceID]) -> Mapping[DeviceID, GpuUnits]:
    """GPU in units -> its units that can be allocated. `left`: the units to reuse from init containers of the pod."""
    topology = state.hardware
    ownership = state.ownership
    by_gpu = unit_resources_by_gpu(topology)
    found = dict[DeviceID, GpuUnits]()
    devices = {name: topology.devices[name] for names in by_gpu.values() for name in names.values()}
    again = {name: each.some(left) & ownership.usable(name) for name, each in devices.items()}
    to_give = {name: ownership.free(name) | some for name, some in again.items()}
    for gpu, names in by_gpu.items():
        of_gpu = {name: devices[name].by_base[gpu] for name in names.values()}
        cores, blocks = (of_gpu[names[kind]] & to_give[names[kind]] for kind in UNITS)
        found[gpu] = GpuUnits(
            names=names,
            cores=cores,
            blocks=blocks,
            all_blocks=offered_in_units(topology)[gpu].memory // MEMORY_BLOCK,
            left=frozenset(unit for name, units in of_gpu.items() for unit in units & again[name]),
        )
    return found
