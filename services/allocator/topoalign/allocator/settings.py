"""The settings of the allocator of one node."""

from pathlib import Path
from typing import Annotated

import msgspec

from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Compat, Mode, Placement, Policy, Scope

Wait = Annotated[float, msgspec.Meta(ge=0, le=3600)]
"""Seconds; the upper bound also refuses `nan` and `inf`."""
Period = Annotated[float, msgspec.Meta(ge=0.01, le=3600)]
"""Seconds between two repetitions."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the allocator, one environment variable `TOPOALIGN_<FIELD>` for each; the runner fills in `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host."""

    state_dir: Path = Path("/var/lib/topoalign")
    """Where the journal lives. On the node's own disk: it must survive this process, not the node."""

    take_over: bool = False
    """
    Whether a running allocator of this node is asked to hand over. Default: it keeps running, and this one ends, so that two
    started by mistake do not take the node from one another.
    """

    kubelet_dir: str = ""
    """The kubelet's device plugin directory. Set: the kubelet hands out the devices. Empty: requests come over the bus."""

    kubelet_config: str = ""
    """The kubelet's configuration file, for predictions. Default: `config.yaml` in the directory above `kubelet_dir`."""

    kubelet_version: str = ""
    """
    The kubelet's version, `v1.36.3`, published with its rules. No file or socket of a node shows it. Default: not known.
    """

    cdi_dir: Path = Path("/var/run/cdi")
    """Where the container runtime reads CDI specifications; used under the CDI strategies alone. It must be there."""

    pod_resources_dir: str = ""
    """Directory of the kubelet's PodResources socket. Default: `pod-resources` next to `kubelet_dir`."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits: a first run refuses no pod."""

    scope: Scope = Scope.CONTAINER
    """What is aligned as one."""

    mode: Mode = Mode.BEST
    """How admissions over the bus are decided; predictions for a node with a kubelet are made in mode `kubelet`."""

    placement: Placement = Placement.TOPOLOGY
    """Device policy: which GPUs, once the NUMA affinity is known."""

    compat: Compat = ""
    """
    Whose answers pods get. Empty: ours; `koordinator`: those of its scheduler, to its device annotations; `gaia`: those of
    gpu-manager (Gaia), to requests for units of GPUs; `hami`: those of its scheduler, to requests for slots of GPUs.
    """

    reserved_cpus: str = ""
    """CPUs kept for the system, as a list `0-3,8`."""

    hint_seconds: Wait = 0.25
    """How long the hinting service may take before the same providers are asked in process."""

    reconcile_seconds: Period = 5.0
    """Between two polls of the kubelet's PodResources, which answers at most 100 times a second for all who ask."""

    gone_seconds: Wait = 5.0
    """
    How long a container must be missing from PodResources before its allocation is released; more than one poll, because a
    kubelet that has just started lists fewer pods than run.
    """

    settle_seconds: Wait = 120.0
    """
    The same after a start of the kubelet, or while it lists no pod at all: until it has read its pods from the API server
    it lists fewer than run.
    """

    drain_seconds: Wait = 5.0
    """How long running calls may go on after SIGTERM: far below a pod's usual grace period of thirty seconds."""

    metrics_also: str = ""
    """
    Under whose names /metrics shows the use of GPUs as well, separated by commas: `gaia` (gpu-manager's), `hami` (those of
    its monitor). For dashboards that are there already. Default: under ours alone.
    """

    display: str = ""
    """
    Path of the socket on which gpu-manager's (Gaia's) display is served, which adds its pages to the process as well. For
    clients that are there already; gpu-manager's own is /var/run/gpu-manager.sock. Default: it is not served.
    """

    @property
    def metrics_names(self) -> frozenset[str]:
        """`metrics_also` as a set. Raises InvalidField for other names."""
        names = frozenset(name.strip() for name in self.metrics_also.split(",")) - {""}
        if unknown := names - {"gaia", "hami"}:
            raise InvalidField(
                "TOPOALIGN_METRICS_ALSO",
                f"names of {quoted(sorted(unknown))} are not known",
                "name gaia, hami, or both",
            )
        return names

    @property
    def rules(self) -> AdmissionRules:
        """
        The rules that the node decides by, from its own settings. Raises InvalidField for rules that contradict one
        another.
        """
        rules = AdmissionRules(
            policy=self.policy,
            scope=self.scope,
            mode=self.mode,
            placement=self.placement,
            compat=self.compat,
            reserved_cpus=self.reserved_cpus,
        )
        check_rules(rules)
        return rules

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's root directory, `/var/lib/kubelet` as a rule: the CPU and memory managers keep their state there."""
        return Path(self.kubelet_dir).parent

    @property
    def kubelet_configuration(self) -> Path:
        """The kubelet's configuration file: `kubelet_config`, else `config.yaml` in the kubelet's root directory."""
        return Path(self.kubelet_config) if self.kubelet_config else self.kubelet_root / "config.yaml"

    @property
    def pod_resources(self) -> Path:
        """The kubelet's PodResources socket: `kubelet.sock` in `pod_resources_dir` or in its default."""
        return Path(self.pod_resources_dir or self.kubelet_root / "pod-resources") / "kubelet.sock"
