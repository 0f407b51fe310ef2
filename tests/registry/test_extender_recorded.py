"""
Every request that a real kube-scheduler was recorded with is answered so that it goes on as it should.

The case files hold 543 requests of a kube-scheduler 1.36.2, sent here again in the bytes in which they came. What is
demanded of the answers follows from what the scheduler was seen to do with them: docs/scheduler.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduling_support import FULL, HOPELESS, RawClient, RecordedScheduling, go_json, parsed, request_bytes, serving

from topoalign.core.model.ids import NodeName
from topoalign.kubelet.files.manifest import request_from_document
from topoalign.registry.scheduling.scheduling_api import NodeRefusal

pytestmark = pytest.mark.anyio

NUMBER = {"filter": 262, "prioritize": 93, "bind": 163, "preempt": 25}


def by_name(node: NodeName) -> NodeRefusal | None:
    """Passes, is full or is hopeless, by the last character."""
    return (None, FULL, HOPELESS)[ord(node[-1]) % 3]


def recorded(vectors: Path, verb: str) -> Iterator[dict[str, Any]]:
    file = vectors / "extender" / f"{verb}.jsonl"
    if not file.is_file():
        pytest.skip(f"no recorded requests at {file}")
    yield from (json.loads(line)["request"] for line in file.read_text().splitlines())


async def replayed(vectors: Path, verb: str, scheduling: RecordedScheduling) -> list[tuple[dict[str, Any], Any]]:
    """Each body with its answer."""
    found = []
    async with serving(scheduling) as url:
        with RawClient(url) as client:
            for request in recorded(vectors, verb):
                body = go_json(request["body"])
                assert int(request["headers"]["content-length"]) == len(body), "the bytes as they came"
                status, headers, answer = parsed(await client.answer(request_bytes(request["path"], body)))
                assert (200, "application/json") == (status, headers["content-type"])
                found.append((request["body"], answer))
    assert NUMBER[verb] == len(found)
    return found


def names_of(body: dict[str, Any]) -> list[str]:
    if body["NodeNames"] is not None:
        return list(body["NodeNames"])
    return [item["metadata"]["name"] for item in body["Nodes"]["items"]]


async def test_a_filter_says_of_every_node_whether_it_passes(vectors: Path) -> None:
    """Nodes in the form in which they came, each in one place, refusals where a scheduler of 1.36 makes no loop of them."""
    scheduling = RecordedScheduling(by_name)
    answers = await replayed(vectors, "filter", scheduling)

    for body, answer in answers:
        names = names_of(body)
        passed = [name for name in names if by_name(NodeName(name)) is None]
        if body["NodeNames"] is not None:
            assert (passed, None) == (answer["NodeNames"], answer["Nodes"])
        else:
            whole = [item for item in body["Nodes"]["items"] if item["metadata"]["name"] in passed]
            assert (None, {"metadata": {}, "items": whole}) == (answer["NodeNames"], answer["Nodes"])
        assert {*names} - {*passed} == answer["FailedAndUnresolvableNodes"].keys()
        assert ({}, "") == (answer["FailedNodes"], answer["Error"])
    asked = [(pod.uid, pod.request) for pod in scheduling.pods]
    assert [(body["Pod"]["metadata"]["uid"], request_from_document(body["Pod"])) for body, _ in answers] == asked


async def test_a_prioritize_has_an_integer_for_every_node(vectors: Path) -> None:
    scheduling = RecordedScheduling()

    for body, answer in await replayed(vectors, "prioritize", scheduling):
        assert names_of(body) == [each["Host"] for each in answer]
        assert all(type(each["Score"]) is int and 0 <= each["Score"] <= 10 for each in answer)


async def test_a_bind_binds_the_pod_that_is_named(vectors: Path) -> None:
    scheduling = RecordedScheduling()
    answers = await replayed(vectors, "bind", scheduling)

    calls = [tuple(body[key] for key in ("PodNamespace", "PodName", "PodUID", "Node")) for body, _ in answers]
    assert calls == scheduling.bound
    assert [{"Error": ""}] * len(calls) == [answer for _, answer in answers]


async def test_a_preempt_names_some_of_the_nodes_with_their_victims(vectors: Path) -> None:
    """Victims as UIDs whatever they came as, and none but those that were named."""
    scheduling = RecordedScheduling(by_name)

    for body, answer in await replayed(vectors, "preempt", scheduling):
        asked = body["NodeNameToMetaVictims"] or {
            node: {
                "Pods": [{"UID": pod["metadata"]["uid"]} for pod in each["Pods"]],
                "NumPDBViolations": each["NumPDBViolations"],
            }
            for node, each in body["NodeNameToVictims"].items()
        }
        helped = {node: each for node, each in asked.items() if by_name(NodeName(node)) is None}
        assert {"NodeNameToMetaVictims": helped} == answer
