"""The suite `gpuallocator`: which GPUs the device policies of go-gpuallocator 876e7b7 choose."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.core.model.errors import Undecodable, quoted
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.placement.gpus.bandwidth import SetScorer
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.preference import PLACEMENTS, choose_gpu_set
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite

POLICY = {
    "bestEffort": "best-effort",
    "simple": "simple",
    "staticDGX1Pascal": "static-dgx1-pascal",
    "staticDGX1Volta": "static-dgx1-volta",
    "staticDGX2": "static-dgx2",
}
PCIE = {
    "P2PLinkSameBoard": PcieClass.PSB,
    "P2PLinkSingleSwitch": PcieClass.PIX,
    "P2PLinkMultiSwitch": PcieClass.PXB,
    "P2PLinkHostBridge": PcieClass.PHB,
    "P2PLinkSameCPU": PcieClass.NODE,
    "P2PLinkCrossCPU": PcieClass.SYS,
}
UNKNOWN = "P2PLinkUnknown"
COUNTS = [
    *("Single", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
    *("Thirteen", "Fourteen", "Fifteen", "Sixteen", "Seventeen", "Eighteen"),
]
"""How upstream spells the number of NVLinks, from 1."""
NVLINKS = re.compile(r"([A-Z][a-z]+)NVLINKLinks?")


class Machine(msgspec.Struct, frozen=True):
    """The GPUs of a case; `links[a][b]` are go-gpuallocator's names of the links of a pair."""

    gpus: int
    links: list[list[list[str] | None]]


class GpuCase(msgspec.Struct, frozen=True):
    """A case of the suite: one of the `acceptable` sets, or exactly `expect`."""

    id: str
    topology: Machine
    available: list[int] | None
    size: int
    policy: str
    acceptable: list[list[int]] | None = None
    expect: list[int] | None = None
    required: list[int] | None = None


def gpuallocator(path: Path) -> Iterator[CaseResult]:
    """The results of a case file."""
    return results(path, GpuCase, outcome)


def outcome(case: GpuCase) -> Outcome:
    """Any of the acceptable answers passes (none: the answer is empty); where they are not listed, the one expected."""
    if case.policy not in POLICY:
        raise Undecodable(f"case {quoted([case.id])}", f"no policy is named {quoted([case.policy])}")
    scores = [[sum(map(link_score, links or ())) for links in row] for row in case.topology.links]
    asked = GpuChoice(SetScorer(scores), case.available or (), case.required or (), case.size)
    got = list(choose_gpu_set(PLACEMENTS[POLICY[case.policy]], asked))
    acceptable = [case.expect or []] if case.acceptable is None else case.acceptable or [[]]
    return got if got in acceptable else acceptable, got


def link_score(name: str) -> int:
    """What one link between two GPUs is worth, by upstream's name for it."""
    if name == UNKNOWN:
        return 0
    if name in PCIE:
        return PCIE_SCORE[PCIE[name]]
    match = NVLINKS.fullmatch(name)
    if match is None or match[1] not in COUNTS:
        raise Undecodable("a link", f"no link is named {quoted([name])}")
    return NVLINK_SCORE * (COUNTS.index(match[1]) + 1)


SUITES: dict[str, Suite] = {"gpuallocator": gpuallocator}
