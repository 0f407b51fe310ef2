"""What every adapter of the API server promises, held against the one in memory and the one over HTTP to the stand-in."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from api_server_support import POD, followed, shown_pod, until_synced
from bus_support import receive

from topoalign.core.demand.node_filters import (
    Constraints,
    NodeSelector,
    Requirement,
    Taint,
    Term,
    Toleration,
)
from topoalign.core.model.ids import GPU, NodeName, ResourceName
from topoalign.core.model.requests import GANG
from topoalign.core.sharing.hami.node_annotations import NodeAnnotations
from topoalign.registry.kubernetes.api_client import connect_kubernetes
from topoalign.registry.ports import (
    ApiConflict,
    ApiNotFound,
    GoneObject,
    KubernetesApi,
    PodEvent,
    SeenNode,
    SeenPodGroup,
    SeenQuota,
    Synced,
)
from topoalign.runtime.clock import SystemClock
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import Objects
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture(params=["memory", "http"])
async def api(request: pytest.FixtureRequest, cluster: FakeCluster, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    if request.param == "memory":
        yield MemoryKubernetes(cluster)
        return
    async with fake_api_server(cluster, token="secret") as server:
        kubeconfig = str(server.kubeconfig(tmp_path / "kubeconfig"))
        async with connect_kubernetes(kubeconfig, SystemClock(), "replica-1") as over_http:
            yield over_http


async def test_a_pod_is_seen_with_all_that_scheduling_looks_at(api: KubernetesApi, cluster: FakeCluster) -> None:
    pod = shown_pod("p", node="node-1", gpus=2, owner="Job")
    pod["metadata"]["annotations"][GANG] = "g"
    cluster.add_pod(pod)
    cluster.set_status("ml", "p", phase="Failed", reason="TopologyAffinityError")

    seen = await api.pod("ml", "p")

    assert seen is not None
    assert ("ml", "p", NODE, "Failed", "TopologyAffinityError") == (
        seen.namespace,
        seen.name,
        seen.node,
        seen.phase,
        seen.reason,
    )
    assert (True, "1", False) == (seen.finished, seen.controller, seen.deleting)
    asked = seen.to_schedule()
    assert seen.uid == asked.uid
    assert ({GPU: 2}, {GANG: "g"}) == (asked.request.containers[0].limits, asked.request.annotations)
    assert "" == seen.waits_for
    assert await api.pod("ml", "other") is None


async def test_what_keeps_a_pod_from_being_scheduled_is_seen(api: KubernetesApi, cluster: FakeCluster) -> None:
    """A claim without a name in the status is not needed."""
    gated, claiming = shown_pod("gated"), shown_pod("claiming")
    gated["spec"]["schedulingGates"] = [{"name": "example.com/quota"}]
    claiming["spec"]["resourceClaims"] = [{"name": "net", "resourceClaimTemplateName": "nic"}]
    cluster.add_pod(gated)
    cluster.add_pod(claiming)

    before = [await api.pod("ml", name) for name in ("gated", "claiming")]
    cluster.set_status("ml", "claiming", resourceClaimStatuses=[{"name": "net"}])
    after = await api.pod("ml", "claiming")

    assert ["has scheduling gates", "waits for the resource claim 'net'"] == [
        each and each.waits_for for each in before
    ]
    assert after is not None
    assert "" == after.waits_for


async def test_a_watch_begins_with_all_there_is_then_tells_changes(api: KubernetesApi, cluster: FakeCluster) -> None:
    first = cluster.add_pod(POD)["metadata"]["uid"]
    async with followed(api.pods()) as pods:
        begin = await receive(pods, 2)
        cluster.bind("ml", "p", {"target": {"name": NODE}})
        bound = await pods.receive()
        cluster.delete_pod("ml", "p", grace=0)
        gone = await pods.receive()

    assert [(first, None), Synced] == [(begin[0].uid, begin[0].node), type(begin[1])]
    assert (first, NODE) == (bound.uid, bound.node)
    assert GoneObject(first) == gone


async def test_nodes_are_seen_with_labels_and_their_deletion(api: KubernetesApi, cluster: FakeCluster) -> None:
    uid = cluster.add_node("node-1", {"zone": "a"})["metadata"]["uid"]
    async with followed(api.nodes()) as nodes:
        begin = await receive(nodes, 2)
        cluster.nodes.merge(("", "node-1"), {"metadata": {"labels": {"zone": "b"}}})
        changed = await nodes.receive()
        cluster.nodes.remove(("", "node-1"))
        gone = await nodes.receive()

    assert [SeenNode(name=NODE, uid=uid, labels=begin[0].labels), Synced()] == begin
    assert ("a", "b") == (begin[0].labels["zone"], changed.labels["zone"])
    assert GoneObject(NODE) == gone


async def test_quotas_are_seen_with_their_limits_of_devices(api: KubernetesApi, cluster: FakeCluster) -> None:
    """And nothing else of them: Kubernetes counts requests, CPUs and memory itself."""
    hard = {"limits.nvidia.com/gpumem": "10k", "requests.nvidia.com/gpu": "4", "limits.cpu": "8", "pods": 10}
    uid = cluster.quotas.create(("ml", "gpus"), {"spec": {"hard": hard}})["metadata"]["uid"]
    async with followed(api.quotas()) as quotas:
        begin = await receive(quotas, 2)
        cluster.quotas.merge(
            ("ml", "gpus"), {"spec": {"hard": {"limits.nvidia.com/gpumem": "0"}, "scopes": ["BestEffort"]}}
        )
        changed = await quotas.receive()
        cluster.quotas.remove(("ml", "gpus"))
        gone = await quotas.receive()

    seen = SeenQuota(namespace="ml", name="gpus", uid=uid, limits={ResourceName("nvidia.com/gpumem"): 10_000})
    assert [seen, Synced()] == begin
    assert ({"nvidia.com/gpumem": 0}, True) == (changed.limits, changed.scoped)
    assert GoneObject(uid) == gone


GANG_POLICY = {"schedulingPolicy": {"gang": {"minCount": 4}}}


@pytest.mark.parametrize(
    ("api_group", "spec", "minimum"),
    [
        ("scheduling.k8s.io", GANG_POLICY, 4),
        ("scheduling.k8s.io", {"schedulingPolicy": {"basic": {}}}, None),
        ("scheduling.x-k8s.io", {"minMember": 3, "scheduleTimeoutSeconds": 10}, 3),
        ("scheduling.run.ai", {"minMember": 2, "queue": "q"}, 2),
        ("scheduling.volcano.sh", {"minMember": 8}, 8),
        ("scheduling.volcano.sh", {}, None),
    ],
)
async def test_pod_groups_are_seen_with_their_minimum(
    api: KubernetesApi, cluster: FakeCluster, api_group: str, spec: dict[str, object], minimum: int | None
) -> None:
    groups = cluster.pod_groups[api_group]
    uid = groups.create(("ml", "train"), {"spec": spec})["metadata"]["uid"]
    async with followed(api.pod_groups(api_group)) as changes:
        begin = await receive(changes, 2)
        groups.merge(("ml", "train"), {"spec": {"minMember": 5, "schedulingPolicy": {"gang": {"minCount": 5}}}})
        changed = await changes.receive()
        groups.remove(("ml", "train"))
        gone = await changes.receive()

    assert [SeenPodGroup(namespace="ml", name="train", uid=uid, minimum=minimum), Synced()] == begin
    assert (5, GoneObject("ml/train")) == (changed.minimum, gone)


async def test_a_cluster_without_pod_groups_has_none(api: KubernetesApi, cluster: FakeCluster) -> None:
    """This is no trouble: most clusters lack most of these kinds."""
    del cluster.pod_groups["scheduling.run.ai"]
    async with followed(api.pod_groups("scheduling.run.ai")) as changes:
        begin = await changes.receive()

        assert (Synced(), None) == (begin, api.trouble)


async def test_the_version_of_pod_groups_that_the_server_has_is_used(api: KubernetesApi, cluster: FakeCluster) -> None:
    """Kubernetes v1.37 has another one than v1.36."""
    groups = Objects("PodGroup", "scheduling.k8s.io/v1beta1", "podgroups", cluster.versions)
    cluster.pod_groups["scheduling.k8s.io"] = groups
    groups.create(("ml", "train"), {"spec": GANG_POLICY})
    async with followed(api.pod_groups("scheduling.k8s.io")) as changes:
        seen = await changes.receive()

    assert ("train", 4) == (seen.name, seen.minimum)


async def test_what_hami_says_of_a_node_is_seen(api: KubernetesApi, cluster: FakeCluster) -> None:
    """And nothing of a node to which HAMi has not registered cards; other annotations are passed over."""
    cluster.add_node("node-1")
    said = {"hami.io/node-nvidia-register": "[]", "hami.io/node-handshake": "Requesting_x", "other": "x"}
    async with followed(api.nodes()) as nodes:
        begin = await receive(nodes, 2)
        seen = []
        for amount in ("20", "1k", "-1", None):
            status = {"allocatable": {"nvidia.com/gpu": amount, "cpu": "4"}}
            cluster.nodes.merge(("", "node-1"), {"metadata": {"annotations": said}, "status": status})
            seen.append(await nodes.receive())
        cluster.nodes.merge(("", "node-1"), {"metadata": {"annotations": {"hami.io/node-nvidia-register": None}}})
        gone = await nodes.receive()

    assert [(None, 0), NodeAnnotations("[]", "Requesting_x"), None] == [
        (begin[0].hami, begin[0].allocatable_gpus), seen[0].hami, gone.hami,
    ]  # fmt: skip
    assert [20, 1000, 0, 0] == [each.allocatable_gpus for each in seen]


async def test_what_decides_where_a_pod_may_go_is_seen(api: KubernetesApi, cluster: FakeCluster) -> None:
    """Of nodes taints and cordons; of pods what they select and tolerate. Either may be missing."""
    cluster.add_node("node-1")
    cluster.nodes.merge(("", "node-1"), {"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}})
    cluster.add_node("node-2")
    cluster.nodes.merge(("", "node-2"), {"spec": {"unschedulable": True}})
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    said = {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity": required}}
    cluster.add_pod({**POD, "spec": {**POD["spec"], **said}})
    cluster.add_pod(shown_pod("plain"))
    async with followed(api.nodes()) as nodes:
        tainted, cordoned = await receive(nodes, 2)
    pod, plain = await api.pod("ml", "p"), await api.pod("ml", "plain")

    assert ((Taint("k", "NoSchedule"),), False) == (tainted.taints, tainted.unschedulable)
    assert ((), True) == (cordoned.taints, cordoned.unschedulable)
    assert pod is not None and plain is not None
    selector = NodeSelector([Term([Requirement("zone", "Exists")])])
    assert Constraints({"a": "b"}, selector, (Toleration(operator="Exists"),)) == pod.to_schedule().constraints
    assert Constraints() == plain.to_schedule().constraints


async def test_after_lost_history_all_comes_again_and_what_vanished(api: KubernetesApi, cluster: FakeCluster) -> None:
    """Changes that the server no longer has are made up for by a list: a pod deleted meanwhile is told to be gone."""
    cluster.add_pod(shown_pod("kept"))
    lost = cluster.add_pod(shown_pod("lost"))["metadata"]["uid"]
    async with followed(api.pods()) as pods:
        await receive(pods, 3)
        cluster.delete_pod("ml", "lost")
        cluster.pods.compact()
        cluster.add_pod(shown_pod("new"))
        again = await until_synced(pods)

    assert [GoneObject(lost)] == [each for each in again if isinstance(each, GoneObject)]
    assert {"kept", "new"} <= {each.name for each in again if not isinstance(each, GoneObject | Synced)}


async def test_a_binding_names_this_very_pod(api: KubernetesApi, cluster: FakeCluster) -> None:
    uid = cluster.add_pod(POD)["metadata"]["uid"]

    with pytest.raises(ApiConflict, match="UID in precondition"):
        await api.bind("ml", "p", "another", NODE)
    await api.bind("ml", "p", uid, NODE)

    seen = await api.pod("ml", "p")
    assert seen is not None
    assert NODE == seen.node
    with pytest.raises(ApiConflict, match="already assigned"):
        await api.bind("ml", "p", uid, NodeName("node-2"))
    with pytest.raises(ApiNotFound):
        await api.bind("ml", "absent", uid, NODE)


async def test_a_pod_on_its_way_out_is_not_bound(api: KubernetesApi, cluster: FakeCluster) -> None:
    uid = cluster.add_pod(POD)["metadata"]["uid"]
    cluster.pods.merge(("ml", "p"), {"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z"}})

    with pytest.raises(ApiConflict, match="being deleted"):
        await api.bind("ml", "p", uid, NODE)


async def test_only_the_pod_that_was_meant_is_deleted(api: KubernetesApi, cluster: FakeCluster) -> None:
    """A bound pod stays until its kubelet has ended it, and is seen as on its way out."""
    uid = cluster.add_pod(shown_pod("p", node="node-1"))["metadata"]["uid"]

    with pytest.raises(ApiConflict):
        await api.delete("ml", "p", "another")
    await api.delete("ml", "p", uid)

    seen = await api.pod("ml", "p")
    assert seen is not None
    assert seen.deleting
    cluster.delete_pod("ml", "p", grace=0)
    with pytest.raises(ApiNotFound):
        await api.delete("ml", "p", uid)


async def test_a_report_becomes_an_event_about_the_pod(api: KubernetesApi, cluster: FakeCluster) -> None:
    """Each is an object of its own, and a note that is too long is cut where a letter ends."""
    for note in ("GPUs are reserved", "ö" * 1000):
        await api.report(PodEvent(namespace="ml", name="p", uid="u", reason="TopologyReserved", note=note))

    events = sorted(cluster.events, key=lambda event: int(event["metadata"]["resourceVersion"]))
    assert [("TopologyReserved", "Normal"), ("TopologyReserved", "Normal")] == [
        (event["reason"], event["type"]) for event in events
    ]
    assert ["GPUs are reserved", "ö" * 512] == [event["message"] for event in events]
    assert {("Pod", "ml", "p", "u")} == {
        tuple(event["involvedObject"][field] for field in ("kind", "namespace", "name", "uid")) for event in events
    }


async def test_a_report_of_the_same_identity_is_written_once(api: KubernetesApi, cluster: FakeCluster) -> None:
    """Whoever writes it and with whatever counts; written again once it is gone. Another pod or reason is another one."""
    report = PodEvent(namespace="ml", name="p", uid="u", reason="NoNodeFits", note="3 nodes", identity="NotAligned")
    same = msgspec.structs.replace(report, note="4 nodes")
    for each in (report, same):
        await api.report(each)
        await MemoryKubernetes(cluster).report(each)
    once = [event["message"] for event in cluster.events]
    cluster.events.remove(("ml", next(iter(cluster.events))["metadata"]["name"]))
    for changed in ({}, {"uid": "v"}, {"reason": "BindFailed"}, {"identity": "NoFit"}, {"identity": ""}):
        await api.report(msgspec.structs.replace(same, **changed))

    assert (["3 nodes"], 5) == (once, len(cluster.events))


@pytest.mark.parametrize("name", ["a" * 253, "a" * 235 + "." + "b" * 17, "a" * 235 + "-b"])
async def test_the_name_of_an_event_is_a_valid_name(api: KubernetesApi, cluster: FakeCluster, name: str) -> None:
    """A DNS subdomain of at most 253 characters, as Kubernetes requires of object names."""
    await api.report(PodEvent(namespace="ml", name=name, uid="u", reason="R", note="n"))

    (event,) = cluster.events
    label = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
    assert re.fullmatch(rf"{label}(\.{label})*", event["metadata"]["name"])
    assert 253 >= len(event["metadata"]["name"])


async def test_waking_changes_one_annotation_of_the_node(api: KubernetesApi, cluster: FakeCluster) -> None:
    cluster.add_node("node-1", {"zone": "a"})

    await api.wake(NODE, "1")

    metadata = cluster.nodes.get(("", "node-1"))["metadata"]
    assert ({"topoalign.io/woken": "1"}, "a") == (metadata["annotations"], metadata["labels"]["zone"])
    with pytest.raises(ApiNotFound):
        await api.wake(NodeName("absent"), "1")


async def test_a_topology_object_is_made_and_then_replaced(api: KubernetesApi, cluster: FakeCluster) -> None:
    topology = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": "node-1"},
        "zones": [{"name": "node-0", "type": "Node"}],
    }

    await api.apply_topology(topology)
    await api.apply_topology({**topology, "zones": []})

    assert [[]] == [each["zones"] for each in cluster.topologies]


async def test_the_version_is_two_numbers(api: KubernetesApi) -> None:
    assert (1, 36) == await api.version()


async def test_nothing_new_means_nothing_told(api: KubernetesApi, cluster: FakeCluster) -> None:
    cluster.add_pod(POD)
    async with followed(api.pods()) as pods:
        await until_synced(pods)
        await all_tasks_blocked()

        assert 0 == pods.statistics().current_buffer_used
        assert api.trouble is None
