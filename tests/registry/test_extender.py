"""The extender speaks kube-scheduler's protocol: its spelling, its forms of nodes and victims, and its connections."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scheduling_support import (
    FULL,
    HOPELESS,
    RawClient,
    RecordedScheduling,
    go_json,
    parsed,
    request_bytes,
    serving,
    split,
)

from topoalign.core.model.errors import Unavailable, Undecodable
from topoalign.core.model.ids import CPU, GPU, MEMORY, NodeName
from topoalign.core.model.requests import GANG
from topoalign.registry.scheduling.extender import arguments
from topoalign.registry.scheduling.scheduling_api import Victims

pytestmark = pytest.mark.anyio

POD = {
    "metadata": {"name": "train", "namespace": "team", "uid": "u-1", "annotations": {GANG: "a<b"}},
    "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
}
EMPTY: dict[str, object] = {
    "Nodes": None,
    "NodeNames": [],
    "FailedNodes": {},
    "FailedAndUnresolvableNodes": {},
    "Error": "",
}
GPUS_FULL = "NotEnoughDevices: too few free devices; wait until pods end or ask for fewer"


def asking(*names: str, **more: object) -> dict[str, object]:
    return {"Pod": POD, "Nodes": None, "NodeNames": list(names), **more}


@pytest.fixture
def scheduling() -> RecordedScheduling:
    return RecordedScheduling({NodeName("full"): FULL, NodeName("none"): HOPELESS}.get)


@pytest.fixture
async def http(scheduling: RecordedScheduling) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(scheduling) as url, httpx.AsyncClient(base_url=f"{url}/scheduler/") as client:
        yield client


async def post(http: httpx.AsyncClient, verb: str, body: object) -> Any:
    answer = await http.post(verb, content=go_json(body), headers={"content-type": "application/json"})

    assert (200, "application/json") == (answer.status_code, answer.headers["content-type"])
    return answer.json()


async def test_a_named_node_passes_or_is_refused_with_a_text(
    http: httpx.AsyncClient, scheduling: RecordedScheduling
) -> None:
    answer = await post(http, "filter", asking("a", "full", "b", "none"))

    refused = {
        "full": GPUS_FULL,
        "none": "UnknownResource: a resource that the node does not offer; correct the name or label the nodes",
    }
    assert {**EMPTY, "NodeNames": ["a", "b"], "FailedAndUnresolvableNodes": refused} == answer
    (pod,) = scheduling.pods
    assert ("u-1", "team", "train", {GANG: "a<b"}) == (
        pod.uid,
        pod.request.namespace,
        pod.request.name,
        pod.request.annotations,
    )
    assert {GPU: 2} == dict(pod.request.containers[0].requests), "filled in from the limits"


async def test_victims_are_spoken_of_from_kubernetes_1_38_on(scheduling: RecordedScheduling) -> None:
    """Before, FailedNodes leads to no preemption, and to a loop of calls; from 1.38 on preempt is asked about such nodes."""
    found = {}
    for version in ((1, 37), (1, 38)):
        async with (
            serving(scheduling, kubernetes=version) as url,
            httpx.AsyncClient(base_url=f"{url}/scheduler/") as http,
        ):
            answer = await post(http, "filter", asking("full", "none"))
            found[version] = (list(answer["FailedNodes"]), list(answer["FailedAndUnresolvableNodes"]))

    assert {(1, 37): ([], ["full", "none"]), (1, 38): (["full"], ["none"])} == found


async def test_whole_nodes_are_answered_as_they_came(http: httpx.AsyncClient, scheduling: RecordedScheduling) -> None:
    """With nodeCacheCapable=false names alone are ignored; labels reach whoever decides, the rest of a node does not."""
    nodes = [
        {"metadata": {"name": name, "labels": {"zone": name}, "managedFields": [{"x": [1.5]}]}, "spec": {"y": "<"}}
        for name in ("a", "full")
    ]

    answer = await post(http, "filter", {"Pod": POD, "Nodes": {"metadata": {}, "items": nodes}, "NodeNames": None})

    assert {"metadata": {}, "items": nodes[:1]} == answer["Nodes"]
    assert (None, {"full": GPUS_FULL}) == (answer["NodeNames"], answer["FailedAndUnresolvableNodes"])
    assert [{"a": {"zone": "a"}, "full": {"zone": "full"}}] == scheduling.labels


async def test_unknown_keys_are_ignored_as_in_go(http: httpx.AsyncClient, scheduling: RecordedScheduling) -> None:
    """So a later kube-scheduler may send more fields."""
    answer = await post(http, "filter", {"Pod": POD, "NodeNames": ["a", "full"], "later": {"x": '"Pod"'}})
    victims = {"a": {"Pods": [{"UID": "v", "later": 1}], "NumPDBViolations": 2, "later": {}}}
    helped = await post(http, "preempt", {"Pod": POD, "NodeNameToMetaVictims": victims, "later": None})

    assert ["a"] == answer["NodeNames"]
    assert {"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 2}}} == helped
    assert ["u-1", "u-1"] == [pod.uid for pod in scheduling.pods]


async def test_pod_level_resources_are_read_beside_those_of_containers(
    http: httpx.AsyncClient, scheduling: RecordedScheduling
) -> None:
    container = {"name": "c", "resources": {"limits": {"cpu": "4", "memory": "1Gi", "nvidia.com/gpu": "1"}}}
    pod = {**POD, "spec": {"containers": [container], "resources": {"limits": {"cpu": "8"}}}}

    await post(http, "filter", {**asking("a"), "Pod": pod})

    (seen,) = scheduling.pods
    assert {CPU: 8000} == dict(seen.request.resources.limits)
    assert [{CPU: 4000, MEMORY: 1 << 30, GPU: 1}] == [dict(each.requests) for each in seen.request.containers]


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
async def test_what_takes_long_is_prepared(http: httpx.AsyncClient, scheduling: RecordedScheduling, verb: str) -> None:
    """With turns of the event loop, before the answer is made in one."""
    await post(http, verb, asking("a", "b"))

    assert 1 == len(scheduling.pods)
    assert scheduling.pods == scheduling.prepared


async def test_every_node_has_an_integer_for_a_score(http: httpx.AsyncClient) -> None:
    answer = await http.post("prioritize", json=asking("a", "b", "c"))

    assert b'[{"Host":"a","Score":10},{"Host":"b","Score":9},{"Host":"c","Score":8}]' == answer.content


async def test_victims_come_as_uids_or_as_whole_pods(http: httpx.AsyncClient, scheduling: RecordedScheduling) -> None:
    """They are always answered as UIDs, and only for nodes where they help."""
    meta = {name: {"Pods": [{"UID": f"v-{name}"}], "NumPDBViolations": 1} for name in ("a", "full")}
    whole = {
        name: {"Pods": [{"metadata": {"name": "x", "uid": f"v-{name}"}, "spec": {}}], "NumPDBViolations": 1}
        for name in ("a", "full")
    }

    answers = [
        await post(http, "preempt", {"Pod": POD, "NodeNameToVictims": None, "NodeNameToMetaVictims": meta}),
        await post(http, "preempt", {"Pod": POD, "NodeNameToVictims": whole, "NodeNameToMetaVictims": None}),
    ]

    assert [{"NodeNameToMetaVictims": {"a": meta["a"]}}] * 2 == answers
    victims = {name: Victims(uids=(f"v-{name}",), disruptions=1) for name in ("a", "full")}
    assert [victims, victims] == scheduling.victims


@pytest.mark.parametrize("none", [None, {}, {"Pods": None}, {"Pods": [], "NumPDBViolations": 0}])
async def test_no_node_is_answered_without_victims(http: httpx.AsyncClient, none: object) -> None:
    """Null ends a kube-scheduler, and an empty list costs the whole answer."""
    meta = {"a": none, "b": {"Pods": [{"UID": "v"}], "NumPDBViolations": 0}}

    answer = await post(http, "preempt", {"Pod": POD, "NodeNameToVictims": None, "NodeNameToMetaVictims": meta})

    assert ["b"] == list(answer["NodeNameToMetaVictims"])


async def test_bound_is_said_without_an_error(http: httpx.AsyncClient, scheduling: RecordedScheduling) -> None:
    call = {"PodName": "p", "PodNamespace": "team", "PodUID": "u", "Node": "n"}

    first = await post(http, "bind", call)
    scheduling.error = Unavailable("node n at 12:03, try 4", "wait")
    second = await post(http, "bind", call)

    assert [("team", "p", "u", "n")] * 2 == scheduling.bound
    assert [{"Error": ""}, {"Error": "Unavailable: no answer at present; wait or look at the log of the registry"}] == [
        first,
        second,
    ]


async def test_what_passes_by_itself_is_an_error_of_filter_alone(
    http: httpx.AsyncClient, scheduling: RecordedScheduling
) -> None:
    """The scheduler tries filter again; without scores and without preemption it goes on."""
    scheduling.error = Unavailable("not read yet", "wait")
    meta = {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 0}}

    answers = [
        await post(http, "filter", asking("a")),
        await post(http, "prioritize", asking("a", "b")),
        await post(http, "preempt", {"Pod": POD, "NodeNameToMetaVictims": meta}),
    ]

    assert answers == [
        {
            **EMPTY,
            "NodeNames": None,
            "Error": "Unavailable: no answer at present; wait or look at the log of the registry",
        },
        [{"Host": "a", "Score": 0}, {"Host": "b", "Score": 0}],
        {"NodeNameToMetaVictims": {}},
    ]


async def test_calls_on_a_lasting_connection_are_answered(scheduling: RecordedScheduling) -> None:
    async with serving(scheduling) as url:
        with RawClient(url) as client:
            for count in (1, 100, 1):
                names = [f"node-{position}" for position in range(count)]
                answer = await client.answer(request_bytes("/scheduler/filter", go_json(asking(*names))))
                status, headers, body = parsed(answer)

                assert (200, names) == (status, body["NodeNames"])
                assert "connection" not in headers


async def test_requests_one_behind_the_other_are_answered_in_order(scheduling: RecordedScheduling) -> None:
    async with serving(scheduling) as url:
        calls = [request_bytes("/scheduler/filter", go_json(asking(name))) for name in ("a", "b", "c")]
        last = request_bytes("/scheduler/filter", go_json(asking("d")), Connection="close")
        with RawClient(url) as client:
            answers = split(await client.rest(b"".join((*calls, last))))

    assert [["a"], ["b"], ["c"], ["d"]] == [parsed(answer)[2]["NodeNames"] for answer in answers]


def test_victims_as_a_scheduler_writes_them_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands come with one call, and the check for repeated keys takes a hundred times as long as decoding."""
    victims = {
        f"node-{number}": {"Pods": [{"UID": f"{number}-{pod}"} for pod in range(number)], "NumPDBViolations": number}
        for number in range(5)
    }
    usual = go_json({"Pod": {}, "NodeNameToMetaVictims": {**victims, "none": {"Pods": None, "NumPDBViolations": 0}}})
    expected = arguments.read_preempt(usual.replace(b'"Pods":[{', b'"x":0,"Pods":[{'))
    checked: list[int] = []
    monkeypatch.setattr(arguments, "refuse_ambiguous", lambda body: checked.append(len(body)))

    assert expected == arguments.read_preempt(usual)
    assert [len('{"Pod":0,"NodeNameToMetaVictims":0}')] == checked


@pytest.mark.parametrize("twice", [b'"node-1":{},"node-1":', b'"node-1":{"Pods":[],"Pods":[]},"x":'])
def test_a_repeated_key_of_victims_is_refused(twice: bytes) -> None:
    victims = go_json({"Pod": {}, "NodeNameToMetaVictims": {"node-1": {"Pods": None, "NumPDBViolations": 0}}})
    with pytest.raises(Undecodable, match="twice"):
        arguments.read_preempt(victims.replace(b'"node-1":', twice))
