"""
Reads pods, nodes and answers in the format of the suites `koordinator/…`.

The inventories of the nodes are in `devices.json` beside the file of the cases.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from topoalign.core.deviceshare.annotations import PartitionSpec
from topoalign.core.deviceshare.candidates import DeviceCandidate, DeviceGrant, JointRequest
from topoalign.core.deviceshare.demand import JointDemand, read_demand
from topoalign.core.deviceshare.device_scores import DeviceScorer, score_device
from topoalign.core.deviceshare.inventory import InventoryFunction, NodeInventory
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.request_combinations import Quantities
from topoalign.core.model.errors import InvalidField, Undecodable, quoted
from topoalign.tools.conformance.case_files import Beside
from topoalign.tools.conformance.koordinator_answers import Answer
from topoalign.tools.conformance.koordinator_devices import DescribedInventory, read_device, seen_by_filter, with_used

INVENTORIES = "devices.json"

A = TypeVar("A", bound=Answer)


class Pod(msgspec.Struct, frozen=True):
    """A pod of a case; requests are in the units of its resources."""

    requests: dict[str, int]
    annotations: dict[str, Any] = {}
    """Decoded where they are JSON, else as text."""

    @property
    def demand(self) -> JointDemand:
        """The demand, read as Koordinator reads it. Raises InvalidField."""
        texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in self.annotations.items()}
        return read_demand(texts, self.requests, compat=True)


class Part(msgspec.Struct, frozen=True):
    """What a pod has of one device."""

    minor: int
    resources: dict[str, int]
    vfs: list[InventoryFunction] | None = []


Parts = dict[DeviceType, list[Part]]


Caps = Mapping[DeviceType, Mapping[int, Quantities]]
"""Type -> minor -> the most that may be taken of it; of a type listed here, other minors may not be taken."""


class CappedRequest(JointRequest, frozen=True, kw_only=True, dict=True):
    """A request that may take only a part of the devices, as for a pod with a reservation in Koordinator."""

    caps: Caps = {}

    @cached_property
    def candidates(self) -> Mapping[DeviceType, Sequence[DeviceCandidate]]:
        """The candidates within the caps, each with what may be taken of it, and its score."""
        found = dict(super().candidates)
        for kind, caps in self.caps.items():
            within = [each for each in found.get(kind, ()) if each.minor in caps]
            found[kind] = tuple(self._capped(each, caps[each.minor]) for each in within)
        return {kind: found[kind] for kind in self.wants}

    def _capped(self, candidate: DeviceCandidate, cap: Quantities) -> DeviceCandidate:
        free = {name: min(amount, cap.get(name, 0)) for name, amount in candidate.free.items()}
        device = candidate.device
        each = self.wants[device.kind].each
        return DeviceCandidate(device, free, score_device(self.scorer, device.total, free, each) if self.scorer else 0)


class NodeCase(msgspec.Struct, Generic[A], frozen=True, kw_only=True):
    """A pod put to a node, and what is expected of it."""

    id: str
    expect: A
    device: str
    pod: Pod
    assigned: Parts = {}
    node_labels: dict[str, str] = {}
    numa_nodes: list[int] | None = None
    scorer: DeviceScorer | None = None
    required_free: dict[DeviceType, dict[int, dict[str, int]]] = {}
    phase: Literal["Filter", "Reserve"] | None = None
    """Of the scheduler. None: Reserve where there is a scorer, since Filter runs without."""

    def asked(self, inventories: "Inventories") -> JointRequest:
        """The demand and the inventory of the case, with devices that are in use already."""
        described = inventories.read(self.device, self.node_labels)
        is_filter = self.phase == "Filter" if self.phase is not None else self.scorer is None
        demand = seen_by_filter(self.pod.demand, described) if is_filter else self.pod.demand
        if described.honored and demand.partition is None:
            demand = msgspec.structs.replace(demand, partition=PartitionSpec())
        inventory: NodeInventory = described
        for kind, parts in self.assigned.items():
            for part in parts:
                inventory = with_used(
                    inventory, kind, part.minor, part.resources, [each.bus for each in part.vfs or ()]
                )
        return CappedRequest(
            demand=demand,
            inventory=inventory,
            nodes=None if self.numa_nodes is None else frozenset(self.numa_nodes),
            scorer=self.scorer,
            caps=self.required_free,
        )


class Inventories:
    """The nodes by name. Raises Undecodable."""

    def __init__(self, path: Path) -> None:
        self._described = Beside(path, INVENTORIES)

    def read(self, name: str, node_labels: Mapping[str, str]) -> DescribedInventory:
        """The inventory of this name. Raises Undecodable if it is missing or wrong."""
        try:
            return read_device(without_nulls(msgspec.json.decode(self._described[name])), node_labels)
        except InvalidField as error:
            raise Undecodable(f"{quoted([name])} of {INVENTORIES}", str(error)) from error


def parts(given: Iterable[DeviceGrant]) -> list[Part]:
    """Allocated devices in the fields of a case."""
    return [Part(each.device.minor, dict(each.resources), list(each.functions)) for each in given]


AS_WRITTEN = ("annotations", "hint", "expect")
"""What stands below these keys is the pod's own JSON, or is compared: a null there has a meaning."""


def without_nulls(value: object) -> object:
    """The case without the keys that are null: Go writes an empty list or map so."""
    if isinstance(value, dict):
        said = {key: each for key, each in value.items() if each is not None}
        return {key: each if key in AS_WRITTEN else without_nulls(each) for key, each in said.items()}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
