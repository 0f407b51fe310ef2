"""The settings of the allocator of one node."""

from pathlib import Path
from typing import Annotated

import msgspec

from topoalign.core.demand.pod_demand import check_rules
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Compat, Mode, Placement, Policy, Scope

Wait = Annotated[float, msgspec.Meta(ge=0, le=3600)]
"""Seconds; the upper bound also rejects `nan` and `inf`."""
Period = Annotated[float, msgspec.Meta(ge=0.01, le=3600)]
"""Seconds between two repetitions."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the allocator, each from the variable `TOPOALIGN_<FIELD>`; the runner sets `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host."""

    state_dir: Path = Path("/var/lib/topoalign")
    """Directory of the journal, on the node's disk: it must survive a process restart, but not the loss of the node."""

    take_over: bool = False
    """
    Whether to replace a running allocator of this node. Default: this process ends, so that two allocators that were
    started by mistake do not replace each other in turn.
    """

    kubelet_dir: str = ""
    """The kubelet's device plugin directory, if the kubelet allocates devices. Empty: requests come over the bus."""

    kubelet_config: str = ""
    """The kubelet's configuration file, for predictions. Default: `config.yaml` in the directory above `kubelet_dir`."""

    kubelet_version: str = ""
    """
    The kubelet's version, such as `v1.36.3`, published with its rules. No file or socket contains it. Default: unknown.
    """

    cdi_dir: Path = Path("/var/run/cdi")
    """Directory of the container runtime's CDI specifications; used only with the CDI strategies. It must exist."""

    pod_resources_dir: str = ""
    """Directory of the kubelet's PodResources socket. Default: `pod-resources` beside `kubelet_dir`."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits, so that a first run refuses no pod for its alignment."""

    scope: Scope = Scope.CONTAINER
    """What is aligned as one unit: each container, or the whole pod."""

    mode: Mode = Mode.BEST
    """How admissions over the bus are decided; predictions for a node with a kubelet are made in mode `kubelet`."""

    placement: Placement = Placement.TOPOLOGY
    """Device policy: how GPUs are chosen on the aligned NUMA nodes."""

    compat: Compat = ""
    """
    Whose rules decide. Empty: topoalign's own; `koordinator`: those of Koordinator's scheduler for its device
    annotations; `gaia`: those of gpu-manager (Gaia) for GPU units; `hami`: those of HAMi's scheduler for GPU slots.
    """

    reserved_cpus: str = ""
    """CPUs reserved for the system, as a list such as `0-3,8`."""

    hint_seconds: Wait = 0.25
    """Seconds that the hinting service may take to answer; after that the same providers run in this process."""

    reconcile_seconds: Period = 5.0
    """Seconds between two polls of PodResources. The kubelet answers at most 100 calls a second for all its clients."""

    gone_seconds: Wait = 5.0
    """
    Seconds for which a container must be missing from PodResources before its allocation is released. It must be
    missing in at least two polls, because a kubelet that has just started lists fewer pods than run.
    """

    settle_seconds: Wait = 120.0
    """
    The same time after a start of the kubelet, or while it lists no pod. Until the kubelet has read its pods from the
    API server, it lists fewer pods than run.
    """

    drain_seconds: Wait = 5.0
    """Seconds that running calls may take after SIGTERM: far less than a pod's default grace period of 30 s."""

    metrics_also: str = ""
    """
    Additional names under which /metrics shows the use of GPUs, separated by commas: `gaia` (those of gpu-manager),
    `hami` (those of HAMi's monitor and scheduler). For existing dashboards. Default: only topoalign's own names.
    """

    display: str = ""
    """
    Path of the socket on which the display of gpu-manager (Gaia) is served; the process then serves its HTTP pages,
    too. For existing clients. gpu-manager itself uses /var/run/gpu-manager.sock. Default: the display is not served.
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
        """The node's rules, from its own settings. Raises InvalidField for rules that contradict each other."""
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
        """The kubelet's root directory, usually `/var/lib/kubelet`. It has the state of the CPU and memory managers."""
        return Path(self.kubelet_dir).parent

    @property
    def kubelet_configuration(self) -> Path:
        """The kubelet's configuration file: `kubelet_config`, or `config.yaml` in the kubelet's root directory."""
        return Path(self.kubelet_config) if self.kubelet_config else self.kubelet_root / "config.yaml"

    @property
    def pod_resources(self) -> Path:
        """The kubelet's PodResources socket: `kubelet.sock` in `pod_resources_dir` or its default directory."""
        return Path(self.pod_resources_dir or self.kubelet_root / "pod-resources") / "kubelet.sock"
