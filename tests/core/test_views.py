"""Tables of a topology are made once, are kept apart from one another, and are not part of what the topology is."""

from collections.abc import Callable

import msgspec

from topoalign.core.deviceshare import node_inventory
from topoalign.core.model.ids import GPU
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.bandwidth import gpu_scores
from topoalign.core.placement.preference import set_scorer
from topoalign.machines import load_machine

TABLES = (node_inventory.locate_devices, gpu_scores, set_scorer)


def table_that_says(word: str) -> Callable[[Topology], str]:
    @computed_once
    def table(topology: Topology) -> str:
        return word

    return table


def test_two_tables_of_one_name_are_kept_apart() -> None:
    """In whatever order they are made."""
    one, other = table_that_says("one"), table_that_says("other")
    for first, second in ((one, other), (other, one)):
        topology = load_machine("dgx-a100").topology
        first(topology), second(topology)

        assert ("one", "other") == (one(topology), other(topology))


def test_a_table_is_made_once_for_each_topology() -> None:
    """Later calls return the same object; another topology gets a table of its own, though it is equal."""
    made: list[Topology] = []

    @computed_once
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
