"""`topoalign nrt`: NodeResourceTopology objects of the nodes, for scheduler plugins that read them."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from topoalign.cli import options, output
from topoalign.cli.whole_cluster import FROM_FILE, read_cluster_record
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.model.errors import NoFit, NotFound, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.node_resource_topology import NodeResourceTopology, node_resource_topology


@click.group()
def nrt() -> None:
    """
    Print NodeResourceTopology objects, which describe each NUMA node's resources to scheduler plugins.

    \b
    Examples:
      topoalign nrt export gpu-7
      topoalign nrt export --json | kubectl apply -f -
    """


@nrt.command()
@click.argument("node", required=False)
@options.NATS
@FROM_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML; of several nodes a List.")
def export(node: str | None, nats: str | None, from_file: Path | None, as_json: bool) -> None:
    """
    Print the NodeResourceTopology (topology.node.k8s.io/v1alpha2) of NODE, or of all nodes.

    Capacity, allocatable and available of each NUMA node are as the node's kubelet has them. If they are not known, the
    node is left out, with a note on stderr.

    \b
    Examples:
      topoalign nrt export gpu-7
      topoalign nrt export --json | kubectl apply -f -
    """
    known = Nodes(read_cluster_record(nats, from_file))
    objects = list(list_objects(known)) if node is None else [object_of(known, NodeName(node))]
    if as_json:
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        output.print_json(objects[0] if node is not None else listed)
        return
    from topoalign.kubelet.files.yaml_text import write_yaml  # imports PyYAML

    if objects:
        output.print_line("---\n".join(write_yaml(msgspec.to_builtins(each)) for each in objects).removesuffix("\n"))


def object_of(known: Nodes, name: NodeName) -> NodeResourceTopology:
    """The object of this node. Raises NotFound, and the errors of reading its state."""
    if name in known.unasked:
        raise known.unasked[name]
    found = next((each for each in known.asked if each.name == name), None)
    if found is None:
        raise NotFound("node", name, "give the name of a node that has announced itself")
    return node_resource_topology(found.state, found.kind.rules)


def list_objects(known: Nodes) -> Iterator[NodeResourceTopology]:
    """The objects of all known nodes, by name. Prints a note for each other node."""
    for name, error in known.unasked.items():
        output.note(f"{clean(name, 253)} is left out: {clean(error.finding, 300)}")
    for each in known.asked:
        try:
            yield node_resource_topology(each.state, each.kind.rules)
        except NoFit as error:
            output.note(f"{clean(each.name, 253)} is left out: {clean(error.finding, 300)}")
