"""Upstream's errors by their kinds: their texts are the kubelet's own, and only what kind they are is compared."""

from typing import Self

import msgspec

from topoalign.core.admission.alignment import NotAligned
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import DriverFault

KINDS = {
    "Topology locality": NotAligned.code,
    "not enough cpus available": "NotEnoughCpus",
    "not multiple cpus per core": "SplitCore",
    "not enough free physical CPUs": "NotEnoughCores",
    "requested number of devices unavailable": "NotEnoughDevices",
    "no healthy devices present": "NoHealthyDevice",
    "GetPreferredAllocation rpc failed": DriverFault.code,
    "failed to get the default NUMA affinity": "NotEnoughMemory",
    "failed to find the default preferred hint": "MemoryNotPreferred",
    "failed to find NUMA nodes to extend": "MemoryNotExtendable",
    "failed to find the extended preferred hint": "MemoryExtensionNotPreferred",
    "violates NUMA node allocation": "MemoryGroupsWouldMix",
}
"""What upstream's text contains -> the code of our error of that kind."""


def kind_of(text: str | None) -> str | None:
    """The code of our error for upstream's text; a text of no known kind stays."""
    return next((kind for part, kind in KINDS.items() if part in (text or "")), text)


def kind_of_refusal(refusal: Refusal) -> str:
    """The code of our refusal; where the policy refuses, the kubelet does not name what a node has too little of."""
    return NotAligned.code if refusal.reason == "TopologyAffinityError" else refusal.code


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager answers: an error, or what the fields of its subclass say."""

    error: str | None = None

    @property
    def by_kind(self) -> Self:
        """The same with the kind of its error in place of the kubelet's text."""
        return msgspec.structs.replace(self, error=kind_of(self.error))
