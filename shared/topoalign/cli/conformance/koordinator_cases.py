"""
Pods, nodes and answers as the cases of the suites `koordinator/…` write them.

The inventories of the nodes stand in `devices.json` beside the file of the cases.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from topoalign.core.errors import InvalidField, TopoalignError, Undecodable, clean, quoted
from topoalign.core.joint.candidates import Asked, Given
from topoalign.core.joint.demand import Demand, read_demand
from topoalign.core.joint.device_object import read_device
from topoalign.core.joint.inventory import Inventory
from topoalign.core.joint.names import DeviceType
from topoalign.core.joint.refusals import DevicesDoNotFit, NotMeant
from topoalign.core.joint.scores import Scorer

INVENTORIES = "devices.json"


class Error(msgspec.Struct, frozen=True):
    code: str
    reasons: list[str]

    @property
    def compared(self) -> "Error":
        """Without the parser's own wording, and in order."""
        return Error(self.code, sorted(reason.partition(", err:")[0] for reason in self.reasons))


class Pod(msgspec.Struct, frozen=True):
    requests: dict[str, int]
    annotations: dict[str, Any] = {}
    """Decoded where they are JSON, else as text."""

    @property
    def demand(self) -> Demand:
        texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in self.annotations.items()}
        return read_demand(texts, self.requests, compat=True)


class VirtualFunction(msgspec.Struct, frozen=True, rename={"bus": "busID"}):
    bus: str
    minor: int


class Part(msgspec.Struct, frozen=True):
    """What a pod has of one device."""

    minor: int
    resources: dict[str, int]
    vfs: list[VirtualFunction] = []


Parts = dict[DeviceType, list[Part]]


class NodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A pod put to a node."""

    id: str
    device: str
    pod: Pod
    assigned: Parts = {}
    node_labels: dict[str, str] = {}
    numa_nodes: list[int] | None = None
    scorer: Scorer | None = None
    required_free: dict[DeviceType, dict[int, dict[str, int]]] = {}

    def asked(self, inventories: "Inventories") -> Asked:
        inventory = inventories.read(self.device, self.node_labels)
        for kind, parts in self.assigned.items():
            for part in parts:
                inventory = inventory.booked(kind, part.minor, part.resources, [each.bus for each in part.vfs])
        return Asked(
            demand=self.pod.demand,
            inventory=inventory,
            nodes=None if self.numa_nodes is None else frozenset(self.numa_nodes),
            scorer=self.scorer,
            caps=self.required_free,
            first_look=self.scorer is None,
        )


class Inventories:
    """The nodes by name. Raises Undecodable."""

    def __init__(self, path: Path) -> None:
        try:
            self.described: Mapping[str, object] = msgspec.json.decode(
                (path.parent / INVENTORIES).read_bytes(), type=dict[str, Any]
            )
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(INVENTORIES, clean(str(error), 200)) from error

    def read(self, name: str, node_labels: Mapping[str, str] | None = None) -> Inventory:
        if name not in self.described:
            raise Undecodable(INVENTORIES, f"{quoted([name])} is not in it")
        try:
            return read_device(self.described[name], node_labels)
        except InvalidField as error:
            raise Undecodable(f"{quoted([name])} of {INVENTORIES}", str(error)) from error


def refused(error: TopoalignError) -> Error | str:
    """
    The answer that an error is; the error itself, in words, where Koordinator has no such answer.

    Raises Undecodable again: that is no answer, but a file that is damaged.
    """
    if isinstance(error, Undecodable):
        raise error
    if isinstance(error, DevicesDoNotFit | NotMeant):
        return Error(error.status.value, list(error.reasons)).compared
    return f"{error.code}: {error}"


def parts(given: Iterable[Given]) -> list[Part]:
    return [
        Part(
            each.device.minor,
            dict(each.resources),
            [VirtualFunction(function.bus, function.minor) for function in each.functions],
        )
        for each in given
    ]
