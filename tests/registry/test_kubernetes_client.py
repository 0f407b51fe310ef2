"""The registry's client of the API server, against a stand-in that does what real ones do on bad days."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from api_server_support import POD, followed, shown_pod, until_synced
from bus_support import receive

from topoalign.core.demand.gangs import NATIVE
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import NodeName
from topoalign.registry.kubernetes.api_client import PAGE, HttpKubernetes, connect_kubernetes
from topoalign.registry.ports import ApiConflict, ApiRefused, ApiUnavailable, SeenPod, Synced
from topoalign.runtime.clock import SystemClock
from topoalign.testing.fake_api_server import watching
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.faults import Harm
from topoalign.testing.fake_api_server.objects import Objects
from topoalign.testing.fake_api_server.server import FakeApiServer, fake_api_server

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with fake_api_server(FakeCluster(), bookmark_seconds=0.01) as server:
        yield server


@pytest.fixture
async def api(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[HttpKubernetes]:
    where = str(server.kubeconfig(tmp_path / "kubeconfig"))
    async with connect_kubernetes(where, SystemClock(), "replica-1", silent_seconds=0.3) as api:
        yield api


def with_user(server: FakeApiServer, folder: Path, user: dict[str, object]) -> str:
    """The path of a kubeconfig of this server, with these credentials."""
    file = server.kubeconfig(folder / "kubeconfig")
    document = msgspec.json.decode(file.read_bytes())
    document["users"][0]["user"] = user
    file.write_bytes(msgspec.json.encode(document))
    return str(file)


async def test_a_broken_watch_goes_on_where_it_was(server: FakeApiServer, api: HttpKubernetes) -> None:
    """Nothing is listed again: a restart of the API server costs one request of each follower."""
    async with followed(api.pods()) as pods:
        await until_synced(pods)
        server.cluster.add_pod(shown_pod("before"))
        await pods.receive()
        server.end_watches()
        server.cluster.add_pod(shown_pod("after"))
        told = await pods.receive()

    assert "after" == told.name
    assert 1 == server.requests["LIST pods"]


async def test_a_line_of_a_watch_may_come_in_two_chunks(
    server: FakeApiServer, api: HttpKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "APART", 1)

    async with followed(api.pods()) as pods:
        await until_synced(pods)
        for number in range(5):
            server.cluster.add_pod(shown_pod(f"p-{number}"))
        told = await receive(pods, 5)

    assert [f"p-{number}" for number in range(5)] == [each.name for each in told]
    assert 1 == server.requests["WATCH pods"]


async def test_a_long_list_comes_in_pages(server: FakeApiServer, api: HttpKubernetes) -> None:
    for number in range(2 * PAGE + 1):
        server.cluster.add_pod(shown_pod(f"p-{number}"))
    server.faults.add("LIST pods", Harm.REFUSE, status=429)

    async with followed(api.pods()) as pods:
        told = await until_synced(pods)

    assert 2 * PAGE + 1 == len({each.name for each in told if isinstance(each, SeenPod)})
    assert 1 + 3 == server.requests["LIST pods"]


async def test_a_page_of_a_list_may_take_longer_than_a_call(server: FakeApiServer, tmp_path: Path) -> None:
    """One that is given up makes the whole list begin anew."""
    server.faults.add("LIST pods", Harm.SLOW, seconds=0.2)
    where = str(server.kubeconfig(tmp_path / "kubeconfig"))

    connected = connect_kubernetes(where, SystemClock(), "replica-1", call_seconds=0.05)
    async with connected as api, followed(api.pods()) as pods:
        await until_synced(pods)

    assert 1 == server.requests["LIST pods"]


async def test_a_list_that_expires_between_pages_begins_again(server: FakeApiServer, api: HttpKubernetes) -> None:
    for number in range(PAGE + 2):
        server.cluster.add_pod(shown_pod(f"p-{number}"))

    async with followed(api.pods()) as pods:
        await pods.receive()
        server.cluster.delete_pod("ml", "p-0")
        server.cluster.pods.compact()
        told = await until_synced(pods)

    assert {f"p-{number}" for number in range(1, PAGE + 2)} <= {each.name for each in told if isinstance(each, SeenPod)}
    assert 2 + 2 == server.requests["LIST pods"]


@pytest.mark.parametrize("harm", [Harm.SILENT, Harm.DROP, Harm.REFUSE])
async def test_a_watch_that_fails_is_tried_again(server: FakeApiServer, api: HttpKubernetes, harm: Harm) -> None:
    """Whether it never answers, is cut off, or is refused: what happened meanwhile is told, and then all is well."""
    server.faults.add("WATCH pods", harm, 2)

    async with followed(api.pods()) as pods:
        await until_synced(pods)
        server.cluster.add_pod(POD)
        told = await pods.receive()

    assert "p" == told.name
    assert api.trouble is None
    assert (1, 3) == (server.requests["LIST pods"], server.requests["WATCH pods"])


async def test_objects_are_listed_again_if_their_version_is_no_longer_served(
    server: FakeApiServer, api: HttpKubernetes
) -> None:
    """An upgrade of the control plane removes an alpha version and adds a beta one."""
    versions = server.cluster.versions
    server.faults.add("WATCH podgroups", Harm.REFUSE, status=404)
    async with followed(api.pod_groups(NATIVE)) as groups:
        first = await groups.receive()
        server.cluster.pod_groups[NATIVE] = Objects("PodGroup", f"{NATIVE}/v1beta1", "podgroups", versions)
        server.cluster.pod_groups[NATIVE].create(("ml", "train"), {"spec": {"minMember": 2}})
        seen = await groups.receive()

    assert (Synced(), "train") == (first, seen.name)


async def test_a_watch_refused_with_410_lists_again(server: FakeApiServer, api: HttpKubernetes) -> None:
    server.faults.add("WATCH pods", Harm.REFUSE, status=410)

    async with followed(api.pods()) as pods:
        await until_synced(pods)
        await until_synced(pods)

    assert 2 == server.requests["LIST pods"]


async def test_bookmarks_carry_a_quiet_watch_over_lost_history(server: FakeApiServer, api: HttpKubernetes) -> None:
    """Other objects change while no pod does: the watch still resumes after the newest version, without a list."""
    cluster = server.cluster
    async with followed(api.pods()) as pods:
        await until_synced(pods)
        cluster.add_node("node-1")
        await server.asked("BOOKMARK pods", server.requests["BOOKMARK pods"] + 2)
        cluster.pods.compact()
        server.end_watches()
        cluster.add_pod(POD)
        told = await pods.receive()

    assert "p" == told.name
    assert 1 == server.requests["LIST pods"]


async def test_why_nothing_is_followed_is_told(server: FakeApiServer, api: HttpKubernetes) -> None:
    server.faults.add("LIST pods", Harm.REFUSE, status=403)

    async with followed(api.pods()) as pods:
        await server.asked("LIST pods", 2)
        told = api.trouble
        await until_synced(pods)

    assert "/api/v1/pods: HTTP status 403: refused on demand" == told
    assert api.trouble is None


async def test_an_object_of_another_form_is_skipped(server: FakeApiServer, api: HttpKubernetes) -> None:
    server.cluster.pods.create(("ml", "odd"), {"metadata": {}, "spec": {"containers": "none"}})
    server.cluster.add_pod(POD)

    async with followed(api.pods()) as pods:
        told = await until_synced(pods)
        server.cluster.pods.merge(("ml", "odd"), {"spec": {"containers": 1}})
        server.cluster.bind("ml", "p", {"target": {"name": NODE}})
        bound = await pods.receive()

    assert ["p", Synced()] == [told[0].name, told[1]]
    assert NODE == bound.node


@pytest.mark.parametrize("harm", [Harm.LOSE, Harm.SILENT, Harm.DROP])
async def test_after_a_lost_answer_a_binding_may_exist(server: FakeApiServer, tmp_path: Path, harm: Harm) -> None:
    """The error says that it is not known: what is there tells the pod itself."""
    uid = server.cluster.add_pod(POD)["metadata"]["uid"]
    server.faults.add("POST binding", harm)
    where = str(server.kubeconfig(tmp_path / "kubeconfig"))

    async with connect_kubernetes(where, SystemClock(), "replica-1", call_seconds=0.3) as api:
        with pytest.raises(ApiUnavailable):
            await api.bind("ml", "p", uid, NODE)
        pod = await api.pod("ml", "p")

    assert pod is not None
    assert (NODE if harm is Harm.LOSE else None) == pod.node


@pytest.mark.parametrize(
    ("status", "error"),
    [(409, ApiConflict), (403, ApiRefused), (422, ApiRefused), (429, ApiUnavailable), (500, ApiUnavailable)],
)
async def test_each_refusal_has_its_error(
    server: FakeApiServer, api: HttpKubernetes, status: int, error: type[Exception]
) -> None:
    uid = server.cluster.add_pod(POD)["metadata"]["uid"]
    server.faults.add("POST binding", Harm.REFUSE, status=status)

    with pytest.raises(error, match="refused on demand"):
        await api.bind("ml", "p", uid, NODE)


async def test_a_token_that_was_replaced_is_read_again(server: FakeApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    server.token = "first"

    where = with_user(server, tmp_path, {"tokenFile": str(token)})
    async with connect_kubernetes(where, SystemClock(), "replica-1") as api:
        assert await api.pod("ml", "absent") is None
        server.token = "second"
        with pytest.raises(ApiRefused, match="401"):
            await api.pod("ml", "absent")
        token.write_text("second")
        assert await api.pod("ml", "absent") is None
        token.unlink()
        server.token = "third"
        with pytest.raises(ApiUnavailable, match="token"):
            await api.pod("ml", "absent")


async def test_a_program_is_asked_again_when_its_token_expires(server: FakeApiServer, tmp_path: Path) -> None:
    token, runs = tmp_path / "token", tmp_path / "runs"
    script = f'echo >>{runs}; printf \'{{"status":{{"token":"%s"}}}}\' "$(cat {token})"'
    version = "client.authentication.k8s.io/v1beta1"
    where = with_user(server, tmp_path, {"exec": {"apiVersion": version, "command": "sh", "args": ["-c", script]}})
    server.token = "first"
    token.write_text("first")

    async with connect_kubernetes(where, SystemClock(), "replica-1") as api:
        for _ in range(2):
            assert await api.pod("ml", "absent") is None
        server.token = "second"
        token.write_text("second")
        assert await api.pod("ml", "absent") is None
        server.token = "third"
        with pytest.raises(ApiRefused, match="401"):
            await api.pod("ml", "absent")

    assert 3 == len(runs.read_text())


async def test_a_token_that_no_header_can_have_is_told(server: FakeApiServer, tmp_path: Path) -> None:
    """It is a fault of the file, and ends nothing: the file is read again."""
    token = tmp_path / "token"
    token.write_text("sec\nret")

    async with connect_kubernetes(with_user(server, tmp_path, {"tokenFile": str(token)}), SystemClock(), "r") as api:
        with pytest.raises(ApiUnavailable, match="no text for a header"):
            await api.pod("ml", "absent")


@pytest.mark.parametrize("url", ["", "host:443", "http://host:port", "http://[::1"])
async def test_an_address_that_is_none_is_an_invalid_setting(server: FakeApiServer, tmp_path: Path, url: str) -> None:
    server.url = url
    with pytest.raises(InvalidField, match="TOPOALIGN_KUBERNETES"):
        async with connect_kubernetes(str(server.kubeconfig(tmp_path / "kubeconfig")), SystemClock(), "replica-1"):
            pass


@pytest.mark.parametrize("text", ["", "{}", "clusters: 3", "\x00", "- a", "{"])
async def test_a_wrong_kubeconfig_is_an_invalid_setting(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)

    with pytest.raises(InvalidField, match="TOPOALIGN_KUBERNETES"):
        async with connect_kubernetes(str(file), SystemClock(), "replica-1"):
            pass


async def test_outside_a_cluster_there_is_no_service_account(tmp_path: Path) -> None:
    for where in ("in-cluster", str(tmp_path / "absent")):
        with pytest.raises(InvalidField, match="cannot be used"):
            async with connect_kubernetes(where, SystemClock(), "replica-1"):
                pass
