"""
What pods a simulated cluster is given: shapes, how many of each, and in which order.

A shape is written `COUNT:NAME=AMOUNT,…` with `gpus`, `cpus`, `memory` (GiB) and `nics`: `100:gpus=2,cpus=8,memory=16` is a
hundred pods with two GPUs, eight CPUs of their own and 16 GiB each. With `same-pcie` the annotations of the pods ask for
NICs beside the GPUs (`4:gpus=2,same-pcie`), which the limits do not name.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION, DeviceType, JointScope
from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ResourceName

REMEDY = "write COUNT:gpus=N,cpus=N,memory=GIB,nics=N,same-pcie, as 100:gpus=2,cpus=8,memory=16"
MOST_PODS = 100_000
LARGEST_AMOUNT = 100_000
SAME_PCIE = "same-pcie"
RESOURCES: dict[str, ResourceName] = {"gpus": GPU, "cpus": CPU, "memory": MEMORY, "nics": NIC}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Pods that ask for the same."""

    count: int
    limits: dict[ResourceName, int]
    """Resource -> amount: CPUs in whole ones, memory in bytes."""
    same_pcie: bool = False
    """Whether they ask for NICs beside their GPUs by annotations."""


def read_shape(text: str) -> Shape:
    """Raises InvalidField."""
    count, _, amounts = text.partition(":")
    limits: dict[ResourceName, int] = {}
    words = amounts.split(",")
    same_pcie = SAME_PCIE in words
    for each in words:
        if each == SAME_PCIE:
            continue
        name, _, amount = each.partition("=")
        if name not in RESOURCES or RESOURCES[name] in limits or not is_amount(amount, LARGEST_AMOUNT):
            raise InvalidField("pods", f"{clean(each)!r} of {clean(text)!r} is no amount", REMEDY)
        limits[RESOURCES[name]] = int(amount) * (GIB if name == "memory" else 1)
    if not is_amount(count, MOST_PODS):
        raise InvalidField("pods", f"{clean(count)!r} is no number of pods from 1 to {MOST_PODS}", REMEDY)
    wanted = {name: amount for name, amount in limits.items() if amount}
    return Shape(count=int(count), limits=wanted, same_pcie=same_pcie)


def is_amount(text: str, most: int) -> bool:
    """Whether this is a whole number from 1 to `most`, in digits."""
    return text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= most


def pods_of(shapes: Sequence[Shape], chance: Random) -> list[dict[str, Any]]:
    """All pods, as manifests, in a random order."""
    pods = [manifest(f"pod-{number}-{n}", shape) for number, shape in enumerate(shapes) for n in range(shape.count)]
    chance.shuffle(pods)
    return pods


def manifest(name: str, shape: Shape) -> dict[str, Any]:
    """A pod of one container, Guaranteed where it asks for CPUs and memory."""
    amounts = {str(resource): str(amount) for resource, amount in shape.limits.items()}
    container = {"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}
    metadata: dict[str, Any] = {"name": name, "namespace": "default"}
    if shape.same_pcie:
        said = {"deviceTypes": [DeviceType.GPU, DeviceType.RDMA], "requiredScope": JointScope.SAME_PCIE}
        metadata["annotations"] = {JOINT_ANNOTATION: json.dumps(said)}
    return {"metadata": metadata, "spec": {"containers": [container]}}
