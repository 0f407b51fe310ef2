"""
What kubectl shows of a cluster: a pod, and of all nodes what kube-scheduler's filters look at.

kubectl decides by its own configuration which cluster is asked and as whom. It has 15 s for an answer.
"""

import subprocess

import msgspec

from topoalign.core.demand.node_filters import NodeTraits, Taint
from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.model.ids import NodeName

SECONDS = 15.0
LARGEST_NODES = 256 << 20
"""Bytes of the answer about all nodes; 5,000 of them with their lists of images have some 100 MB."""


class KubectlFailed(Unavailable):
    """kubectl gives no answer that can be used."""

    code = "KubectlFailed"

    def __init__(self, finding: str) -> None:
        super().__init__(
            clean(finding, 300), "see that kubectl is installed and can read pods and nodes of the cluster"
        )


class Metadata(msgspec.Struct, frozen=True):
    """The fields of a node's `metadata` that the filters look at."""

    name: NodeName
    labels: dict[str, str] | None = None


class Spec(msgspec.Struct, frozen=True):
    """The fields of a node's `spec` that the filters look at."""

    taints: tuple[Taint, ...] | None = None
    unschedulable: bool | None = None


class Node(msgspec.Struct, frozen=True):
    """A v1 Node."""

    metadata: Metadata
    spec: Spec | None = None


class NodeList(msgspec.Struct, frozen=True):
    """The nodes of a cluster, as `kubectl get nodes --output=json` prints them."""

    items: list[Node]


def get(*arguments: str) -> bytes:
    """What `kubectl get` prints with these arguments. Raises KubectlFailed."""
    try:
        done = subprocess.run(["kubectl", "get", *arguments], capture_output=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise KubectlFailed("there is no kubectl here") from None
    except subprocess.TimeoutExpired:
        raise KubectlFailed(f"kubectl did not answer within {SECONDS:g} s") from None
    if done.returncode:
        lines = (
            done.stderr.decode(errors="replace").strip().splitlines()
        )  # the last one is the error, others are its log
        raise KubectlFailed(lines[-1] if lines else f"kubectl ended with {done.returncode}")
    return done.stdout


def read_nodes() -> dict[NodeName, NodeTraits]:
    """Name -> labels, taints and cordon of each node of the cluster. Raises KubectlFailed."""
    answer = get("nodes", "--output=json")
    if len(answer) > LARGEST_NODES:
        raise KubectlFailed(f"kubectl printed more than {LARGEST_NODES >> 20} MiB about the nodes")
    try:
        nodes = msgspec.json.decode(answer, type=NodeList).items
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KubectlFailed(f"kubectl printed no list of nodes: {error}") from error
    return {node.metadata.name: traits_of(node) for node in nodes}


def traits_of(node: Node) -> NodeTraits:
    """What the filters look at of a node."""
    metadata = node.metadata
    spec = node.spec or Spec()
    return NodeTraits(
        name=metadata.name,
        labels=metadata.labels or {},
        taints=spec.taints or (),
        unschedulable=bool(spec.unschedulable),
    )
