"""
The suite `gaia/admission`: which node and which cards gpu-admission 47d56ae promises a pod.

The decision is that of the score `gaia` (`core.sharing.gaia.admission`). What only the suite does is here: to read from
annotations what is held, which topoalign takes from its record, and to say why other nodes do not get the pod.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.sharing.gaia.admission import (
    AdmissionNode,
    admission_order_key,
    asks_for_gpu,
    hold_container_amounts,
    place_containers,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite

INDEX = re.compile(r"[+-]?0*[0-9]{1,19}")
NO_GPU = "no GPU device"
NO_ROOM = "does not match with this node"
OTHER_NODE = "already matched to another node"
"""Why a node does not get a pod."""


class Amounts(msgspec.Struct, frozen=True):
    """What a container or an operation names."""

    cores: int
    memory_blocks: int


class PromisedAmounts(Amounts, frozen=True):
    """A container that a node has already."""

    predicate_idx: str | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod of a node."""

    containers: list[PromisedAmounts]


class AdmissionNodeCase(msgspec.Struct, frozen=True):
    """A node of a case of `gaia/admission`."""

    name: NodeName
    capacity_cores: int
    capacity_memory_blocks: int
    pods: list[Pod] = []


class ExpectedPromise(msgspec.Struct, frozen=True):
    """The answer of gpu-admission."""

    gpu_pod: bool
    node: NodeName | None = None
    predicate_gpu_idx: dict[int, str] = {}
    failed: dict[NodeName, str] = {}
    tried_in_order: list[NodeName] = []


class AdmissionCase(msgspec.Struct, frozen=True):
    """A case of `gaia/admission`."""

    id: str
    nodes: list[AdmissionNodeCase]
    pod: Pod
    expect: ExpectedPromise


def admission(path: Path) -> Iterator[CaseResult]:
    """The results of a case file of `gaia/admission`."""
    return results(path, AdmissionCase, promise_of)


def promise_of(case: AdmissionCase) -> Outcome:
    """The node and the cards that a pod is promised."""
    return case.expect, promise(case.nodes, [request_of(container) for container in case.pod.containers])


def promise(nodes: Sequence[AdmissionNodeCase], containers: Sequence[Amount]) -> ExpectedPromise:
    """The answer for a pod of these containers."""
    if not asks_for_gpu(containers):
        return ExpectedPromise(gpu_pod=False)
    read = {node.name: node_of(node) for node in nodes}
    failed = {name: NO_GPU for name, node in read.items() if node is None}
    tried = sorted((node for node in read.values() if node is not None), key=lambda node: node.load)
    best = min(tried, key=lambda node: admission_order_key(node, containers), default=None)
    cards = None if best is None else place_containers(best.gpus, containers)
    chosen = None if best is None or cards is None else best
    for node in tried:
        if node != chosen:
            failed[node.name] = OTHER_NODE if chosen is not None and chosen.load < node.load else NO_ROOM
    return ExpectedPromise(
        gpu_pod=True,
        node=None if chosen is None else chosen.name,
        predicate_gpu_idx={at: ",".join(map(str, some)) for at, some in (cards or {}).items()},
        failed=failed,
        tried_in_order=[node.name for node in tried],
    )


def node_of(node: AdmissionNodeCase) -> AdmissionNode | None:
    """
    A node as gpu-admission reads it: its capacity in cores and in blocks of 256 MiB, and the promises of its pods. None: it
    has no GPU.

    Memory is divided by the number of cards in whole blocks. A promise counts nothing on a card that the node does not have,
    or that has not as much left.
    """
    count = node.capacity_cores // CORES
    if count <= 0:
        return None
    each = node.capacity_memory_blocks // count * MEMORY_BLOCK
    offered = Amount(cores=CORES, memory=each)
    cards = [SharedGpu(device=DeviceID(str(i)), index=i, minor=i, offered=offered) for i in range(count)]
    for container in (container for pod in node.pods for container in pod.containers):
        for index in indexes(container.predicate_idx or ""):
            if 0 <= index < count:
                cards[index] = hold_container_amounts(cards[index], request_of(container)) or cards[index]
    return AdmissionNode(
        name=node.name, gpus=tuple(cards), rest=node.capacity_memory_blocks * MEMORY_BLOCK - each * count
    )


def indexes(annotation: str) -> tuple[int, ...]:
    """The indexes of cards in an annotation: `0,1`. Empty if one of them is no number, or none of 64 bits."""
    texts = annotation.split(",")
    numbers = tuple(map(int, texts)) if all(map(INDEX.fullmatch, texts)) else ()
    return numbers if all(-(2**63) <= number < 2**63 for number in numbers) else ()


def request_of(amounts: Amounts) -> Amount:
    """What a container asks for."""
    return Amount(cores=amounts.cores, memory=amounts.memory_blocks * MEMORY_BLOCK)


SUITES: dict[str, Suite] = {"gaia/admission": admission}
