"""
Whatever is sent to the extender, it answers in JSON and in time, and nothing is asked of the cluster that cannot be meant.

A pod that cannot be meant is refused on every node for good: an error instead would be tried again and again.
"""

from contextlib import ExitStack
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread
from scheduling_support import RawClient, RecordedScheduling, go_json, parsed, request_bytes, serving, split

from topoalign.runtime import connections
from topoalign.runtime.connections import MOST_HEAD_BYTES, HttpConnection
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

POD: dict[str, Any] = {
    "metadata": {"name": "p", "uid": "u"},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
}
NAMES = b'"NodeNames":["a","b"]'
REFUSED = "InvalidField: the pod asks for something that cannot be meant; correct its resources and annotations"
NAMED = {
    "no containers": "spec.containers: there is none; a pod has at least one container",
    "no spec": "spec: there is none; write it as a v1 Pod has it",
    **{
        name: f"spec.containers[0].resources.limits[nvidia.com/gpu]: {finding}"
        for name, finding in (
            ("negative", "'-1' is no amount; write a whole number, 0 or more"),
            ("half a GPU", "'1.5' is no amount; write a whole number, 0 or more"),
            ("too large for 64 bits", "'1e30' is no amount; write a whole number, 0 or more"),
            ("no quantity", "'1e' is no amount; write a whole number, 0 or more"),
            ("digits of another script", "'\u0661' is no amount; write a whole number, 0 or more"),
        )
    },
    "300 kB of annotations": "metadata.annotations: 1 with 300001 characters; give at most 1000 with 262144 characters",
    "10,000 containers": "spec.containers: more than 100 containers, init containers included; split the pod",
}
"""What the refusal of a pod that can be read says of its field."""
DEEP = b"[" * 100_000 + b"]" * 100_000


def with_amount(amount: str) -> bytes:
    return go_json(POD).replace(b'"1"', amount.encode())


PODS = {
    "null": b"null",
    "no object": b"[1]",
    "empty": b"{}",
    "no uid": go_json({**POD, "metadata": {"name": "p"}}),
    "no containers": go_json({**POD, "spec": {"containers": []}}),
    "no spec": go_json({"metadata": POD["metadata"]}),
    "negative": with_amount('"-1"'),
    "half a GPU": with_amount("1.5"),
    "too large for 64 bits": with_amount('"1e30"'),
    "beyond floats": with_amount("1e999"),
    "no quantity": with_amount('"1e"'),
    "of another type": with_amount("true"),
    "digits of another script": with_amount('"\u0661"'),
    "2 MB of annotations": go_json({**POD, "metadata": {**POD["metadata"], "annotations": {"a": "x" * 2_000_000}}}),
    "300 kB of annotations": go_json({**POD, "metadata": {**POD["metadata"], "annotations": {"a": "x" * 300_000}}}),
    "a key twice": go_json(POD).replace(b'"spec":', b'"spec":{},"spec":'),
    "an amount twice": with_amount('"1","nvidia.com/gpu":"2"'),
    "10,000 containers": go_json({**POD, "spec": {"containers": [{"name": f"c{n}"} for n in range(10_000)]}}),
}
BODIES = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "no JSON": b"{",
    "text behind": b'{"Pod":null,' + NAMES + b"} {",
    "NaN": b'{"Pod":{"spec":NaN},' + NAMES + b"}",
    "Infinity": b'{"Pod":{"spec":-Infinity},' + NAMES + b"}",
    "not UTF-8": b'{"Pod":{"metadata":{"name":"\xff"}},' + NAMES + b"}",
    "half a surrogate": b'{"Pod":{"metadata":{"name":"\\ud800"}},"NodeNames":["\\ud800"]}',
    "deep": b'{"Pod":' + DEEP + b"," + NAMES + b"}",
    "deep elsewhere": b'{"Pod":null,"x":' + DEEP + b"," + NAMES + b"}",
    "no nodes": b'{"Pod":' + go_json(POD) + b',"Nodes":null,"NodeNames":null}',
    "names that are no text": b'{"Pod":' + go_json(POD) + b',"NodeNames":[1]}',
    "names that are no list": b'{"Pod":' + go_json(POD) + b',"NodeNames":"a"}',
    "a key twice": b'{"Pod":null,"Pod":null,' + NAMES + b"}",
    "a key twice, once escaped": b'{"Pod":null,"\\u0050od":null,' + NAMES + b"}",
    "names in another spelling": b'{"pod":null,"nodenames":["a"]}',
    "a node without a name": b'{"Pod":null,"Nodes":{"items":[{}]}}',
    "a node twice": b'{"Pod":null,"Nodes":{"items":[{"metadata":{"name":"a"}},{"metadata":{"name":"a"}}]}}',
}


async def send(url: str, verb: str, body: bytes, *, method: str = "POST", kind: str = "application/json") -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.request(method, f"/scheduler/{verb}", content=body, headers={"content-type": kind})
    assert "application/json" == answer.headers["content-type"]
    return answer.status_code, answer.json()


@pytest.mark.parametrize("name", PODS)
async def test_a_pod_that_cannot_be_meant_is_refused_for_good(name: str) -> None:
    """Refused on each node by filter, with the field, without scores by prioritize, and nobody is evicted for it."""
    text = f"InvalidField: {NAMED[name]}" if name in NAMED else REFUSED
    scheduling, pod = RecordedScheduling(), b'{"Pod":' + PODS[name] + b","
    victims = b'"NodeNameToMetaVictims":{"a":{"Pods":[{"UID":"v"}]}}}'

    async with serving(scheduling) as url:
        refused = await send(url, "filter", pod + NAMES + b"}")
        scores = await send(url, "prioritize", pod + NAMES + b"}")
        helped = await send(url, "preempt", pod + victims)

    assert (200, {"a": text, "b": text}) == (refused[0], refused[1]["FailedAndUnresolvableNodes"])
    assert ([], {}, "") == tuple(refused[1][key] for key in ("NodeNames", "FailedNodes", "Error"))
    assert (200, [{"Host": "a", "Score": 0}, {"Host": "b", "Score": 0}]) == scores
    assert (200, {"NodeNameToMetaVictims": {}}) == helped
    assert not (scheduling.pods or scheduling.bound)


@pytest.mark.parametrize(("amount", "count"), [('"1e9"', 10**9), ('"1e3"', 1_000), ("1000000000", 10**9), ("0", 0)])
async def test_amounts_that_can_be_meant_are_asked_about(amount: str, count: int) -> None:
    """A quantity with an exponent is one; that no node has so many is the cluster's to say."""
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        await send(url, "filter", b'{"Pod":' + with_amount(amount) + b"," + NAMES + b"}")

    assert [count] == [limit for pod in scheduling.pods for limit in pod.request.containers[0].limits.values()]


@pytest.mark.parametrize(
    ("name", "verb"),
    [(name, verb) for name in BODIES for verb in ("filter", "prioritize", "bind")]
    + [(name, "preempt") for name in BODIES if "node" not in name and "names" not in name and "surrogate" not in name],
)
async def test_a_body_that_is_no_call_is_answered_with_an_error(name: str, verb: str) -> None:
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        status, answer = await send(url, verb, BODIES[name])

    assert 400 == status
    assert {"code", "finding", "remedy"} == answer.keys()
    assert not (scheduling.pods or scheduling.bound)


async def test_an_unknown_node_is_for_the_cluster_to_refuse() -> None:
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        none = await send(url, "filter", b'{"Pod":' + go_json(POD) + b',"NodeNames":[]}')

    assert (200, []) == (none[0], none[1]["NodeNames"])


async def test_another_method_type_or_address_is_refused() -> None:
    body = b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}"
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        found = [
            await send(url, "filter", body, method="PUT"),
            await send(url, "filter", b"", method="GET"),
            await send(url, "filter", body, kind="text/plain"),
            await send(url, "bindings", body),
            await send(url, "filter/", body),
        ]

    assert [(405, "MethodNotAllowed")] * 2 + [(415, "UnsupportedMediaType")] + [(404, "NotFound")] * 2 == [
        (status, answer["code"]) for status, answer in found
    ]
    assert not (scheduling.pods or scheduling.bound)


async def test_no_other_protocol_is_begun() -> None:
    """An upgrade is passed over, as the request that it came with is one."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }

    async with serving(RecordedScheduling()) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/scheduler/filter", headers=upgrade)

    assert (405, "MethodNotAllowed") == (answer.status_code, answer.json()["code"])


async def test_the_answer_to_an_upgrade_is_the_last_one() -> None:
    """Nothing is read behind it, and a second request would wait for ever."""
    body = b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}"
    request = request_bytes("/scheduler/filter", body, Connection="Upgrade", Upgrade="h2c")

    async with serving(RecordedScheduling()) as url:
        with RawClient(url) as client:
            status, headers, _ = parsed(await client.rest(request))

    assert (400, "close") == (status, headers["connection"])


async def test_64_mib_and_more_are_answered() -> None:
    """Read to its end, so that the answer is not lost with the connection, and not kept."""
    scheduling = RecordedScheduling()
    most = 64 * 2**20
    node = b'{"metadata":{"name":"a","annotations":{"x":"' + b"x" * (most - 1_000) + b'"}}}'
    pod = b'{"Pod":' + go_json(POD)

    async with serving(scheduling, seconds=60) as url:
        whole = await send(url, "filter", pod + b',"Nodes":{"items":[' + node + b"]}}")
        unusual = await send(url, "filter", pod + b',"x":"' + b"x" * (most - 1_000) + b'",' + NAMES + b"}")
        more = await send(url, "filter", b"[" * (most + 1))

    assert (200, ["a"]) == (whole[0], [each["metadata"]["name"] for each in whole[1]["Nodes"]["items"]])
    assert (200, ["a", "b"]) == (unusual[0], unusual[1]["NodeNames"])
    assert (413, "TooLarge") == (more[0], more[1]["code"])


@pytest.mark.parametrize(
    ("verb", "nodes"),
    {
        "names": ("filter", b'"NodeNames":["a"' + b',"a"' * 20_000 + b"]"),
        "long names": ("prioritize", b'"NodeNames":["' + b"a" * 5_200_000 + b'"]'),
        "items": ("filter", b'"Nodes":{"items":[{}' + b",{}" * 1_000_000 + b"]}"),
        "nodes": ("filter", b'"Nodes":{"items":[{"metadata":{}}' + b',{"metadata":{}}' * 20_000 + b"]}"),
        "victims": (
            "preempt",
            b'"NodeNameToMetaVictims":{' + b",".join(b'"%d":{"Pods":[{"UID":"u"}]}' % n for n in range(20_001)) + b"}",
        ),
    }.values(),
    ids=["names", "long names", "items", "nodes", "victims"],
)
async def test_more_nodes_than_a_cluster_has_are_refused_unread(verb: str, nodes: bytes) -> None:
    """A body of 8 MiB with 930,000 names took 2.8 s, in which nothing else was answered; one of 64 MiB fills the memory."""
    scheduling = RecordedScheduling()

    async with serving(scheduling, seconds=60) as url:
        status, answer = await send(url, verb, b'{"Pod":' + go_json(POD) + b"," + nodes + b"}")

    assert (400, "InvalidField") == (status, answer["code"])
    assert "more than 20000 nodes" in answer["finding"]
    assert not (scheduling.pods or scheduling.bound)


async def test_a_slow_body_and_a_slow_head_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes to a stop in the middle does not hold a connection."""
    monkeypatch.setattr(HttpConnection, "head_seconds", 0.05)
    request = request_bytes("/scheduler/filter", b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}")
    scheduling = RecordedScheduling()
    found = []

    async with serving(scheduling, seconds=0.05) as url:
        for part in (request[:-1], request[:40], b"\r\n", b"nonsense\r\n\r\n"):
            with RawClient(url) as client:
                found.append(parsed(await client.rest(part)))

    assert [408, 408, 408, 400] == [status for status, _, _ in found]
    assert ["TooSlow"] * 3 + ["BadRequest"] == [answer["code"] for _, _, answer in found]
    assert not (scheduling.pods or scheduling.bound)


async def test_a_slow_head_behind_a_whole_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpConnection, "head_seconds", 0.05)
    request = request_bytes("/scheduler/filter", b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}")

    async with serving(RecordedScheduling()) as url:
        with RawClient(url) as client:
            found = [parsed(answer) for answer in split(await client.rest(request + request[:40]))]

    assert [200, 408] == [status for status, _, _ in found]


UPGRADE = "GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n" + "a: b\r\n" * 12_000 + "\r\n"


@pytest.mark.parametrize(
    "head", ["POST /" + "x" * 70_000, "POST /scheduler/filter HTTP/1.1\r\n" + "a: b\r\n" * 12_000, UPGRADE]
)
async def test_a_head_without_end_is_refused_before_its_time(head: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(RecordedScheduling()) as url:
        with RawClient(url) as client:
            status, _, answer = parsed(await client.rest(head.encode()))

    assert (431, "TooLarge") == (status, answer["code"])
    assert [] == caplog.records


LONG = {"a": "b" * 65_300}
"""With the other headers of a request almost 64 KiB."""
CHUNKED = {"Transfer-Encoding": "chunked"}


@pytest.mark.parametrize(
    ("headers", "behind"),
    [
        (LONG | {f"x{number}": "y" for number in range(40)}, b""),
        (CHUNKED, b"0\r\n" + b"a: b\r\n" * 12_000 + b"\r\n"),
        (CHUNKED, b"0;"),
    ],
    ids=["headers", "trailers", "extension"],
)
async def test_what_is_long_and_no_body_is_refused_and_does_nothing(headers: dict[str, str], behind: bytes) -> None:
    """A head or trailers that come whole, and the extension of a chunk without end."""
    body = b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}"
    lines = {"Host": "registry", "Content-Type": "application/json"} | headers
    lines |= {} if behind else {"Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    sent = f"POST /scheduler/filter HTTP/1.1\r\n{head}\r\n".encode()
    sent += b"%x\r\n%s\r\n%s" % (len(body), body, behind) if behind else body
    if behind == b"0;":
        sent = sent.ljust(
            MOST_HEAD_BYTES + 2 * len(body) + 1, b"x"
        )  # what is unread at the end would reset the connection
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        with RawClient(url) as client:
            status, _, answer = parsed(await client.rest(sent))

    assert (431, "TooLarge") == (status, answer["code"])
    assert not (scheduling.pods or scheduling.bound)


async def test_a_head_of_just_under_64_kib_passes() -> None:
    body = b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}"
    async with serving(RecordedScheduling()) as url:
        with RawClient(url) as client:
            status, _, answer = parsed(await client.answer(request_bytes("/scheduler/filter", body, **LONG)))

    assert (200, ["a", "b"]) == (status, answer["NodeNames"])


async def test_one_connection_too_many_closes_the_one_silent_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    request = request_bytes("/scheduler/filter", b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}")

    async with serving(RecordedScheduling()) as url:
        with ExitStack() as opened:
            clients = [opened.enter_context(RawClient(url)) for _ in range(5)]
            found = [parsed(await client.answer(request))[0] for client in clients[1:]]
            closed = await clients[0].rest(b"")

    assert (b"", [200] * 4) == (closed, found)


async def test_half_a_request_is_no_call_and_harms_nobody() -> None:
    request = request_bytes("/scheduler/filter", b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}")
    scheduling = RecordedScheduling()

    async with serving(scheduling) as url:
        with RawClient(url) as client:
            client.socket.sendall(request[:-5])
        await all_tasks_blocked()
        assert not (scheduling.pods or scheduling.bound)
        with RawClient(url) as client:
            status, _, answer = parsed(await client.answer(request))

    assert (200, ["a", "b"]) == (status, answer["NodeNames"])


async def test_large_bodies_come_one_at_a_time() -> None:
    """Those that come meanwhile wait in their sockets and not in memory; small ones pass."""
    large = b'{"Pod":' + go_json(POD) + b',"x":"' + b"x" * 2_000_000 + b'",' + NAMES + b"}"
    small = b'{"Pod":' + go_json(POD) + b"," + NAMES + b"}"
    scheduling = RecordedScheduling()

    async with serving(scheduling, seconds=60) as url, anyio.create_task_group() as tasks:
        with RawClient(url) as stalled, RawClient(url) as waiting, RawClient(url) as passing:
            await to_thread.run_sync(stalled.socket.sendall, request_bytes("/scheduler/filter", large)[:-5])
            for _ in range(100):  # in each of which some of the stalled one is read
                await passing.answer(request_bytes("/scheduler/filter", small))
            answers: list[bytes] = []

            async def wait() -> None:
                answers.append(await waiting.answer(request_bytes("/scheduler/filter", large)))

            tasks.start_soon(wait)
            for _ in range(100):
                await passing.answer(request_bytes("/scheduler/filter", small))
            assert (200, []) == (len(scheduling.pods), answers)
            stalled.socket.close()
            while not answers:
                await anyio.lowlevel.checkpoint()

    assert 200 == parsed(answers[0])[0]


async def test_preempt_refuses_victims_that_are_none() -> None:
    scheduling = RecordedScheduling()
    found = []

    async with serving(scheduling) as url:
        for victims in (
            "[]",
            '{"a":[]}',
            '{"a":{"Pods":[{"UID":1}]}}',
            '{"a":{"NumPDBViolations":1.5}}',
            '{"a":{},"a":{}}',
        ):
            body = b'{"Pod":' + go_json(POD) + b',"NodeNameToMetaVictims":' + victims.encode() + b"}"
            found.append((await send(url, "preempt", body))[0])

    assert [400] * 5 == found
    assert not (scheduling.pods or scheduling.bound)
