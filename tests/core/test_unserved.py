"""Names by which a pod asks for devices that nobody serves: which they are, and what makes them work."""

import msgspec
import pytest
from decision_support import container, pod
from slot_support import in_slots
from unit_support import DGX, in_units

from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.unserved import (
    SETTINGS,
    VOLCANO,
    UnservedResource,
    nearest_name,
    remedy_for,
    served_by,
    unserved_names,
)
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.model import PluginDevice, Topology

KUBELET, BEST = AdmissionRules(mode=Mode.KUBELET), AdmissionRules(mode=Mode.BEST)
FPGA = ResourceName("example.com/fpga")
RDMA, HALF = ResourceName("koordinator.sh/rdma"), ResourceName("koordinator.sh/gpu")
JOINT = {"scheduling.koordinator.sh/device-joint-allocate": '{"deviceTypes": ["gpu", "rdma"]}'}


def names(
    asked: dict[ResourceName, int],
    hardware: Topology = DGX,
    rules: AdmissionRules = KUBELET,
    annotations: dict[str, str] | None = None,
    registered: tuple[ResourceName, ...] = (),
) -> tuple[str, ...]:
    request = msgspec.structs.replace(
        pod(container("main", others={str(name): amount for name, amount in asked.items()})),
        annotations=annotations or {},
    )
    return unserved_names(pod_demand(validate_pod(request), rules), hardware, registered)


def test_what_nobody_offers_is_unserved_unless_none_of_it_is_asked_for() -> None:
    typo = ResourceName("nvidia.com/gpus")

    assert (FPGA, typo) == names({typo: 2, FPGA: 1, GPU: 1, CPU: 1000, MEMORY: 1 << 30})
    assert () == names({typo: 0, GPU: 1, NIC: 1})


def test_what_another_plugin_has_is_served() -> None:
    """Whether it lists devices, or is known to the kubelet alone."""
    listed = msgspec.structs.replace(DGX, others=(PluginDevice(id=DeviceID("f"), resource=FPGA, nodes=(0,)),))

    assert () == names({FPGA: 1}, listed)
    assert () == names({FPGA: 1}, registered=(FPGA,))


@pytest.mark.parametrize(
    ("hardware", "asked"),
    [
        (in_slots(DGX), {GPU: 1, ResourceName("nvidia.com/gpumem"): 100}),
        (in_units(DGX), {ResourceName("tencent.com/vcuda-core"): 20, ResourceName("tencent.com/vcuda-memory"): 1}),
    ],
    ids=["slots", "units"],
)
def test_amounts_are_served_where_gpus_are_shared_so(hardware: Topology, asked: dict[ResourceName, int]) -> None:
    assert () == names(asked, hardware)
    assert tuple(sorted(asked.keys() - {GPU})) == names(asked)


def test_koordinators_names_are_served_where_they_have_an_effect() -> None:
    """In mode `best`, and for NICs that come with the GPUs of a pod with annotations."""
    assert () == names({HALF: 50, RDMA: 1}, rules=BEST)
    assert () == names({GPU: 1, RDMA: 1}, annotations=JOINT)
    assert (RDMA,) == names({GPU: 1, RDMA: 1})
    assert (RDMA,) == names({RDMA: 100}, annotations=JOINT)
    assert (HALF,) == names({HALF: 50})


def test_the_finding_names_the_field_and_all_names() -> None:
    request = pod(container("main", others={GPU: 1}), container("other", others={FPGA: 1, HALF: 50}))

    error = UnservedResource(request, [HALF, FPGA], served_by((DGX,)))

    assert error.finding.startswith(
        "spec.containers[1].resources.limits[example.com/fpga]: nobody serves 'example.com/fpga', 'koordinator.sh/gpu' here"
    )
    assert "served here are 'nvidia.com/gpu', 'topoalign.io/nic'" in error.remedy
    assert SETTINGS[HALF] in error.remedy


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("nvidia.com/gpus", "did you mean nvidia.com/gpu?"),
        ("nvidia.com/GPU", "did you mean nvidia.com/gpu?"),
        ("nvidia/gpu", "did you mean nvidia.com/gpu?"),
        ("topoalign.io/nics", "did you mean topoalign.io/nic?"),
        ("nvidia.com/gpu-memory", "did you mean nvidia.com/gpumem? For that, offer GPUs in slots (`sharing.slots`"),
        (
            "tencent.com/vcuda-cores",
            "did you mean tencent.com/vcuda-core? For that, offer GPUs in units (`sharing.units`",
        ),
        ("nvidia.com/gpumem-percentage", "offer GPUs in slots (`sharing.slots`"),
        ("tencent.com/vcuda-memory", "offer GPUs in units (`sharing.units`"),
        ("nvidia.com/mig-3g.20gb", "offer MIG instances (`flags.migStrategy: mixed`)"),
        ("nvidia.com/gpu.shared", "share GPUs in time with `renameByDefault: true`"),
        ("koordinator.sh/gpu", "ask for slots"),
        ("kubernetes.io/gpu-core", "ask for slots"),
        *((name, "give slots of GPUs Volcano's names") for name in VOLCANO),
        ("example.com/fpga", "served here are 'nvidia.com/gpu', 'topoalign.io/nic'"),
        ("amd.com/gpu", "served here are 'nvidia.com/gpu', 'topoalign.io/nic'"),
    ],
)
def test_the_remedy_names_what_makes_it_work(name: str, begin: str) -> None:
    assert remedy_for(ResourceName(name), served_by((DGX,))).startswith(begin)


def test_the_nearest_of_several_names_is_named() -> None:
    """Nearness does not depend on the order in which names come, and a name is not near itself."""
    known = ["nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"]

    assert (
        "nvidia.com/gpumem"
        == nearest_name("nvidia.com/gpu-mem", known)
        == nearest_name("nvidia.com/gpu-mem", known[::-1])
    )
    assert "nvidia.com/gpumem-percentage" == nearest_name("nvidia.com/gpumem-percent", known)
    assert None is nearest_name("nvidia.com/gpucores", ["nvidia.com/gpucores"])
    assert None is nearest_name("x" * 5000, known)
