"""
Converts shares of GPUs by Koordinator's names to units of the GPUs that a node offers.

Computing time is in hundredths on both sides. Memory is in blocks of 256 MiB: bytes are rounded up to whole blocks, and
hundredths of the memory down, to one block at least, so that two halves fit on a GPU. Whole GPUs are all units of GPUs of
which nobody has any. Example, of a GPU with 318 blocks:

    koordinator.sh/gpu: 50             50 units of computing time, 159 blocks
    koordinator.sh/gpu-memory: 10Gi    40 blocks
    koordinator.sh/gpu: 100            100 units of computing time, 318 blocks

The rules of units apply: nothing is left of a GPU of which all computing time is held, and who has all of it has the GPU
alone.
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
    """The units of one GPU that a container can get: free ones, and those that init containers of its pod left."""

    names: Mapping[UnitKind, ResourceName]
    """Under which resources they are handed out."""
    cores: DeviceSet
    blocks: DeviceSet
    all_blocks: int
    """That the GPU has."""
    left: Collection[DeviceID]
    """Those that init containers left; they are given first."""

    @property
    def total(self) -> dict[str, int]:
        """What the GPU has, as Koordinator counts it."""
        return {CORE: CORES, RATIO: WHOLE, GPU_BYTES: self.all_blocks * MEMORY_BLOCK}

    def used(self, *, shared: bool) -> dict[str, int]:
        """
        What is used of the GPU, as Koordinator counts it. For whole GPUs (not `shared`), and where a kind has nothing left,
        all of it. For shares the hundredths of memory that are left are the most that come to no more blocks than are free,
        and whoever has memory alone uses one hundredth of computing time.
        """
        cores = len(self.cores)
        blocks = len(self.blocks)
        if (cores, blocks) == (CORES, self.all_blocks):
            return {}
        if not (shared and cores and blocks):
            return self.total
        ratio = min(WHOLE, (WHOLE * (blocks + 1) - 1) // self.all_blocks)
        return {
            CORE: CORES - min(cores, CORES - 1),
            RATIO: WHOLE - ratio,
            GPU_BYTES: (self.all_blocks - blocks) * MEMORY_BLOCK,
        }

    def given(self, gpu: GpuDemand) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """The units that a container gets of the GPU, which has enough."""
        amount = amount_of_each_gpu(gpu, self.all_blocks)
        found = {
            self.names["cores"]: _take_first_units(self.cores, self.left, amount.cores),
            self.names["memory"]: _take_first_units(self.blocks, self.left, amount.memory // MEMORY_BLOCK),
        }
        return {name: tuple(units) for name, units in found.items() if units}


def amount_of_each_gpu(gpu: GpuDemand, all_blocks: int) -> Amount:
    """What a demand comes to of each GPU, one with so many blocks of memory."""
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
    """GPU in units -> kind -> the resource under which its units are handed out."""
    found: dict[DeviceID, dict[UnitKind, ResourceName]] = {}
    for offer in topology.offered:
        if offer.unit is not None:
            for gpu in offer.devices:
                found.setdefault(gpu, {})[offer.unit] = offer.resource
    return {gpu: names for gpu, names in found.items() if len(names) == len(UNITS)}


def units_to_give(state: NodeState, left: Collection[DeviceID]) -> Mapping[DeviceID, GpuUnits]:
    """GPU in units -> the units of it that may be given. `left`: what init containers of the pod left."""
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
