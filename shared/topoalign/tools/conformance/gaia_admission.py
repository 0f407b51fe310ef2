"""The suite `gaia/admission`: which node and which cards gpu-admission 47d56ae promises a pod."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.core.sharing.cards import ShareRequest
from topoalign.core.sharing.gaia import BLOCK
from topoalign.core.sharing.gaia.admission import Placed, Promise, promise, promised
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite


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
    nodes = [
        promised(node.name, node.capacity_cores, node.capacity_memory_blocks, placed(node.pods)) for node in case.nodes
    ]
    found = promise(nodes, [request_of(container) for container in case.pod.containers])
    return case.expect, ExpectedPromise(False) if found is None else expected_form(found)


def placed(pods: Sequence[Pod]) -> list[Placed]:
    """The promises of the pods of a node."""
    return [
        Placed(cores=each.cores, memory=each.memory_blocks * BLOCK, cards=each.predicate_idx)
        for pod in pods
        for each in pod.containers
        if each.predicate_idx is not None
    ]


def expected_form(found: Promise) -> ExpectedPromise:
    """A promise as the cases have it."""
    return ExpectedPromise(
        gpu_pod=True,
        node=found.node,
        predicate_gpu_idx={position: ",".join(map(str, cards)) for position, cards in found.cards.items()},
        failed={name: reason.value for name, reason in found.failed.items()},
        tried_in_order=[*found.tried],
    )


def request_of(amounts: Amounts) -> ShareRequest:
    """What a container asks for."""
    return ShareRequest(cores=amounts.cores, memory=amounts.memory_blocks * BLOCK)


SUITES: dict[str, Suite] = {"gaia/admission": admission}
