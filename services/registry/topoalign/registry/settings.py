"""The settings of the registry."""

from typing import Annotated, Literal

import msgspec

from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each."""

    registry_ask_seconds: float = 10.0
    """Seconds between two rounds in which every allocator is asked whether it is alive. A node whose allocator does not
    answer is shown as stale; ten seconds is well below the minutes after which a cluster gives up a node."""

    registry_answer_seconds: float = 2.0
    """Seconds that an allocator may take to answer this question."""

    registry_allocation_series: bool = True
    """Whether /metrics has `topoalign_gpu_allocation_info`: one series for each allocated GPU, with the names of its pod.
    `false` saves most of the page's size where no dashboard joins with these names."""

    scheduler_host: str = "127.0.0.1"
    """Address at which a kube-scheduler calls its extender. The default is the loopback address, for a scheduler next to
    the registry; elsewhere, set `scheduler_tls_dir`, too."""

    scheduler_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Port of the extender; 0 picks a free one. Default: no extender."""

    scheduler_tls_dir: str = ""
    """Directory with `tls.crt` and `tls.key`, and `client-ca.crt` where clients have to show a certificate. They are
    read again when they change. Default: HTTP without TLS."""

    scheduler_name: str = ""
    """Name of the scheduler that asks the extender: the webhook gives it to pods that ask for devices and name none, and
    denies those that name another one. Default: pods keep what they have, for an extender of `default-scheduler`."""

    scoring: Scoring = Scoring.QUALITY
    """How nodes are scored for a pod: `quality`: how fast a collective runs on the GPUs that it would get, and how well the
    node is packed; by what NUMA nodes have left, `least-allocated`, `most-allocated`, `balanced`, `least-numa-nodes`;
    `gaia`: in the order of gpu-admission; `hami`: in that of HAMi's scheduler."""

    scoring_packing: NodePacking = NodePacking.BINPACK
    """Which nodes `quality` puts first where devices are equally good: `binpack` those that are fuller, so that whole
    nodes stay free for pods that need them; `spread` those that are emptier."""

    kubernetes: str = "off"
    """The API server whose pods and nodes are watched, and where pods are bound: `in-cluster`, by the service account of the
    registry's pod; the path of a kubeconfig; or `off`. Needs the extra `kubernetes`, which the image has."""

    unknown_nodes: Literal["refuse", "pass"] = "refuse"
    """What the extender does with nodes of which nothing was ever published: `pass` lets pods go there without a check, for
    a cluster that begins with few nodes of topoalign. Default: they are refused (`UnknownNode`)."""

    delete_refused_pods: bool = False
    """Whether pods are deleted that a node refused and a controller owns, six a minute. Default: they stay, as Failed."""

    publish_topologies: bool = False
    """Whether the NodeResourceTopology of each node (topology.node.k8s.io/v1alpha2) is kept up to date in Kubernetes, for
    scheduler plugins that read it. The cluster must have that kind."""
