"""
Everything a pod asks of a node's devices, understood once: quantities, hints, what is decided jointly, and partitions.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.deviceshare.annotations import NO_HINT, Hint, PartitionSpec, read_annotations
from topoalign.core.deviceshare.names import LEVELS, DeviceType, JointScope, Level, PartitionPolicy, Strategy
from topoalign.core.deviceshare.quantities import GpuDemand, Quantities, by_type, gpu_demand


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for."""

    requests: Mapping[DeviceType, Quantities] = {}
    """Normalised. Empty: nothing is asked."""
    hints: Mapping[DeviceType, Hint] = {}
    joint: tuple[DeviceType, ...] = ()
    """Types that are decided together, the primary one first."""
    required_scope: str = ""
    partition: PartitionSpec | None = None
    compat: bool = False
    """Whether Koordinator's answers are wanted, traps included."""

    @property
    def gpu(self) -> GpuDemand | None:
        asked = self.requests.get(DeviceType.GPU)
        return None if asked is None else gpu_demand(asked)

    @property
    def same_pcie(self) -> bool:
        return self.required_scope == JointScope.SAME_PCIE

    @property
    def required_level(self) -> Level:
        """What all GPUs must have in common; a word that Koordinator does not know asks for nothing."""
        return next(
            (level for scope, level in LEVELS.items() if scope == self.hint(DeviceType.GPU).required_topology_scope),
            Level.NONE,
        )

    @property
    def restricted(self) -> bool:
        return self.partition is not None and self.partition.allocate_policy == PartitionPolicy.RESTRICTED

    def hint(self, kind: DeviceType) -> Hint:
        return self.hints.get(kind, NO_HINT)


def read_demand(annotations: Mapping[str, str], requests: Quantities, *, compat: bool = False) -> Demand:
    """
    The demand of a pod, from its annotations and the sum of its containers' requests.

    Raises NotMeant and InvalidField. Where nothing is asked of any device, annotations are not looked at.
    """
    asked = by_type(requests)
    if not asked:
        return Demand(compat=compat)
    said = read_annotations(annotations, compat=compat)
    listed = said.joint.device_types if said.joint is not None else ()
    joint = [
        DeviceType(kind)
        for kind in listed
        if kind in asked and said.hints.get(DeviceType(kind), NO_HINT).allocate_strategy != Strategy.APPLY_FOR_ALL
    ]
    return Demand(
        requests=asked,
        hints=said.hints,
        joint=tuple(joint),
        required_scope=said.joint.required_scope if said.joint is not None else "",
        partition=said.partition,
        compat=compat,
    )
