"""The HTTP read API shows the fold, in pages, and answers nonsense with an error in JSON that names what is wrong."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from use_support import GIB, UIDS, in_pod, measurement, on_host, process, use
from view_support import HOSTILE, TIME, allocation, announce, gpu, tell, topology

from topoalign.core import wire
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import (
    Allocation,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    TopologyDiscovered,
)
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.model.processes import LibraryCount, LibraryReading, LibraryUse, Measurement
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.ports import Endpoint
from topoalign.registry.api import Api
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

RFC3339 = "2026-01-02T03:04:05.000Z"


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
async def http(cluster: Cluster, bus: MemoryBus) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(
        Starlette(routes=[Api(cluster, ManualClock(), bus, ForeignNodes(ManualClock())).mount()]),
        raise_app_exceptions=False,
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        yield client


async def get(http: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    response = await http.get(path)

    assert (status, "application/json") == (response.status_code, response.headers["content-type"])
    return response.json()


async def test_a_node_is_listed_with_its_devices_counted_by_use(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """A node is listed with its devices counted by what can be done with them."""
    announce(cluster, "node-1", allocation("a", "train", 0, 1))

    (node,) = (await get(http, "/v1/nodes"))["items"]

    assert {"total": 4, "free": 1, "allocated": 2, "unhealthy": 1} == node["resources"]["nvidia.com/gpu"]
    assert {"total": 1, "free": 0, "allocated": 0, "unhealthy": 1} == node["resources"][NIC], "health is unknown"
    assert {"total": 8, "exclusive": 4} == node["cpus"]
    assert ("node-1", "described: test", 7, "boot", 4, 1) == tuple(
        node[field] for field in ("name", "source", "revision", "boot_id", "gpus", "nics")
    )
    assert (5, 2, 1) == (node["epoch"], node["seq"], node["allocations"])
    assert cluster.member(NodeName("node-1")).state.digest == node["digest"]


async def test_a_node_is_stale_until_its_allocator_answers(cluster: Cluster, http: httpx.AsyncClient) -> None:
    announce(cluster, "node-1")
    before = (await get(http, "/v1/nodes"))["items"][0]["stale"]
    cluster.answers(NodeName("node-1"), True)
    after = (await get(http, "/v1/nodes"))["items"][0]["stale"]

    assert (True, False) == (before, after)


async def test_one_node_is_shown_with_topology_health_and_allocations(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    announce(cluster, "rack.1.node", allocation("a", "train", 0))

    node = await get(http, "/v1/nodes/rack.1.node")

    assert "rack.1.node" == node["summary"]["name"]
    assert [0, 1, 2, 3] == [gpu["index"] for gpu in node["topology"]["gpus"]]
    assert {"state": "unhealthy", "reason": "GPU is lost"} == node["health"]["GPU-0003"]
    assert {"state": "unknown", "reason": "not judged yet"} == node["health"]["mlx5_0"]
    assert ["a"] == [allocation["id"] for allocation in node["allocations"]]


async def test_a_device_is_shown_with_index_uuid_and_pci_address_together(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    announce(cluster, "node-1", allocation("a", "train", 2))

    (shown,) = (await get(http, "/v1/allocations"))["items"]

    assert [
        {
            "resource": "nvidia.com/gpu",
            "id": "GPU-0002",
            "index": 2,
            "pci": "0000:02:00.0",
            "short": "GPU2",
            "numa_affinity": [0],
        }
    ] == shown["devices"]
    assert {"namespace": "ml", "pod": "train", "container": "main"} == shown["owner"]
    assert {} == shown["virtual_functions"]
    assert ("0-3", [0], RFC3339, "node-1") == (shown["cpus"], shown["affinity"], shown["since"], shown["node"])


async def test_an_allocation_of_parts_is_shown_with_how_much_it_holds(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    """GPU 0 is in ten slots, of which one has an amount, and GPU 1 in units."""
    gib, ids = 1 << 30, [gpu(0), gpu(1)]
    offers = (
        Offer(resource=GPU, devices=(ids[0],), replicas=10, slots=Slots()),
        Offer(resource=ResourceName("x.io/cores"), devices=(ids[1],), replicas=100, unit="cores"),
        Offer(resource=ResourceName("x.io/memory"), devices=(ids[1],), replicas=320, unit="memory"),
    )
    described = topology()
    gpus = tuple(msgspec.structs.replace(each, memory=80 * gib) for each in described.gpus)
    described = msgspec.structs.replace(described, gpus=gpus, offers=offers)
    node, slots = NodeName("node-1"), [DeviceID(f"{ids[0]}::{number}") for number in range(2)]
    units = (*(f"{ids[1]}::c{number}" for number in range(20)), *(f"{ids[1]}::m{number}" for number in range(8)))
    held = (
        Allocation(id=AllocationID("a"), devices={GPU: (slots[0],)}, slots={slots[0]: Amount(30, 20 * gib)}),
        Allocation(id=AllocationID("b"), devices={GPU: (slots[1],)}),
        Allocation(id=AllocationID("c"), devices={ResourceName("x.io/cores"): tuple(DeviceID(unit) for unit in units)}),
        Allocation(id=AllocationID("d"), devices={NIC: (DeviceID("mlx5_0"),)}),
    )
    tell(
        cluster,
        TopologyDiscovered(
            node=node, epoch=1, revision=7, boot_id="boot", source="described: test", topology=described
        ),
    )
    tell(cluster, AllocationsSnapshot(node=node, epoch=5, seq=1, allocations=held, digest=""))

    items = (await get(http, "/v1/allocations"))["items"]

    assert [
        {ids[0]: {"cores": 30, "memory": 20 * gib}},
        {ids[0]: {"cores": 10, "memory": 8 * gib}},
        {ids[1]: {"cores": 20, "memory": 2 * gib}},
        None,
    ] == [each.get("amounts") for each in items]


async def test_allocations_are_found_by_node_namespace_and_pod(cluster: Cluster, http: httpx.AsyncClient) -> None:
    announce(cluster, "node-1", allocation("a", "train", 0), allocation("b", None, 1))
    announce(cluster, "node-2", allocation("c", "train", 0, namespace="web"))

    found = {
        query: [item["id"] for item in (await get(http, f"/v1/allocations{query}"))["items"]]
        for query in ("", "?node=node-1", "?namespace=ml", "?pod=train", "?pod=train&namespace=web", "?pod=other")
    }

    assert {
        "": ["a", "b", "c"],
        "?node=node-1": ["a", "b"],
        "?namespace=ml": ["a"],
        "?pod=train": ["a", "c"],
        "?pod=train&namespace=web": ["c"],
        "?pod=other": [],
    } == found


async def test_pages_hold_every_row_once_though_rows_come_and_go_between_them(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    announce(cluster, "node-1", *(allocation(f"a{i}", "p") for i in range(5)))
    first = await get(http, "/v1/allocations?limit=2")
    node = NodeName("node-1")
    tell(cluster, AllocationReleased(node=node, epoch=5, seq=7, allocation=AllocationID("a1"), reason="released"))
    tell(cluster, AllocationGranted(node=node, epoch=5, seq=8, allocation=allocation("a00", "p")))
    second = await get(http, f"/v1/allocations?limit=2&continue={first['continue']}")
    third = await get(http, f"/v1/allocations?limit=2&continue={second['continue']}")

    ids = [[item["id"] for item in page["items"]] for page in (first, second, third)]
    assert ([["a0", "a1"], ["a2", "a3"], ["a4"]], None) == (ids, third["continue"])


@pytest.mark.parametrize(
    ("path", "status", "code", "words"),
    [
        ("/v1/nodes?nod=a", 400, "InvalidField", "'nod'"),
        ("/v1/nodes/node-1?wide=1", 400, "InvalidField", "'wide'"),
        ("/v1/nodes?limit=0", 400, "InvalidField", "limit"),
        ("/v1/nodes?limit=-1", 400, "InvalidField", "limit"),
        ("/v1/nodes?limit=1e3", 400, "InvalidField", "limit"),
        ("/v1/nodes?limit=%D9%A3", 400, "InvalidField", "limit"),
        ("/v1/nodes?limit=1&limit=2", 400, "InvalidField", "limit"),
        ("/v1/allocations?continue=%00", 400, "InvalidField", "continue"),
        ("/v1/allocations?continue=WzFd", 400, "InvalidField", "continue"),
        ("/v1/allocations?continue=" + "W" * 4000, 400, "InvalidField", "continue"),
        ("/v1/allocations?node=missing", 404, "NotFound", "'missing'"),
        ("/v1/shares", 400, "InvalidField", "node"),
        ("/v1/shares?node=missing", 404, "NotFound", "'missing'"),
        ("/v1/shares?node=node-1&pod=train", 400, "InvalidField", "'pod'"),
        ("/v1/shares?node=node-1", 503, "BusUnavailable", ""),
        ("/v1/allocations?pod=" + "x" * 5000, 400, "InvalidField", "url"),
        ("/v1/nodes/missing", 404, "NotFound", "'missing'"),
        ("/v1/nodes/%1B%5B31m", 404, "NotFound", "'?[31m'"),
        ("/v1/nodes/" + "x" * 5000, 400, "InvalidField", "url"),
        ("/v1/other", 404, "NotFound", "/v1/other"),
        ("/v1/" + "y" * 9000, 404, "NotFound", "nothing at"),
    ],
)
async def test_nonsense_is_refused_with_what_is_wrong_and_what_to_do(
    cluster: Cluster, http: httpx.AsyncClient, path: str, status: int, code: str, words: str
) -> None:
    announce(cluster, "node-1")

    error = await get(http, path, status)

    assert {"code", "finding", "remedy"} == error.keys()
    assert code == error["code"]
    assert words in error["finding"]
    assert error["remedy"]
    assert len(error["finding"]) < 1001


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
async def test_other_methods_than_get_are_refused_in_json(http: httpx.AsyncClient, method: str) -> None:
    response = await http.request(method, "/v1/nodes")

    assert (405, "GET, HEAD") == (response.status_code, response.headers["allow"])
    assert "MethodNotAllowed" == response.json()["code"]


async def test_hostile_names_are_data_in_json(cluster: Cluster, http: httpx.AsyncClient) -> None:
    announce(cluster, "node-1", allocation("a", HOSTILE, 0))

    response = await http.get("/v1/allocations")

    assert HOSTILE == response.json()["items"][0]["owner"]["pod"]
    assert "nosniff" == response.headers["x-content-type-options"]
    assert b"\x1b" not in response.content


async def test_shares_of_a_node_are_asked_of_it_and_told_with_its_holders(
    cluster: Cluster, bus: MemoryBus, http: httpx.AsyncClient
) -> None:
    """One process is that of a holder, one runs on the host; a GPU is shown with index, uuid and PCI address together."""
    announce(cluster, "node-1", msgspec.structs.replace(allocation("a", "train", 2), pod_uid=UIDS[0]))
    node = NodeName("node-1")
    mine, other = process(1, 3 * GIB, in_pod(UIDS[0]), 80), process(2, GIB, on_host())
    measured = msgspec.structs.replace(measurement(use("GPU-0002", mine, other, used=5 * GIB)), node=node, time=TIME)

    async def answer(request: NodeRequest) -> Measurement:
        assert node == request.node
        return measured

    endpoint = Endpoint(
        name="use", subject=wire.discovery_subject(node, "use"), answer=answer_with(NodeRequest, answer)
    )
    async with bus.serve("topoalign-discovery", [endpoint]):
        shown = await get(http, "/v1/shares?node=node-1")

    row = shown["items"][2]
    assert ("node-1", RFC3339, True, "", 4) == (
        *(shown[name] for name in ("node", "measured", "stale", "finding")),
        len(shown["items"]),
    )
    assert ("GPU-0002", 2, 5 * GIB) == (row["device"], row["index"], row["memory_used"]) and row["pci"]
    (holder,), (foreign,) = row["holders"], row["others"]
    assert ({"namespace": "ml", "pod": "train", "container": "main"}, 3 * GIB, 80) == (
        holder["owner"],
        holder["use"]["memory"],
        holder["use"]["utilization"],
    )
    assert ("host", "/user.slice", 2, "Xorg") == (
        foreign["where"],
        foreign["cgroup"],
        foreign["use"]["processes"][0]["pid"],
        foreign["use"]["processes"][0]["identity"]["command"],
    )


async def test_what_libraries_count_is_asked_of_nodes_that_have_them(
    cluster: Cluster, bus: MemoryBus, http: httpx.AsyncClient
) -> None:
    """An allocator that does not answer costs this part alone."""
    node, slot = NodeName("node-1"), DeviceID("GPU-0002::1")
    announce(cluster, "node-1")
    discovered = cluster.member(node).state.topology
    assert discovered is not None
    offer = Offer(resource=GPU, devices=(gpu(2),), replicas=10, slots=Slots(), limiter="hami-core")
    hardware = msgspec.structs.replace(discovered.topology, offers=(offer,))
    tell(cluster, msgspec.structs.replace(discovered, revision=discovered.revision + 1, topology=hardware))
    held = msgspec.structs.replace(allocation("a", "train"), devices={GPU: (slot,)})
    tell(cluster, AllocationGranted(node=node, epoch=5, seq=2, allocation=held))

    async def answer(request: NodeRequest) -> Measurement:
        return msgspec.structs.replace(measurement(use("GPU-0002")), node=node)

    async def count(request: NodeRequest) -> LibraryReading:
        counts = (LibraryCount(device=gpu(2), memory=3 * GIB, utilization=40),)
        return LibraryReading(node=node, containers=(LibraryUse(allocation=AllocationID("a"), counts=counts),))

    measures = Endpoint(
        name="use", subject=wire.discovery_subject(node, "use"), answer=answer_with(NodeRequest, answer)
    )
    subject = wire.admission_subject(node, "library-use")
    counts = Endpoint(name="library-use", subject=subject, answer=answer_with(NodeRequest, count))
    async with bus.serve("topoalign-discovery", [measures]):
        silent = await get(http, "/v1/shares?node=node-1")
        async with bus.serve("topoalign-allocator", [counts]):
            shown = await get(http, "/v1/shares?node=node-1")

    assert (None, "") == (silent["items"][2]["holders"][0]["library"], shown["library_finding"])
    assert silent["library_finding"]
    library = shown["items"][2]["holders"][0]["library"]
    assert ("GPU-0002", 3 * GIB, 40) == tuple(library[name] for name in ("device", "memory", "utilization"))


async def test_a_node_that_cannot_measure_says_why(cluster: Cluster, bus: MemoryBus, http: httpx.AsyncClient) -> None:
    announce(cluster, "node-1")

    async def answer(request: NodeRequest) -> Measurement:
        raise DriverFault("NVML does not work", "run nvidia-smi on the node")

    endpoint = Endpoint(
        name="use", subject=wire.discovery_subject(NodeName("node-1"), "use"), answer=answer_with(NodeRequest, answer)
    )
    async with bus.serve("topoalign-discovery", [endpoint]):
        error = await get(http, "/v1/shares?node=node-1", 503)

    assert ("NVML does not work", "run nvidia-smi on the node") == (error["finding"], error["remedy"])
