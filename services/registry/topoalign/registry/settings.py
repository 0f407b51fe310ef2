"""The settings of the registry."""

from typing import Annotated, Literal

import msgspec

from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The variable of each field is `TOPOALIGN_<FIELD>`."""

    registry_ask_seconds: float = 10.0
    """Seconds between two rounds in which every allocator is asked whether it is alive. A node whose allocator does not
    answer is shown as stale. Ten seconds is well below the minutes after which Kubernetes gives up a node."""

    registry_answer_seconds: float = 2.0
    """Seconds that an allocator may take to answer this request."""

    registry_allocation_series: bool = True
    """Whether /metrics has `topoalign_gpu_allocation_info`: one series for each allocated GPU, with the names of its
    pod. `false` makes the page much smaller. Use it if no dashboard joins with this metric."""

    scheduler_host: str = "127.0.0.1"
    """Address at which a kube-scheduler calls its extender. The default is the loopback address, for a scheduler on the
    same host. For another address, set `scheduler_tls_dir`, too."""

    scheduler_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Port of the extender; 0 picks a free one. Default: no extender."""

    scheduler_tls_dir: str = ""
    """Directory with `tls.crt` and `tls.key`, and with `client-ca.crt` if clients must present a certificate. Changed
    files are read again. Default: HTTP without TLS."""

    scheduler_name: str = ""
    """Name of the scheduler that calls the extender. The webhook sets it in pods that request devices and have no
    `schedulerName`, and denies pods with another `schedulerName`. Default: pods keep their scheduler, for an extender
    of `default-scheduler`."""

    scoring: Scoring = Scoring.QUALITY
    """How nodes are scored for a pod. `quality`: by the speed of a collective on the GPUs that the pod would get, and
    by the packing of the node; `least-allocated`, `most-allocated`, `balanced`, `least-numa-nodes`: by the free
    resources of the NUMA nodes; `gaia`: in the order of gpu-admission; `hami`: in the order of HAMi's scheduler."""

    scoring_packing: NodePacking = NodePacking.BINPACK
    """Which nodes `quality` prefers if their devices are equally good: `binpack`: fuller nodes, so that whole nodes
    stay free for pods that need them; `spread`: emptier nodes."""

    kubernetes: str = "off"
    """The API server at which pods and nodes are watched and pods are bound: `in-cluster` (by the service account of
    the registry's pod), the path of a kubeconfig, or `off`. Needs the extra `kubernetes`, which the image has."""

    unknown_nodes: Literal["refuse", "pass"] = "refuse"
    """How the extender treats nodes that never published a fact. `pass`: it passes them without a check, for a cluster
    in which few nodes run topoalign. Default: it refuses them (`UnknownNode`)."""

    delete_refused_pods: bool = False
    """Whether the registry deletes pods that a node refused and that a controller owns, at most six per minute.
    Default: they stay as Failed."""

    publish_topologies: bool = False
    """Whether the registry keeps the NodeResourceTopology of each node (topology.node.k8s.io/v1alpha2) up to date, for
    scheduler plugins that read it. The cluster must have this CRD."""
