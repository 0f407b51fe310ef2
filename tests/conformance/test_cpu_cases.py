"""The published cases of the CPU manager that use none of its options: hints, take and allocate."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from topoalign.core.hints.cpu import cpu_hints
from topoalign.core.placement.cpus import NotEnoughCpus, choose_cpus, take
from topoalign.core.requests import Mode
from topoalign.core.topology.bitmask import mask_of, nodes_of
from topoalign.core.topology.cpus import CpuTopology, cpu_topology
from topoalign.core.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.topology.model import Cpu

Case = dict[str, Any]


def cases(file: Path) -> Iterator[tuple[Case, CpuTopology]]:
    """Each case with its topology, the counts of which are the file's."""
    known = json.loads((file.parent / "cpu_topologies.json").read_text())
    for line in file.read_text().splitlines():
        case = json.loads(line)
        described = known[case["topology"]]
        fields = ("id", "core", "socket", "node", "uncore")
        grouped = cpu_topology(Cpu(**dict(zip(fields, cpu, strict=True))) for cpu in described["cpus"])
        yield (
            case,
            replace(
                grouped,
                cpus=described["num_cpus"],
                cores=described["num_cores"],
                sockets=described["num_sockets"],
                nodes=described["num_numa_nodes"],
            ),
        )


def test_hints_of_all_cases_without_align_by_socket(vectors: Path) -> None:
    seen = 0
    for case, topology in cases(vectors / "kubelet" / "cpu_hints.jsonl"):
        if not case["options"]["align_by_socket"]:
            seen += 1
            free, left = parse_cpuset(case["available"]), parse_cpuset(case["reusable"])
            got = cpu_hints(topology, free, left, case["requested"], Mode.KUBELET) or ()
            hints = [{"nodes": list(nodes_of(hint.affinity or 0)), "preferred": hint.preferred} for hint in got]
            assert case["expect"]["hints"] == hints, case["id"]
    assert 301 == seen


def test_takes_of_all_packed_cases_without_uncore(vectors: Path) -> None:
    seen = 0
    for case, topology in cases(vectors / "kubelet" / "cpu_take.jsonl"):
        if case["strategy"] == "packed" and not case["options"]["prefer_uncore"]:
            seen += 1
            got: object
            try:
                got = {"cpus": format_cpuset(take(topology, parse_cpuset(case["available"]), case["count"]))}
            except NotEnoughCpus:
                got = "not enough"
            assert ("not enough" if "error" in case["expect"] else case["expect"]) == got, case["id"]
    assert 108 == seen


def test_allocations_of_all_cases_without_options(vectors: Path) -> None:
    seen = 0
    for case, topology in cases(vectors / "kubelet" / "cpu_allocate.jsonl"):
        if not any(case["options"].values()):
            seen += 1
            pool = parse_cpuset(case["shared_pool"])
            allocatable = (pool - parse_cpuset(case["reserved"])) | parse_cpuset(case["reusable"])
            affinity = None if case["hint_nodes"] is None else mask_of(case["hint_nodes"])
            got: object
            try:
                chosen = choose_cpus(topology, allocatable, case["requested"], affinity)
                got = {"cpus": format_cpuset(chosen), "shared_pool_after": format_cpuset(pool - chosen)}
            except NotEnoughCpus:
                got = "not enough"
            assert ("not enough" if "error" in case["expect"] else case["expect"]) == got, case["id"]
    assert 71 == seen
