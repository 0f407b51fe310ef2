"""Bodies that are damaged by chance are answered as calls or refused as no calls: there is no third way."""

import json
from collections import Counter
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from faults_support import THOROUGH
from scheduling_support import RecordedScheduling, go_json
from view_support import NODE, OneNode

from topoalign.core.model.errors import InvalidField, Undecodable
from topoalign.registry.scheduling.extender.handlers import Extender
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
    ("prioritize", {"Pod": POD, "NodeNames": ["a", "b"]}),
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
    extender = Extender(scheduling, scheduling.bind, lambda: (1, 38))
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


AMOUNTS = ("0", "1", "4", "1e3", "1e9", "1.5", "-1", "1Ki", "500m", "1e400", "", "+1", "0x1")
RESOURCES = (
    "nvidia.com/gpu",
    "nvidia.com/gpu",
    "rdma/hca",
    "cpu",
    "memory",
    "hugepages-2Mi",
    "example.com/x",
    "x" * 5_000,
)
KOORDINATOR = ("device-joint-allocate", "device-allocate-hint", "device-allocated", "gpu-partition-spec")
TYPES = ('["gpu","rdma"]', '["gpu","gpu"]', "[]", "null", '["x"]', '"gpu"')
SCOPES = ('"SamePCIe"', '""', "null", "1")
ANNOTATIONS = ["", "{}", "[]", "null", "1", "{", "0", "-1", "1e9", "a/b", "[" * 5_000, "x" * 200_000, '{"a":1,"a":2}']
JOINT = [f'{{"deviceTypes":{types},"requiredScope":{scope}}}' for types in TYPES for scope in SCOPES]


def odd_pod(chance: Random) -> dict[str, Any]:
    """Sound JSON of the right types that asks for odd things: amounts, annotations, affinity, containers of one name."""
    names = (
        "topoalign.io/gang",
        "topoalign.io/gang-size",
        *(f"scheduling.koordinator.sh/{each}" for each in KOORDINATOR),
    )
    some = chance.sample(names, chance.randint(0, 3))
    containers = [
        {
            "name": chance.choice(("c", "d", "")),
            "restartPolicy": chance.choice(("Always", "Never", None)),
            "resources": {
                kind: {chance.choice(RESOURCES): chance.choice(AMOUNTS) for _ in range(chance.choice((0, 1, 1, 2)))}
                for kind in ("limits", "requests")
            },
        }
        for _ in range(chance.randint(1, 3))
    ]
    match = {"key": "k", "operator": chance.choice(("In", "Gt", "Nope")), "values": chance.choice((None, [], ["x"]))}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [match]}]}
    return {
        "metadata": {
            **POD["metadata"],
            "uid": f"u{chance.randrange(50)}",
            "annotations": {name: chance.choice((*ANNOTATIONS, *JOINT)) for name in some},
        },
        "spec": {
            "initContainers": containers[1:],
            "containers": containers[:1] * chance.randint(1, 2),
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        },
    }


async def test_an_odd_pod_is_judged_by_a_real_cluster_and_changes_nothing() -> None:
    """Each node has one place in the answer to filter, and an integer as its score; preempt names only the victims."""
    chance, world = Random(49), OneNode()
    world.tell(world.says.all())
    world.code()
    extender, version = Extender(world.scheduler, RecordedScheduling().bind, lambda: (1, 38)), world.view.version
    names, verdicts = [NODE, "ghost"], Counter[str]()
    for number in range(TRIES // 4):
        pod = odd_pod(chance)
        nodes = {"Pod": pod, "Nodes": None, "NodeNames": names}
        filtered = json.loads(await extender.filter(go_json(nodes)))
        refused = filtered["FailedNodes"] | filtered["FailedAndUnresolvableNodes"]
        assert (sorted(names), "") == (sorted((*filtered["NodeNames"], *refused)), filtered["Error"]), (number, pod)
        verdicts.update(text.partition(":")[0] for text in refused.values())
        verdicts["passed"] += NODE in filtered["NodeNames"]
        scores = json.loads(await extender.prioritize(go_json(nodes)))
        assert [(name, True) for name in names] == [(each["Host"], each["Score"] in range(11)) for each in scores]
        victims = {name: {"Pods": [{"UID": "v"}], "NumPDBViolations": 0} for name in names}
        helped = json.loads(await extender.preempt(go_json({"Pod": pod, "NodeNameToMetaVictims": victims})))
        assert helped["NodeNameToMetaVictims"].items() <= victims.items(), (number, pod)

    assert {"passed", "InvalidField", "NotEnoughDevices", "UnknownNode"} <= verdicts.keys(), verdicts
    assert (version, {}) == (world.view.version, world.view.reserved_on)
