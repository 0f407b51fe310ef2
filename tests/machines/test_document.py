"""topoalign's own JSON is strict: what it does not know it refuses, by its path."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import BadRequest, InvalidField, InvalidMachine
from topoalign.machines import catalogue, document
from topoalign.machines.document import Machine

SMALL = {
    "kind": "topoalign.machine",
    "version": 1,
    "name": "lab-7",
    "topology": {
        "cpus": [{"id": 0, "core": 0, "socket": 0, "node": 0, "uncore": 0}],
        "nodes": [{"id": 0, "memory": 1024, "hugepages": {"hugepages-2Mi": 0}}],
        "gpus": [{"id": "GPU-0", "index": 0, "numa_affinity": [0]}],
    },
}


def changed(path: str, value: object) -> bytes:
    content = json.loads(json.dumps(SMALL))
    at = content
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        at = at[step]
    at[last] = value
    return json.dumps(content).encode()


def test_a_document_is_a_machine_and_a_machine_a_document() -> None:
    machine = Machine(name="lab-7", source="by hand", topology=catalogue.machine("dgx2"))

    assert machine == document.decode_machine(document.encode_machine(machine), "unused")


def test_a_topology_alone_gets_the_name_of_its_file() -> None:
    machine = document.decode_machine(json.dumps(SMALL["topology"]).encode(), "from-a-file")

    assert ("from-a-file", 1) == (machine.name, len(machine.topology.gpus))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("kind", "other", "kind"),
        ("version", 2, "version"),
        ("colour", "blue", "colour"),
        ("topology.gpu", [], "topology.gpu"),
        ("topology.gpus.0.indx", 0, "topology.gpus[0].indx"),
        ("topology.gpus.0.index", "0", "topology.gpus[0].index"),
        ("topology.gpus.0.numa_affinity", [1], "topology.gpus[0].numa_affinity"),
        ("topology.cpus.0.node", 3, "topology.cpus[0].node"),
        ("topology.nodes.0.hugepages", {"huge": 1}, "topology.nodes[0].hugepages"),
        ("topology", None, "topology"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(path: str, value: object, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        document.decode_machine(changed(path, value), "x")

    assert field == caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"1", b'{"kind": "topoalign.machine"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff"]
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidMachine):
        document.decode_machine(raw, "x")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "node", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
places = [
    "name",
    "topology",
    "topology.cpus",
    "topology.cpus.0.id",
    "topology.nodes",
    "topology.nodes.0.memory",
    "topology.gpus.0",
]


@given(st.sampled_from(places), values)
def test_no_value_breaks_the_reader(path: str, value: object) -> None:
    try:
        document.decode_machine(changed(path, value), "x")
    except BadRequest as error:
        assert str(error).isprintable()
