"""A case of the suites `hami/…` about shares passes only with the answer that is expected."""

import json
from pathlib import Path
from typing import Any

import pytest

from topoalign.tools.conformance import suites

CARD = {"uuid": "a", "type": "NVIDIA", "slots": 10, "total_mem": 8000, "total_cores": 100}
OTHER = {**CARD, "uuid": "b", "used_slots": 5, "used_mem": 4000, "used_cores": 50}
REQUEST = {"count": 1, "vendor": "NVIDIA", "mem_mb": 1000, "mem_percent": 101, "cores": 20}
SHARE = {"uuid": "a", "mem_mb": 100, "cores": 0}
FITS = {"node_score": 7.5, "devices": [["a"]], "mem_mb": [[1000]], "cores": [[20]]}
QUOTA = {"namespace": "n", "hard": {"limits.nvidia.com/gpumem": 150}}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "device_order",
        {"a": {"score": 1}, "b": {"score": 2}, "policy": "binpack", "numa_bind": False},
        {"a_before_b": True},
        {"a_before_b": False},
    ),
    ("device_score", {"device": OTHER, "requests": []}, {"score": 15.00005}, {"score": 15.001}),
    ("node_score", {"devices": [CARD, OTHER]}, {"score": 7.5}, {"score": 7.4}),
    (
        "fit",
        {"devices_in_order": [OTHER, CARD], "request": REQUEST},
        {"fits": True, "devices": ["a"], "reason": ""},
        {"devices": ["b"]},
    ),
    (
        "topology_pick",
        {"devices_in_order": [OTHER, CARD], "request": {**REQUEST, "count": 2}},
        {"fits": True, "devices_set": ["b", "a"]},
        {"devices_set": ["a"]},
    ),
    (
        "numa_bind",
        {"devices": [CARD], "group_by_numa": True, "request": {**REQUEST, "cores": 120}},
        {"fits": True, "devices_set": ["a"]},
        {"fits": False},
    ),
    (
        "gpu_pair_score",
        {"gpus": [{"uuid": "a", "index": 0, "links": {"1": [{"nvlinks": 2}]}}, {"uuid": "b", "index": 1}]},
        {"scores": [{"uuid": "a", "score": {"b": 0}}, {"uuid": "b", "score": {"a": 0}}]},
        {"scores": []},
    ),
    (
        "gpu_pair_score",
        {
            "gpus": [
                {"uuid": "a", "index": 0, "links": {"1": [{"pcie": "SameCPU"}, {"nvlinks": 2}]}},
                {"uuid": "b", "index": 1, "links": {"0": [{"type": "P2PLinkSameBoard"}, {"nvlinks": 2}]}},
            ]
        },
        {"scores": [{"uuid": "a", "score": {"b": 220}}, {"uuid": "b", "score": {"a": 260}}]},
        {"scores": []},
    ),
    (
        "mig_place",
        {"profiles": [{"name": "2g", "placements": [{"start": 0, "size": 2}]}], "requests": ["2g", "2g"]},
        {"placements": [{"profile": "2g", "start": 0, "size": 2}]},
        {"placements": []},
    ),
    (
        "mig_place",
        {"devices": [{**CARD, "mode": "mig"}], "request": REQUEST},
        {"fits": False, "reason": "1/1 CardMigTopologyInfeasible", "allocations": []},
        {"reason": ""},
    ),
    (
        "quota_fit",
        {
            "namespace": "n",
            "quota": QUOTA,
            "candidate": SHARE,
            "allocated_by_container": [[SHARE]],
            "picked_for_current_container": [],
        },
        {"effective_mem_mb": 200, "within_quota": False},
        {"within_quota": True},
    ),
    (
        "place",
        {
            "nodes": {"n": {"devices": [CARD, OTHER]}, "m": {"devices": [OTHER]}},
            "containers": [[REQUEST]],
            "node_policy": "spread",
        },
        {
            "fits": {"n": FITS, "m": {**FITS, "node_score": 15, "devices": [["b"]]}},
            "failed": {},
            "chosen_node_any_of": ["n"],
        },
        {"chosen_node_any_of": ["m"]},
    ),
    (
        "place",
        {"nodes": {"n": {"devices": [CARD]}}, "containers": [[{**REQUEST, "vendor": "AMD"}]], "node_policy": "spread"},
        {"fits": {}, "failed": {"n": "Device type not found"}, "chosen_node_any_of": []},
        {"failed": {"n": "NodeInsufficientDevice"}},
    ),
    (
        "handshake",
        {"now": "2026-01-01 00:00:00", "handshake": None},
        {"healthy": True, "refresh_devices": True},
        {"refresh_devices": False},
    ),
    ("node_annotation_decode_legacy", {"text": "::"}, {"devices": [], "error": ""}, {"error": "x"}),
    (
        "pod_annotation_codec",
        {"containers": [[{**SHARE, "type": "T"}]]},
        {"encoded": "a,T,100,0:;", "decoded": [[{**SHARE, "type": "T"}], []]},
        {"decoded": [[{**SHARE, "type": "T"}]]},
    ),
    (
        "request_parse",
        {"limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": "1k"}, "requests": {}, "defaults": {}},
        {**REQUEST, "cores": 0},
        {"mem_mb": 1},
    ),
    ("type_select", {"annotations": {}, "device_type": "A100"}, {"selected": True}, {"selected": False}),
    (
        "uuid_select",
        {"annotations": {"nvidia.com/nouse-gpuuuid": "a"}, "uuid": "a"},
        {"selected": False},
        {"selected": True},
    ),
]


def passed(folder: Path, kind: str, case: dict[str, Any]) -> bool:
    file = folder / f"{kind}.jsonl"
    file.write_text(json.dumps(case) + "\n")
    (result,) = suites()[f"hami/{kind}"](file)
    return result.passed


@pytest.mark.parametrize(("kind", "given", "expect", "wrong"), CASES)
def test_only_the_expected_answer_passes(
    tmp_path: Path, kind: str, given: dict[str, Any], expect: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert passed(tmp_path, kind, {"id": "t", "input": given, "expect": expect})
    assert not passed(tmp_path, kind, {"id": "t", "input": given, "expect": {**expect, **wrong}})
    assert not passed(tmp_path, kind, {"id": "t", "input": 1, "expect": expect})


def test_every_suite_has_a_case_here() -> None:
    assert {name for name in suites() if name.startswith("hami/")} == {
        "hami/nrt_score",
        *(f"hami/{kind}" for kind, *_ in CASES),
    }
