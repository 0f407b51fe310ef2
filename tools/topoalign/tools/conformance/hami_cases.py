"""What the cases of the suites `hami/…` are made of: cards, requests and amounts, in the types of the product."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite

Given = TypeVar("Given")
Expected = TypeVar("Expected")

TOLERANCE = 1e-4
"""Within which two scores are equal."""


class Case(msgspec.Struct, Generic[Given, Expected], frozen=True):
    """A case of a suite."""

    id: str
    input: Given
    expect: Expected


def suite(kind: type[Case[Given, Expected]], outcome: Callable[[Given, Expected], object]) -> Suite:
    """The suite of cases of a kind: `outcome` runs a case's input; from what is expected it takes the answer's form."""

    def run(case: Case[Given, Expected]) -> Outcome:
        return case.expect, outcome(case.input, case.expect)

    def cases(path: Path) -> Iterator[CaseResult]:
        return results(path, kind, run)

    return cases


class Profile(msgspec.Struct, frozen=True):
    """A MIG profile of a card. Memory in MiB."""

    name: str
    placements: tuple[MigPlacement, ...]
    memory_mb: int = 0
    core: int = 0
    slice_count: int = 0

    @property
    def read(self) -> MigProfile:
        """The profile in the type of the product."""
        return MigProfile(
            name=self.name,
            memory=self.memory_mb * MIB,
            cores=self.core,
            slices=self.slice_count,
            placements=self.placements,
        )


class Card(msgspec.Struct, frozen=True):
    """A card with what of it is used. Memory in MiB."""

    uuid: str = ""
    index: int = 0
    numa: int = 0
    type: str = ""
    mode: str = ""
    healthy: bool = True
    slots: int = 0
    used_slots: int = 0
    total_mem: int = 0
    used_mem: int = 0
    total_cores: int = 0
    used_cores: int = 0
    mig_profiles: tuple[Profile, ...] = ()
    score: float = 0.0

    @property
    def read(self) -> SharedGpu:
        """The card as the product makes it of what it knows of a card."""
        return SharedGpu(
            device=DeviceID(self.uuid),
            index=self.index,
            minor=self.index,
            numa_node=self.numa,
            model=self.type,
            usable=self.healthy,
            offered=Amount(cores=self.total_cores, memory=self.total_mem * MIB),
            held=Amount(cores=self.used_cores, memory=self.used_mem * MIB),
            all_slots=self.slots,
            sharers=self.used_slots,
            mode=self.mode,
            profiles=tuple(each.read for each in self.mig_profiles),
        )


class Request(msgspec.Struct, frozen=True):
    """What a container asks for, of each card. Memory in MiB."""

    count: int
    vendor: str
    mem_mb: int
    mem_percent: int
    cores: int

    @property
    def read(self) -> HamiRequest:
        """The request in the type of the product."""
        return HamiRequest(
            count=self.count, vendor=self.vendor, memory=self.mem_mb, percent=self.mem_percent, cores=self.cores
        )


class Share(msgspec.Struct, frozen=True):
    """What a container has of a card. Memory in MiB."""

    uuid: str
    mem_mb: int
    cores: int


def close_to(expected: float, got: float) -> float:
    """The expected score if what came out is as good as equal to it, else what came out."""
    return expected if abs(expected - got) <= TOLERANCE else got
