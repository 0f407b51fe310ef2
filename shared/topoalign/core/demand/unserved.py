"""
Names of devices that a pod asks for and nobody serves: a kubelet passes over them, and the container starts without.

The rule of the kubelet (v1.36.3, devicemanager): a resource that no device plugin has registered is not looked at. A
scheduler does look at it, and leaves the pod pending. Neither is what the pod was written for, so `what-if` ends with this
finding instead of what else the pod would get.

    limits of the pod          served here      the finding names
    nvidia.com/gpus: 2         nvidia.com/gpu   nvidia.com/gpu, which was probably meant
    tencent.com/vcuda-core: 50 nvidia.com/gpu   the setting that offers GPUs in units
    example.com/fpga: 1        nvidia.com/gpu   what is served here

What another plugin registered is served (`hardware.others`, `registered`). Koordinator's names count as served where they
have an effect: in containers whose devices are decided together.
"""

from collections.abc import Collection, Iterable

from topoalign.core.demand.field_paths import containers_of
from topoalign.core.demand.other_names import SETTINGS, nearest_name, setting_for
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.shares import amount_resources
from topoalign.core.deviceshare.demand import RESOURCES
from topoalign.core.deviceshare.names import RDMA
from topoalign.core.model.errors import BadRequest, clean, quoted
from topoalign.core.model.ids import GPU, NIC, ResourceName, is_native
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology

MOST_SHOWN = 8
"""Names that a finding lists."""


class UnservedResource(BadRequest):
    """Raised for a pod that asks for devices by names that nobody serves; `field` is the path of the first one."""

    code = "UnservedResource"

    def __init__(self, pod: PodRequest, names: Collection[ResourceName], served: Collection[ResourceName]) -> None:
        """`names`: those of the pod that nobody serves, one at least; `served`: those that are served."""
        first = min(names)
        paths = (where for where, container in containers_of(pod) if container.limits.get(first))
        self.field = f"{next(paths, 'spec.containers[0]')}.resources.limits[{clean(first)}]"
        shown = quoted(sorted(names)[:MOST_SHOWN])
        super().__init__(
            f"{self.field}: nobody serves {shown} here; a kubelet passes over such a name, and the container starts without "
            "the device",
            "; ".join(dict.fromkeys(remedy_for(name, names, served) for name in sorted(names))),
        )


def remedy_for(name: ResourceName, names: Collection[ResourceName], served: Collection[ResourceName]) -> str:
    """What makes this name work, or which one to use instead; a setting that another of the `names` has is not repeated."""
    if setting := setting_for(name):
        return setting
    meant = nearest_name(name, {*served, GPU, NIC, *SETTINGS})
    if meant is None:
        listed = f"served here are {quoted(sorted(served)[:MOST_SHOWN])}" if served else "no devices are served here"
        return f"{listed}; remove {quoted([name])} from what is asked for if the node has it without a device plugin"
    if meant in served:
        return f"did you mean {meant}?"
    offered = setting_for(ResourceName(meant)) or "the plugin configuration offers nothing under that name"
    repeated = offered in map(setting_for, names)
    return f"did you mean {meant}?" if repeated else f"did you mean {meant}? For that, {offered}"


def unserved_names(
    demand: PodDemand, hardware: Topology, registered: Collection[ResourceName] = ()
) -> tuple[ResourceName, ...]:
    """
    The names by which the pod asks for devices that nobody serves on this machine, ascending. `registered`: what plugins
    registered at its kubelet.
    """
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
