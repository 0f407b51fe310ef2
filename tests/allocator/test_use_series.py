"""/metrics of a node tells which container uses how much of which GPU, under the names that were asked for."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from use_support import (
    ALLOCATIONS,
    GIB,
    MEASURED,
    NODE,
    SHARED,
    TRAIN,
    UIDS,
    Node,
    held,
    in_pod,
    measurement,
    process,
    use,
)

from topoalign.allocator.metrics.use_families import Family, render_families
from topoalign.allocator.metrics.use_series import UseSeries
from topoalign.allocator.settings import AllocatorSettings
from topoalign.core.model.errors import DriverFault, InvalidField
from topoalign.core.model.events import UsageObserved
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.processes import LibraryCount, LibraryReading, LibraryUse

pytestmark = pytest.mark.anyio

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


async def scraped(series: UseSeries) -> Samples:
    page = b"".join([chunk async for chunk in series.write()]).decode()
    families = list(text_string_to_metric_families(page))
    assert len(families) == len({family.name for family in families})
    samples = [(family.name, sample) for family in families for sample in family.samples]
    found: Samples = {}
    for name, sample in samples:
        labels = frozenset(sample.labels.items())
        assert labels not in found.setdefault(name, {}), "a series twice"
        found[name][labels] = sample.value
    return found


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def of(container: str, pod: str, gpu: str, mig: str = "") -> frozenset[tuple[str, str]]:
    return labels(namespace="ml", pod=pod, container=container, gpu_uuid=gpu, mig_uuid=mig)


UNITS = held(1, *(f"GPU-0::c{n}" for n in range(20)), *(f"GPU-0::m{n}" for n in range(8)), of=TRAIN, uid=UIDS[0])
"""20 units of computing time, and memory of 2 GiB."""
TRAIN_0, TRAIN_MIG = of("main", "train", "GPU-0"), of("main", "train", "GPU-2", "MIG-1")
INFER_1 = of('a"b?', "infer", "GPU-1")


async def test_asked_used_and_left_are_told_for_each_container_and_gpu() -> None:
    """What is not known or not given by amount has no sample; an allocation without owner has none at all."""
    node = Node(*ALLOCATIONS)
    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, ()))

    name = "topoalign_container_gpu_"
    assert {TRAIN_0: 80 * GIB, TRAIN_MIG: 10 * GIB} == found[f"{name}memory_asked_bytes"]
    assert {TRAIN_0: 12 * GIB, TRAIN_MIG: 3 * GIB, INFER_1: 2 * GIB} == found[f"{name}memory_used_bytes"]
    assert {TRAIN_0: 68 * GIB, TRAIN_MIG: 7 * GIB} == found[f"{name}memory_left_bytes"]
    assert {TRAIN_0: 1.0, TRAIN_MIG: 1.0} == found[f"{name}time_asked_ratio"]
    assert {TRAIN_0: 0.6, INFER_1: 0.05} == found[f"{name}time_used_ratio"]
    assert f"{name}memory_exceeded" not in found
    assert {labels(): 1.0} == found["topoalign_gpu_use_measured"]


async def test_gpus_and_processes_that_hold_nothing_of_them_are_told() -> None:
    node = Node(*ALLOCATIONS)
    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, ()))

    gpu = labels(gpu_uuid="GPU-0", mig_uuid="")
    host = gpu | {("where", "host")}
    assert (80 * GIB, 14 * GIB) == tuple(
        found[f"topoalign_gpu_{name}bytes"][gpu] for name in ("memory_", "memory_used_")
    )
    assert ({host: 1.0}, {host: GIB}) == (
        found["topoalign_gpu_other_processes"],
        found["topoalign_gpu_other_memory_used_bytes"],
    )


async def test_under_the_names_of_gpu_manager_units_are_its_own() -> None:
    """Percent, MiB and cards; `total` is over all GPUs of a container, and unknown where one of them is."""
    node = Node(*ALLOCATIONS)
    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, {"gaia"}))

    train = {"pod_name": "train", "namespace": "ml", "node": NODE, "container_name": "main"}
    infer = {"pod_name": "infer", "namespace": "ml", "node": NODE, "container_name": 'a"b?'}
    assert {
        labels(**train, gpu="gpu0"): 60.0,
        labels(**infer, gpu="gpu1"): 5.0,
        labels(**infer, gpu="total"): 5.0,
    } == found["container_gpu_utilization"]
    assert (12 * 1024, 15 * 1024) == tuple(
        found["container_gpu_memory_total"][labels(**train, gpu_memory=gpu)] for gpu in ("gpu0", "total")
    )
    assert {labels(**train, req_of_gpu="total"): 2.0} == found["container_request_gpu_utilization"]
    assert {labels(**train, req_of_gpu_memory="total"): 90 * 1024} == found["container_request_gpu_memory"]
    assert not [name for name in found if name.startswith("hami")]


async def test_under_the_names_of_hamis_monitor_units_are_its_own() -> None:
    node = Node(*ALLOCATIONS)
    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, {"hami", "gaia"}))

    train = {"namespace": "ml", "pod": "train", "container": "main"}
    first = labels(**train, vdevice_index="0", device_uuid="GPU-0")
    second = labels(**train, vdevice_index="1", device_uuid="MIG-1")
    host = labels(node=NODE, device_index="0", device_uuid="GPU-0", device_type="NVIDIA-NVIDIA H100")
    assert (12 * GIB, 3 * GIB) == tuple(found["hami_vgpu_memory_used_bytes"][each] for each in (first, second))
    assert found["hami_vgpu_memory_used_bytes"] == found["hami_container_device_memory_bytes"]
    assert {first: 80 * GIB, second: 10 * GIB} == found["hami_vgpu_memory_limit_bytes"]
    assert 60.0 == found["hami_container_device_utilization_ratio"][first]
    assert (14 * GIB, {host: 61.0}) == (
        found["hami_host_gpu_memory_used_bytes"][host],
        found["hami_host_gpu_utilization_ratio"],
    )
    assert 3 == len(found["hami_host_gpu_memory_used_bytes"]), "an instance is no host's GPU"
    controller = labels(device_index="0", device_uuid="GPU-0", device_type="NVIDIA-NVIDIA H100")
    assert {controller: 17.0} == found["hami_host_gpu_memory_controller_utilization_ratio"]
    instance = {"mig_uuid": "MIG-1", "profile": "1g.10gb", "gpu_instance_id": "1", "compute_instance_id": "0"}
    assert {labels(**train, **instance, vdevice_index="1", device_uuid="GPU-2"): 1.0} == found["hami_mig_device_info"]
    assert "container_gpu_utilization" in found


async def test_what_the_library_counts_stands_beside_what_is_measured() -> None:
    """Of GPUs that the container holds; under HAMi's names what only the library's file tells."""
    node, now = Node(*ALLOCATIONS), int(MEASURED.time)
    count = LibraryCount(device=DeviceID("GPU-1"), memory=9 * GIB, context=GIB, buffers=7 * GIB, utilization=250)
    other = LibraryCount(device=DeviceID("GPU-0"), memory=GIB, last_kernel=now - 1, utilization=3)
    uses = (
        LibraryUse(allocation=AllocationID("a-2"), counts=(count, other)),
        LibraryUse(allocation=AllocationID("a-1"), counts=(other,)),
        LibraryUse(allocation=AllocationID("a-3"), failure="it is cut off"),
    )

    async def library() -> LibraryReading:
        return LibraryReading(node=NODE, containers=uses)

    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, {"hami"}, library))

    train = labels(namespace="ml", pod="train", container="main", vdevice_index="0", device_uuid="GPU-0")
    infer = labels(namespace="ml", pod="infer", container='a"b?', vdevice_index="0", device_uuid="GPU-1")
    assert {TRAIN_0: GIB, INFER_1: 9 * GIB} == found["topoalign_container_gpu_library_memory_bytes"]
    assert {TRAIN_0: 0.03, INFER_1: 2.5} == found["topoalign_container_gpu_library_time_ratio"]
    assert (12 * GIB, 2 * GIB) == tuple(
        found["topoalign_container_gpu_memory_used_bytes"][each] for each in (TRAIN_0, INFER_1)
    )
    assert ({infer: GIB}, {infer: 7 * GIB}) == tuple(
        found[f"hami_vgpu_memory_{name}_bytes"] for name in ("context", "buffer")
    )
    assert "hami_vgpu_memory_module_bytes" not in found
    assert {train: 1.0} == found["hami_container_last_kernel_elapsed_seconds"]


async def test_a_gpu_that_goes_while_files_are_read_fails_no_scrape() -> None:
    node = Node(*ALLOCATIONS)

    async def library() -> LibraryReading:
        known = node.ledger.state.topology
        assert known is not None
        left = msgspec.structs.replace(known.topology, gpus=known.topology.gpus[1:])
        node.ledger.take_reading(msgspec.structs.replace(known, revision=known.revision + 1, topology=left))
        return LibraryReading(node=NODE)

    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, {"gaia", "hami"}, library))

    assert {"GPU-1", "GPU-2"} == {dict(at)["device_uuid"] for at in found["hami_host_gpu_memory_used_bytes"]}


async def test_where_nothing_can_be_measured_the_page_says_so() -> None:
    """A node without NVML, or a discovery that is away, is no error of the page."""
    node = Node(*ALLOCATIONS)
    series = UseSeries(node.ledger, node.bus, {"gaia", "hami"})
    away = await scraped(series)
    node.fault = DriverFault("nothing runs on a machine that is described", "ask a node that has GPUs")
    async with node.answering():
        faulty = await scraped(series)

    assert away == faulty
    assert {labels(): 0.0} == away["topoalign_gpu_use_measured"]
    assert not [name for name in away if "_used_" in name or "_container_" in name]


async def test_what_is_given_of_gpus_is_told_without_measurement_as_it_changes() -> None:
    """GPU-0 is held until the second scrape."""
    node, gpu = Node(*ALLOCATIONS), labels(gpu_uuid="GPU-0", mig_uuid="")
    series = UseSeries(node.ledger, node.bus, {"hami"})
    before = await scraped(series)
    node.ledger.release((ALLOCATIONS[0].id,), "released")
    after = await scraped(series)

    assert (1, 0) == tuple(found["topoalign_gpu_containers"][gpu] for found in (before, after))
    host = labels(node=NODE, device_index="0", device_uuid="GPU-0", device_type="NVIDIA H100")
    assert (1, 0) == tuple(found["hami_gpu_shared_count"][host] for found in (before, after))


async def test_nothing_is_measured_until_somebody_scrapes() -> None:
    node = Node(*ALLOCATIONS)
    async with node.answering():
        series = UseSeries(node.ledger, node.bus, ())
        assert 0 == node.asked
        await scraped(series)

    assert 1 == node.asked


async def test_two_pods_of_one_name_have_one_series_with_their_sum() -> None:
    """One that was deleted is not released yet when its successor has a slice of the same GPU."""
    node = Node(*(held(n, f"GPU-1::{n}", of=TRAIN, uid=UIDS[n], resource=SHARED) for n in (0, 1)))
    node.measured = measurement(use("GPU-1", process(1, GIB, in_pod(UIDS[0])), process(2, 2 * GIB, in_pod(UIDS[1]))))
    async with node.answering():
        found = await scraped(UseSeries(node.ledger, node.bus, ()))

    assert {of("main", "train", "GPU-1"): 3 * GIB} == found["topoalign_container_gpu_memory_used_bytes"]


async def test_a_container_above_its_memory_is_told_and_logged_once() -> None:
    """It was given 20 units of computing time and 2 GiB, and uses 12."""
    node = Node(UNITS)
    series, name = UseSeries(node.ledger, node.bus, ()), "topoalign_container_gpu_memory_exceeded"
    async with node.answering():
        with capture_logs() as logs:
            for time in range(5):
                node.measured = msgspec.structs.replace(MEASURED, time=15.0 * time)
                found = await scraped(series)
                assert (time >= 2) == (name in found)

    assert {TRAIN_0: 1.0} == found[name]
    assert [("ml/train main", "GPU-0", 2 * GIB, 12 * GIB)] == [
        (each["container"], each["device"], each["given"], each["used"]) for each in logs
    ]


async def test_an_excess_is_announced_when_it_begins_and_when_it_has_ended() -> None:
    """And not with every measurement; a node whose kubelet has not been read says nothing yet."""
    node = Node(UNITS)
    series, said = UseSeries(node.ledger, node.bus, (), announces=True), []
    async with node.answering():
        for time in range(7):
            if time == 3:
                assert None is node.ledger.state.usage
                node.ledger.observe(containers=())
            used = (12 + time) * GIB if time < 6 else 2 * GIB
            node.measured = measurement(use("GPU-0", process(1, used, in_pod(UIDS[0]), 60)), time=15.0 * time)
            await scraped(series)
            said.append(node.ledger.state.usage)
    ended = said.pop()
    (excess,) = said[3].exceeding if said[3] is not None else ()

    assert said[3] is said[4] is said[5]
    assert (TRAIN, UIDS[0], ("a-1",), "GPU-0") == (excess.owner, excess.pod_uid, excess.allocations, excess.device)
    assert (2 * GIB, 14 * GIB) == (excess.given, excess.used)
    assert ended is not None and said[3] is not None
    assert ((), said[3].revision + 1) == (ended.exceeding, ended.revision)


async def test_an_excess_ends_with_the_container_although_nobody_scrapes() -> None:
    node = Node(UNITS)
    node.ledger.observe(containers=())
    series = UseSeries(node.ledger, node.bus, (), announces=True)
    async with node.answering():
        for time in range(3):
            node.measured = measurement(use("GPU-0", process(1, 12 * GIB, in_pod(UIDS[0]))), time=15.0 * time)
            await scraped(series)
    begun = node.ledger.state.usage
    node.ledger.release((UNITS.id,), "released")
    node.ledger.observe(containers=())
    ended = node.ledger.state.usage
    node.ledger.observe(containers=())

    assert begun is not None and ended is not None
    assert (1, 0, begun.revision + 1) == (len(begun.exceeding), len(ended.exceeding), ended.revision)
    assert ended is node.ledger.state.usage


def test_who_is_within_its_memory_costs_no_byte_of_the_event() -> None:
    """A reading without containers above their memory has no field for them."""
    usage = UsageObserved(node=NODE, epoch=1, revision=1, containers=())

    assert b"exceeding" not in msgspec.json.encode(usage)
    assert () == usage.exceeding


def test_a_family_without_samples_is_not_written() -> None:
    assert b"" == render_families([Family("a", "b", []), Family("c", "d", [({}, None)])])


@pytest.mark.parametrize(
    ("value", "names"),
    [("", set()), ("gaia", {"gaia"}), (" hami , gaia,", {"gaia", "hami"})],
    ids=["none", "one", "both"],
)
def test_names_are_a_list_separated_by_commas(value: str, names: set[str]) -> None:
    assert names == AllocatorSettings(node=NODE, metrics_also=value).metrics_names


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidField, match="prometheus") as refused:
        _ = AllocatorSettings(node=NODE, metrics_also="hami,prometheus").metrics_names

    assert ("TOPOALIGN_METRICS_ALSO", "name gaia, hami, or both") == (refused.value.field, refused.value.remedy)
