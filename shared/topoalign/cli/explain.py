"""`topoalign explain` and `topoalign what-if`: how a decision came about, and how one would."""

from typing import Any

import click

from topoalign.cli import output, people
from topoalign.cli.allocate import decide, request_options
from topoalign.cli.link import Link, on_node
from topoalign.core.decisions import Explained
from topoalign.core.requests import ExplainRequest


@click.command(name="what-if")
@request_options
@on_node
def what_if(link: Link, **asked: Any) -> int | None:
    """
    What `allocate` would answer now, without effect. Works on nodes with a kubelet too.

    \b
    Examples:
      topoalign what-if --gpus 8 --policy single-numa-node
      topoalign what-if --gpus 4 --cpus 32 --memory 64Gi --json
    """
    return decide(link, "what-if", **asked)


@click.command()
@click.argument("target", metavar="ID|NS/POD")
@on_node
def explain(link: Link, target: str) -> None:
    """
    What an allocation or pod got, the hints of each provider, what the merge made of them, and the sets considered.

    \b
    Examples:
      topoalign explain ml/train
      topoalign explain ml/train --json
    """
    explained, topology = link.ask("explain", ExplainRequest(node=link.node, target=target), Explained)
    if link.as_json:
        output.document({"node": link.node, "explained": explained})
        return
    for allocation in explained.allocations:
        known = explained.decision is not None or bool(allocation.cpus or allocation.memory or allocation.affinity)
        people.show_allocation(allocation, topology, decided=known)
    if explained.decision is None:
        output.note("how this was decided is not known: the kubelet decided it, or the allocator has restarted since")
        return
    if not explained.allocations:
        output.say("nothing is held now; the latest decision was:")
        people.show_decision(explained.decision, topology)
    people.show_explanation(explained.decision.explanation, topology)
