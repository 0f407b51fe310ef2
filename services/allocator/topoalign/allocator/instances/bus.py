"""What a node without a kubelet cannot give: instances are made when a kubelet calls Allocate."""

from collections.abc import Iterable

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import NoFit, quoted
from topoalign.core.model.holdings import base_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.instance_amounts import gpus_by_instances


class InstancesNeedKubelet(NoFit):
    """Raised for a request over the bus for slots that would become MIG instances."""

    code = "InstancesNeedKubelet"

    def __init__(self, gpus: Iterable[str]) -> None:
        super().__init__(
            f"slots of {quoted(sorted(gpus))} become MIG instances, which are made for a kubelet alone",
            "use migStrategy single or mixed on a node without a kubelet",
        )


def check_no_instances(hardware: Topology, allocations: Iterable[Allocation]) -> None:
    """Raises InstancesNeedKubelet for allocations with slots that become MIG instances."""
    by_instances = gpus_by_instances(hardware)
    if not by_instances:
        return
    gpus = {base_of(device) for each in allocations for device in each.device_ids} & by_instances.keys()
    if gpus:
        raise InstancesNeedKubelet(gpus)
