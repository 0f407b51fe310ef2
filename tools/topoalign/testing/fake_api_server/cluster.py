"""
The objects of a cluster, and the rules for pods: who may bind one, and what happens when it is deleted.

A Binding is refused with 409 for a pod that is bound, being deleted, or another one than the Binding's UID says; with 404
for one that is not there (kube-apiserver v1.36, as recorded from a real one). A pod that is bound lingers after its deletion
until its kubelet has ended it; one that waits is gone at once.
"""

from collections.abc import Mapping
from typing import Any

from topoalign.testing.fake_api_server.objects import ApiError, Object, Objects, Versions, conflict

Mapped = Mapping[str, Any]
POD_GROUPS = {
    "scheduling.k8s.io": "v1alpha2",
    "scheduling.x-k8s.io": "v1alpha1",
    "scheduling.run.ai": "v2alpha2",
    "scheduling.volcano.sh": "v1beta1",
}
"""API group of PodGroups -> the version that the server has."""


class FakeCluster:
    """What an API server has of a cluster. Every change is one call; none waits for anything."""

    def __init__(self) -> None:
        self.versions = Versions()
        self.pods = Objects("Pod", "v1", "pods", self.versions)
        self.nodes = Objects("Node", "v1", "nodes", self.versions)
        self.quotas = Objects("ResourceQuota", "v1", "resourcequotas", self.versions)
        self.events = Objects("Event", "v1", "events", self.versions)
        self.topologies = Objects(
            "NodeResourceTopology",
            "topology.node.k8s.io/v1alpha2",
            "noderesourcetopologies.topology.node.k8s.io",
            self.versions,
        )
        self.pod_groups = {
            api_group: Objects("PodGroup", f"{api_group}/{version}", "podgroups", self.versions)
            for api_group, version in POD_GROUPS.items()
        }
        """By API group. A cluster without the kind lacks the entry."""
        self.version = (1, 36)

    def add_node(self, name: str, labels: Mapping[str, str] | None = None) -> Object:
        """A node as a kubelet registers it. Raises ApiError 409."""
        said = {"kubernetes.io/hostname": name, **(labels or {})}
        status = {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"kubeletVersion": "v1.36.2"}}
        return self.nodes.create(("", name), {"metadata": {"labels": said}, "spec": {}, "status": status})

    def add_pod(self, pod: Mapped) -> Object:
        """A pod as a client creates it, with what an API server adds. Raises ApiError 409."""
        metadata = pod.get("metadata", {})
        spec = {"schedulerName": "default-scheduler", "terminationGracePeriodSeconds": 30, **pod["spec"]}
        made = {**pod, "spec": spec, "status": {"phase": "Pending", **pod.get("status", {})}}
        return self.pods.create((metadata.get("namespace") or "default", metadata["name"]), made)

    def bind(self, namespace: str, name: str, binding: Mapped) -> None:
        """The subresource `binding`. Raises ApiError 404, and 409 as the module says."""
        key = (namespace, name)
        target = binding["target"]["name"]
        pod = self.pods.get(key)
        uid = binding.get("metadata", {}).get("uid")
        here = pod["metadata"]["uid"]
        if uid not in (None, "", here):
            raise conflict(f"Precondition failed: UID in precondition: {uid}, UID in object meta: {here}")
        if pod["metadata"].get("deletionTimestamp"):
            raise conflict(f"pod {name} is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            raise conflict(f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"')
        condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        status = {**pod["status"], "conditions": [condition]}
        self.pods.replace(key, {**pod, "spec": {**pod["spec"], "nodeName": target}, "status": status})

    def delete_pod(self, namespace: str, name: str, uid: str | None = None, grace: int | None = None) -> Object:
        """Deletes a pod, or begins to. Raises ApiError 404, and 409 for another one than `uid`."""
        key = (namespace, name)
        pod = self.pods.get(key)
        here = pod["metadata"]["uid"]
        if uid not in (None, "", here):
            raise conflict(f"the UID in the precondition ({uid}) does not match the UID in record ({here})")
        finished = pod["status"].get("phase") in ("Succeeded", "Failed")
        if grace == 0 or finished or not pod["spec"].get("nodeName"):
            return self.pods.remove(key)
        if pod["metadata"].get("deletionTimestamp"):
            return pod
        metadata = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
        return self.pods.replace(key, {**pod, "metadata": metadata})

    def set_status(self, namespace: str, name: str, **status: Any) -> Object:
        """As a kubelet writes the status of its pod: `phase`, `reason`, `message`. Raises ApiError 404."""
        return self.pods.merge((namespace, name), {"status": status})

    def add_event(self, namespace: str, event: Mapped) -> Object:
        """An Event, under the name that it has or one that is made from `generateName`. Raises ApiError 409."""
        metadata = event["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{self.versions.newest:x}"
        return self.events.create((namespace, name), event)

    def kind(self, plural: str, api_version: str = "v1") -> Objects:
        """The objects of a kind by the words in its path. Raises ApiError 404."""
        kinds = {
            "pods": self.pods,
            "nodes": self.nodes,
            "resourcequotas": self.quotas,
            "events": self.events,
            "noderesourcetopologies": self.topologies,
        }
        kinds.update({each.plural: each for each in self.pod_groups.values() if each.api_version == api_version})
        if plural not in kinds:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return kinds[plural]
