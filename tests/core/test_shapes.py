"""Equal machines share a shape, and a topology that is made of it answers every query as before."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology import shapes
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import PluginDevice, Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.model.topology.shapes import Shapes, device_positions, rename_devices
from topoalign.core.placement.gpus.bandwidth import gpu_scores
from topoalign.machines import load_machine
from topoalign.machines.catalogue import names

QUERIES = (
    "devices",
    "offered",
    "offers_of",
    "offers_by_base",
    "parents",
    "cpus_by_node",
    "node_ids",
    "gpu_by_id",
    "nic_by_id",
    "link_by_pair",
)

machines = st.sampled_from(names()).map(lambda name: load_machine(name).topology)
seeds = st.integers(0, 2**64 - 1)


def divided(topology: Topology) -> Topology:
    """The same machine with two MIG instances on each GPU, which are offered, and shared, instead of the GPUs."""
    gpus = tuple(
        msgspec.structs.replace(
            gpu,
            mig=tuple(
                MigDevice(
                    uuid=DeviceID(f"MIG-{gpu.index}-{number}"),
                    profile="3g.20gb",
                    gpu_instance=number,
                    compute_instance=0,
                    memory=20,
                )
                for number in range(2)
            ),
        )
        for gpu in topology.gpus
    )
    parts = tuple(instance.uuid for gpu in gpus for instance in gpu.mig or ())
    return msgspec.structs.replace(topology, gpus=gpus, offers=(Offer(resource=GPU, devices=parts, replicas=2),))


def machine(topology: Topology, seed: int) -> Topology:
    """The topology under uuids of this seed, decoded anew: it shares nothing with another one."""
    own = {uuid: DeviceID(f"GPU-{seed:016x}-{number}") for number, (_, uuid) in enumerate(device_positions(topology))}
    return msgspec.json.decode(msgspec.json.encode(rename_devices(topology, own)), type=Topology)


@given(machines, st.booleans(), st.lists(seeds, min_size=2, max_size=4, unique=True))
def test_shape_and_uuids_give_back_exactly_the_topology(bare: Topology, mig: bool, own: list[int]) -> None:
    """Equal machines have one shape object; every query is answered as of the topology that was interned."""
    table = Shapes()
    before = [machine(divided(bare) if mig else bare, seed) for seed in own]
    after = [table.interned(topology) for topology in before]

    assert before == after
    assert 1 == len({id(topology.shape) for topology in after})
    for had, got in zip(before, after, strict=True):
        back = dict(device_positions(got))
        assert had == rename_devices(got.shape, back)
        assert msgspec.json.encode(had) == msgspec.json.encode(got)
        for query in QUERIES:
            assert getattr(had, query) == getattr(got, query)
        for field in vars(CpuTopology(())):
            assert getattr(had.cpu_topology, field) == getattr(got.cpu_topology, field)
        assert gpu_scores(had) == gpu_scores(got)
        ids = list(had.gpu_by_id)
        assert [connection_score(had, a, b) for a in ids for b in ids] == [
            connection_score(got, a, b) for a in ids for b in ids
        ]


@pytest.mark.parametrize("name", ["dgx-a100", "gb200-tray", "cpu-only"])
def test_parts_without_a_uuid_are_there_once(name: str) -> None:
    table = Shapes()
    one, other = (table.interned(machine(load_machine(name).topology, seed)) for seed in (1, 2))

    for field in ("cpus", "nodes", "bridges", "nics"):
        assert getattr(one, field) is getattr(other, field)
    assert one.cpu_topology is other.cpu_topology
    assert one.cpus_by_node is other.cpus_by_node
    if one.gpus:
        assert {*dict(device_positions(one)).values()}.isdisjoint(dict(device_positions(other)).values())


def test_machines_that_differ_in_a_part_share_the_others() -> None:
    """Some bytes of memory make another shape, whose CPUs are the same objects."""
    table, topology = Shapes(), load_machine("dgx-a100").topology
    nodes = (msgspec.structs.replace(topology.nodes[0], memory=1), *topology.nodes[1:])
    one = table.interned(machine(topology, 1))
    other = table.interned(machine(msgspec.structs.replace(topology, nodes=nodes), 2))

    assert one.shape is not other.shape
    assert one.cpus is other.cpus
    assert 1 == other.nodes[0].memory


def test_a_topology_in_which_a_uuid_stands_for_two_things_is_left_alone() -> None:
    """A NIC that is called as the position of a GPU would be taken for the GPU."""
    topology = load_machine("dgx-a100").topology
    nic = msgspec.structs.replace(topology.nics[0], id=DeviceID("gpu/0"))
    first = next(link for link in topology.links if topology.nics[0].id in (link.a, link.b))
    odd = msgspec.structs.replace(
        topology, nics=(nic, *topology.nics[1:]), links=(msgspec.structs.replace(first, b=DeviceID("gpu/0")),)
    )

    assert odd is Shapes().interned(odd)
    assert odd is odd.shape


def test_a_changed_copy_has_no_shape_of_its_former_self() -> None:
    topology = Shapes().interned(load_machine("dgx-a100").topology)
    fewer = msgspec.structs.replace(topology, nics=())

    assert topology.shape is not topology
    assert fewer.shape is fewer
    assert {} == fewer.nic_by_id


def test_a_table_of_many_parts_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was interned before stays as it is; equal machines later have an equal shape."""
    monkeypatch.setattr(shapes, "MOST_PARTS", 3)
    table, topology = Shapes(), load_machine("dgx-a100").topology
    one, other = table.interned(machine(topology, 1)), table.interned(machine(topology, 2))

    assert one.shape == other.shape
    assert one.shape is not other.shape
    assert machine(topology, 1) == one


def test_a_copy_without_tables_has_the_shape_and_nothing_computed() -> None:
    topology = Shapes().interned(load_machine("dgx-a100").topology)
    devices = topology.devices
    same = topology.without_tables()

    assert "devices" not in vars(same)
    assert topology == same
    assert devices == same.devices
    assert topology.shape is same.shape
    assert topology.shape.without_tables().shape is not topology.shape


def test_a_table_of_large_parts_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node that announces ever other hardware does not fill the memory."""
    monkeypatch.setattr(shapes, "MOST_BYTES", 1000)
    table, topology = Shapes(), load_machine("dgx-a100").topology
    one, other = table.interned(machine(topology, 1)), table.interned(machine(topology, 2))

    assert one.shape == other.shape
    assert one.shape is not other.shape


def test_devices_of_other_plugins_are_not_remembered() -> None:
    """A node's own lists of them come and go with its announcements."""
    table, bare = Shapes(), load_machine("dgx-a100").topology
    kept = table.interned(machine(bare, 1))
    others = (PluginDevice(id=DeviceID("d"), resource=ResourceName("x/y"), nodes=(0,)),)
    one, other = (table.interned(msgspec.structs.replace(machine(bare, 1), others=others)) for _ in range(2))

    assert (others, kept.cpus) == (one.others, one.cpus)
    assert one.cpus is kept.cpus
    assert one.shape is not other.shape
