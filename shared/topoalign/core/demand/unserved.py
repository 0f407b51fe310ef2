"""
Finds device resources of a pod that no plugin serves: a kubelet ignores them and starts the container without the
devices.

A kubelet ignores a resource that no device plugin has registered (v1.36.3, devicemanager). A scheduler leaves the pod
pending. The user wants neither, so `what-if` reports this finding instead of a decision.

    limits of the pod          served here      the finding names
    nvidia.com/gpus: 2         nvidia.com/gpu   nvidia.com/gpu, which was probably meant
    tencent.com/vcuda-core: 50 nvidia.com/gpu   the setting that offers GPUs in units
    example.com/fpga: 1        nvidia.com/gpu   what is served here

Resources of other plugins are served (`hardware.others`, `registered`). Koordinator's names count as served only in
containers whose devices are decided together.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.resource_quantities import may_be_exclusive
from topoalign.core.demand.shares import USUAL_AMOUNTS, USUAL_NAMES, amount_resources
from topoalign.core.deviceshare.demand import RESOURCES, is_joint
from topoalign.core.deviceshare.koordinator_names import FPGA, GPU_RESOURCES, RDMA
from topoalign.core.model.errors import BadRequest, NoFit, clean, quoted
from topoalign.core.model.ids import CPU, GPU, NIC, ResourceName, is_native
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.profile import profile_of

MOST_SHOWN = 8
"""Names that a finding lists."""


class UnservedResource(BadRequest):
    """
    Raised for a pod that asks for devices by names that nobody serves.

    `field` is the path of the first one.

    Remedy: Correct the name, or offer the resource as the message says.
    """

    def __init__(self, pod: PodRequest, names: Collection[ResourceName], served: Collection[ResourceName]) -> None:
        """`names`: those of the pod that nobody serves, one at least; `served`: those that are served."""
        first = min(names)
        paths = (where for where, container in containers_with_paths(pod) if container.limits.get(first))
        self.field = f"{next(paths, 'spec.containers[0]')}.resources.limits[{clean(first)}]"
        shown = quoted(sorted(names)[:MOST_SHOWN])
        super().__init__(
            f"{self.field}: nobody serves {shown} here; a kubelet passes over such a name, and the container starts without "
            "the device",
            "; ".join(dict.fromkeys(remedy_for(name, served) for name in sorted(names))),
        )


def remedy_for(name: ResourceName, served: Collection[ResourceName]) -> str:
    """What makes this name work, or which one to use instead."""
    if setting := _setting_for(name):
        return setting
    meant = nearest_name(name, {*served, GPU, NIC, *SETTINGS})
    if meant is None:
        listed = f"served here are {quoted(sorted(served)[:MOST_SHOWN])}" if served else "no devices are served here"
        return f"{listed}; remove {quoted([name])} from what is asked for if the node has it without a device plugin"
    if meant in served:
        return f"did you mean {meant}?"
    offered = _setting_for(ResourceName(meant)) or "the plugin configuration offers nothing under that name"
    return f"did you mean {meant}? For that, {offered}"


def unserved_names(
    demand: PodDemand, hardware: Topology, registered: Collection[ResourceName] = ()
) -> tuple[ResourceName, ...]:
    """The names of devices that nobody serves on this machine, ascending. `registered`: what plugins registered."""
    served = {*served_by((hardware,)), *registered}
    return tuple(sorted(asked_names(demand) - served))


def asked_names(demand: PodDemand) -> set[ResourceName]:
    """The names of devices of which containers ask for any, without those that are decided together under another name."""
    found: set[ResourceName] = set()
    for container in demand.containers:
        together = set(RESOURCES if container.together else ())
        if container.joint is not None and container.devices.get(GPU):
            together.add(ResourceName(RDMA))
        found.update(
            name for name, amount in container.asked.items() if amount and not is_native(name) and name not in together
        )
    return found


def served_by(machines: Iterable[Topology]) -> set[ResourceName]:
    """The names under which some of these machines serve devices, amounts of slots included."""
    return {name for each in machines for name in (*each.devices, *amount_resources(each))}


class PassedOverByKubelet(NoFit):
    """
    Raised for a pod that asks for GPUs by a name that a kubelet ignores.

    `field` is its path in the manifest.

    Remedy: Ask for units, for slots, or for `nvidia.com/gpu`.
    """

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(
            f"{field}: a kubelet passes this name over, and gives no GPU for it",
            "ask for a part of a GPU in units (tencent.com/vcuda-core, tencent.com/vcuda-memory) or slots (nvidia.com/gpu "
            "with nvidia.com/gpucores and nvidia.com/gpumem), and for whole ones as nvidia.com/gpu",
        )


def check_not_passed_over(demand: PodDemand) -> None:
    """
    Raises PassedOverByKubelet for the first of Koordinator's names for GPUs by which a pod with its annotations asks.
    Nobody lists `koordinator.sh/gpu` to a kubelet, so the container would start without a GPU; in mode `best` these names
    ask for GPUs.
    """
    for container in demand.containers if is_joint(demand.annotations) else ():
        for name in map(ResourceName, GPU_RESOURCES):
            if container.asked.get(name):
                raise PassedOverByKubelet(f"{container.path}.resources.limits[{name}]")


# Names by which pods written for other GPU schedulers ask for GPUs, with the setting by which a node serves them.
#
# Sources: HAMi 4707fb02, tkestack/gpu-manager 8cd842ed, koordinator a7a1b76b and volcano-vgpu-device-plugin 4fb76ba1,
# their READMEs, examples and device documents.


SIMILAR = 0.81
"""The least similarity of a name and the one that it was probably meant for, as of `difflib`."""
LONGEST = 100
"""Characters of a name that are compared."""

VOLCANO = tuple(f"volcano.sh/vgpu-{each}" for each in ("number", "memory", "memory-percentage", "cores"))
OLD_KOORDINATOR = tuple(f"kubernetes.io/gpu{each}" for each in ("", "-core", "-memory", "-memory-ratio"))
"""Koordinator's names for GPUs before it had a domain of its own."""

IN_SLOTS = "offer GPUs in slots (`sharing.slots` in the plugin configuration)"
IN_UNITS = "offer GPUs in units (`sharing.units` in the plugin configuration)"
AS_VOLCANO = "give slots of GPUs Volcano's names (`resources.gpus` and `sharing.slots` in the plugin configuration)"
NOT_BY_KUBELET = (
    "ask for slots (nvidia.com/gpu with nvidia.com/gpucores and nvidia.com/gpumem-percentage), for units "
    "(tencent.com/vcuda-core, tencent.com/vcuda-memory), or for whole GPUs (nvidia.com/gpu); or give slots Koordinator's "
    "names in the plugin configuration"
)
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(USUAL_AMOUNTS, IN_SLOTS),
    **dict.fromkeys(USUAL_NAMES, IN_UNITS),
    **dict.fromkeys(VOLCANO, AS_VOLCANO),
    **dict.fromkeys((*GPU_RESOURCES, *OLD_KOORDINATOR), NOT_BY_KUBELET),
    RDMA: f"ask for {NIC}, or in a pod that asks for {GPU} use it with the annotation device-joint-allocate",
    FPGA: "topoalign gives out no FPGAs: leave it out",
}
"""Resource -> how a node comes to serve it, or how a pod asks for the same."""


def _setting_for(name: ResourceName) -> str:
    if name.startswith("nvidia.com/mig-"):
        return "offer MIG instances (`flags.migStrategy: mixed`), and create instances of this profile"
    if name.endswith(".shared") and name.startswith("nvidia.com/"):
        return "share GPUs in time with `renameByDefault: true` (`sharing.timeSlicing` in the plugin configuration)"
    return SETTINGS.get(name, "")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one was probably meant for; None: there is none."""
    from difflib import get_close_matches  # here, because seldom anything is misspelt

    found = get_close_matches(name[:LONGEST].lower(), sorted({*known} - {name}), n=1, cutoff=SIMILAR)
    return found[0] if found else None


# Lists what a pod asks for that a decision does not cover.
#
# A decision is about devices of plugins, exclusive CPUs, and memory on NUMA nodes. Devices of resource claims are given
# by their drivers (dynamic resource allocation); the kubelet's Topology Manager does not align them (kubelet v1.36.3).
# A container that asks for whole CPUs gets exclusive ones from a kubelet only in a Guaranteed pod without pod-level
# resources. Otherwise it runs in the shared pool.


def not_covered(demand: PodDemand) -> Iterator[str]:
    """One sentence for each thing."""
    pod = demand.request
    rules = demand.rules
    if pod.claims:
        yield (
            f"the devices of resource claims {quoted(pod.claims)}: their DRA driver gives them, and the kubelet does not "
            "align them with the rest"
        )
    if rules.cpu_manager == "static" and not may_be_exclusive(pod, profile_of(rules.mode)):
        cpus_of = {
            each.name: each.requests.get(CPU, 0)
            for each in (*pod.init_containers, *pod.containers)
            if each.limits.get(CPU) == each.requests.get(CPU, 0)
        }
        wanting = [name for name, cpus in cpus_of.items() if cpus > 0 and cpus % 1000 == 0]
        if pod.has_pod_level_resources:
            why = "with spec.resources they run in the shared pool; to get them, leave that out and"
        else:
            why = f"the pod is {pod.qos.value}, so they run in the shared pool; to get them,"
        if wanting:
            remedy = "give each container equal requests and limits of cpu and memory"
            yield f"exclusive CPUs for {quoted(wanting)}: {why} {remedy}"
