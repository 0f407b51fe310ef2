"""Tables of a topology are made once, are kept apart from one another, and are not part of what the topology is."""

import msgspec

from topoalign.core.deviceshare import node_inventory
from topoalign.core.model.ids import GPU
from topoalign.core.model.topology import queries
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.views import made_once
from topoalign.core.placement.gpus.scores import gpu_scores
from topoalign.core.placement.preference import set_scorer
from topoalign.machines import load_machine

TABLES = (queries.places_of, node_inventory.places_of, gpu_scores, set_scorer)


def test_two_tables_of_one_name_are_kept_apart() -> None:
    """A node agent works out both tables of places from one topology, in either order."""
    for first, second in (TABLES[:2], TABLES[1::-1]):
        topology = load_machine("dgx-a100").topology
        first(topology), second(topology)

        assert {*topology.devices} == {*queries.places_of(topology)}
        assert {*topology.gpu_by_id, *topology.nic_by_id} == {*node_inventory.places_of(topology)}


def test_a_table_is_made_once_for_each_topology() -> None:
    """Later calls return the same object; another topology gets a table of its own, though it is equal."""
    made: list[Topology] = []

    @made_once
    def gpu_count(topology: Topology) -> list[int]:
        made.append(topology)
        return [len(topology.gpus)]

    one, other = load_machine("dgx-a100").topology, Topology()
    counts = [gpu_count(one), gpu_count(one), gpu_count(other), gpu_count(msgspec.structs.replace(other))]

    assert [[8], [8], [0], [0]] == counts
    assert counts[0] is counts[1]
    assert 3 == len(made)


def test_tables_are_not_part_of_the_topology() -> None:
    """A topology with tables is equal to one without, and is on the wire as that one."""
    plain, used = load_machine("dgx-a100").topology, load_machine("dgx-a100").topology
    for table in TABLES:
        table(used)
    encoded = msgspec.json.encode(used)

    assert plain == used
    assert msgspec.json.encode(plain) == encoded
    assert GPU in msgspec.json.decode(encoded, type=Topology).devices
