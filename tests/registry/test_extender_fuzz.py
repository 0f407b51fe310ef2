"""Bodies that are damaged by chance are answered as calls or refused as no calls: there is no third way."""

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from faults_support import THOROUGH
from scheduling_support import RecordedScheduling, go_json

from topoalign.core.model.errors import InvalidField, Undecodable
from topoalign.registry.scheduling.extender.pages import Extender
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

TRIES = 40_000 if THOROUGH else 2_000
POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "team",
        "uid": "u",
        "labels": {"a": "b"},
        "annotations": {
            "topoalign.io/gang": "g",
            "topoalign.io/gang-size": "2",
            "scheduling.koordinator.sh/device-joint-allocate": '{"deviceTypes":["gpu","rdma"]}',
        },
    },
    "spec": {
        "initContainers": [{"name": "i", "restartPolicy": "Always", "securityContext": {"privileged": False}}],
        "containers": [
            {
                "name": "c",
                "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "1500m"}, "requests": {"memory": "1Gi"}},
            }
        ],
        "resources": {"limits": {"cpu": 2}},
        "schedulerName": "default-scheduler",
    },
}
NODES = {"metadata": {}, "items": [{"metadata": {"name": "a", "labels": {"x": "y"}}}, {"metadata": {"name": "b"}}]}
VICTIMS = {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 1}}
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "r",
        "operation": "CREATE",
        "namespace": "team",
        "resource": {"group": "", "resource": "pods"},
        "userInfo": {"groups": ["g"]},
        "object": POD,
        "oldObject": None,
    },
}
CALLS: list[tuple[str, object]] = [
    ("filter", {"Pod": POD, "Nodes": None, "NodeNames": ["a", "b"]}),
    ("filter", {"Pod": POD, "Nodes": NODES, "NodeNames": None}),
    ("prioritize", {"pod": POD, "nodenames": ["a", "b"]}),
    ("preempt", {"Pod": POD, "NodeNameToVictims": None, "NodeNameToMetaVictims": VICTIMS}),
    ("preempt", {"Pod": POD, "NodeNameToVictims": {"a": {"Pods": [POD]}}, "NodeNameToMetaVictims": None}),
    ("bind", {"PodName": "p", "PodNamespace": "team", "PodUID": "u", "Node": "a"}),
    ("mutate", REVIEW),
    ("validate", REVIEW),
]
INSTEAD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, 1e300, "", "1e3", "NaN", "\u0661", "\ud7ff", "x" * 300, [], {}, [[]]),
    *([None], {"": None}, {"a": []}, [{"metadata": None}], {"nvidia.com/gpu": None}, {"nvidia.com/gpu": {}}),
]
BYTES = [
    b"",
    b"null",
    b"{",
    b"}",
    b'"',
    b",",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"NaN",
    b"1e999",
    b"-",
    b"[" * 500,
]


def places(value: object) -> list[tuple[Any, Any]]:
    """Each container with a key or index in it."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [each for inner in value.values() for each in places(inner)]
    if isinstance(value, list):
        return [(value, at) for at in range(len(value))] + [each for inner in value for each in places(inner)]
    return []


def damaged(chance: Random, call: object) -> bytes:
    """A call with some values replaced, dropped or under another key, and sometimes with other bytes."""
    call = deepcopy(call)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(places(call))
        kind = chance.random()
        if kind < 0.7:
            container[key] = deepcopy(chance.choice(INSTEAD))
        elif isinstance(container, dict):
            moved = container.pop(key)
            if kind < 0.85:
                container[chance.choice((str(key).upper(), "", "\u0130", f"{key}x"))] = moved
        if not places(call):
            break
    body = go_json(call)
    if chance.random() < 0.3:
        at = chance.randrange(len(body) + 1)
        body = body[:at] + chance.choice(BYTES) + body[at + chance.randint(0, 3) :]
    return body


async def test_a_damaged_call_is_answered_or_refused() -> None:
    """An answer is JSON; a refusal is one of the two errors that have a status of their own."""
    chance = Random(48)
    scheduling = RecordedScheduling()
    extender = Extender(scheduling, lambda: (1, 38))
    webhook = Webhook("ours", lambda resource: False)
    answered = refused = 0
    for number in range(TRIES):
        verb, call = chance.choice(CALLS)
        body = damaged(chance, call)
        try:
            answer = await getattr(webhook if verb in ("mutate", "validate") else extender, verb)(body)
        except (Undecodable, InvalidField) as error:
            assert error.finding.isprintable(), (number, body)
            refused += 1
        else:
            json.loads(answer)
            answered += 1

    assert min(answered, refused) > TRIES / 20
    assert len(scheduling.pods) > TRIES / 20
