"""
Finds device resources that a pod requests and no device plugin serves.

The kubelet ignores a resource that no device plugin has registered, and starts the container without the devices
(v1.36.3, devicemanager). A scheduler leaves the pod pending. Neither is useful, so `what-if` reports an error instead.

    limits of the pod          served here      the error names
    nvidia.com/gpus: 2         nvidia.com/gpu   nvidia.com/gpu, which was probably meant
    tencent.com/vcuda-core: 50 nvidia.com/gpu   the setting that offers GPUs in units
    example.com/fpga: 1        nvidia.com/gpu   what is served here

Resources of other device plugins count as served (`hardware.others`, `registered`). Koordinator's names count as served
only in containers whose devices are chosen together.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.resource_quantities import may_be_exclusive
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.shares import USUAL_AMOUNTS, USUAL_NAMES, amount_resources
from topoalign.core.deviceshare.demand import RESOURCES, is_joint
from topoalign.core.deviceshare.koordinator_names import FPGA, GPU_RESOURCES, RDMA
from topoalign.core.model.errors import BadRequest, clean, quoted
from topoalign.core.model.ids import CPU, GPU, NIC, ResourceName, is_native
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.profile import profile_of

MOST_SHOWN = 8
"""Maximum number of names in an error."""


class UnservedResource(BadRequest):
    """
    Raised for a pod that requests devices by names that no device plugin serves.

    `field` is the path of the first such name.

    Remedy: Correct the name, or offer the resource as the message says.
    """

    def __init__(self, pod: PodRequest, names: Collection[ResourceName], served: Collection[ResourceName]) -> None:
        """`names`: the names in the pod that no device plugin serves, at least one. `served`: all served names."""
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
    """How to make a node serve this name, or which name to use instead."""
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
    """The requested device names that no device plugin serves, sorted. `registered`: names that plugins registered."""
    served = {*served_by((hardware,)), *registered}
    return tuple(sorted(asked_names(demand) - served))


def asked_names(demand: PodDemand) -> set[ResourceName]:
    """The device names that containers request, without those whose devices are chosen together under another name."""
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
    """The resource names that at least one of these machines serves, including those of amounts of slots."""
    return {name for each in machines for name in (*each.devices, *amount_resources(each))}


def check_not_passed_over(demand: PodDemand) -> None:
    """
    Raises InvalidShare for the first of Koordinator's GPU resource names that a pod with Koordinator's annotations
    requests. No device plugin lists these names to the kubelet, so the container would start without a GPU. In mode
    `best`, they request GPUs.
    """
    for container in demand.containers if is_joint(demand.annotations) else ():
        for name in map(ResourceName, GPU_RESOURCES):
            if container.asked.get(name):
                raise InvalidShare(
                    f"{container.path}.resources.limits[{name}]: a kubelet passes this name over, and gives no GPU for it",
                    "ask for a part of a GPU in units (tencent.com/vcuda-core, tencent.com/vcuda-memory) or slots "
                    "(nvidia.com/gpu with nvidia.com/gpucores and nvidia.com/gpumem), and for whole ones as nvidia.com/gpu",
                )


# Names by which pods for other GPU schedulers request GPUs, with the settings that make a node serve them.
#
# Sources: the READMEs, examples and device documentation of HAMi 4707fb02, tkestack/gpu-manager 8cd842ed, koordinator
# a7a1b76b and volcano-vgpu-device-plugin 4fb76ba1.


SIMILAR = 0.81
"""The minimum similarity, as defined by `difflib`, of a name and the name that was probably meant."""
LONGEST = 100
"""Maximum number of characters of a name that are compared."""

VOLCANO = tuple(f"volcano.sh/vgpu-{each}" for each in ("number", "memory", "memory-percentage", "cores"))
OLD_KOORDINATOR = tuple(f"kubernetes.io/gpu{each}" for each in ("", "-core", "-memory", "-memory-ratio"))
"""Koordinator's former GPU resource names, from before it had its own domain."""

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
"""Resource -> how to make a node serve it, or how a pod requests the same."""


def _setting_for(name: ResourceName) -> str:
    if name.startswith("nvidia.com/mig-"):
        return "offer MIG instances (`flags.migStrategy: mixed`), and create instances of this profile"
    if name.endswith(".shared") and name.startswith("nvidia.com/"):
        return "share GPUs in time with `renameByDefault: true` (`sharing.timeSlicing` in the plugin configuration)"
    return SETTINGS.get(name, "")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant. None: no known name is similar."""
    from difflib import get_close_matches  # here, because it is rarely needed

    found = get_close_matches(name[:LONGEST].lower(), sorted({*known} - {name}), n=1, cutoff=SIMILAR)
    return found[0] if found else None


# Lists the requests of a pod that a decision does not cover.
#
# A decision covers devices of device plugins, exclusive CPUs, and memory on NUMA nodes. DRA drivers allocate the
# devices of resource claims. The kubelet's Topology Manager does not align them (kubelet v1.36.3). The kubelet gives
# exclusive CPUs to a container that requests whole CPUs only in a Guaranteed pod without pod-level resources. Otherwise
# the container runs in the shared pool.


def not_covered(demand: PodDemand) -> Iterator[str]:
    """One text for each request that is not covered."""
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
