"""`topoalign forget`: deletes the facts of a node that is gone for good, so that no registry shows it any more."""

import anyio
import click
import msgspec

from topoalign.cli import options, output
from topoalign.cli.link import CONNECT_SECONDS, connect_to_bus, locate_bus
from topoalign.client.stored_records import forget_node, has_published
from topoalign.core import wire
from topoalign.core.model.errors import (
    BadRequest,
    BusUnavailable,
    InvalidField,
    NobodyAnswers,
    NotFound,
    Unavailable,
    clean,
)
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import ExplainRequest


class NodeLives(BadRequest):
    """
    Raised for a node that is not gone: its allocator answers.

    Remedy: Stop the agent of the node first, or name another node.
    """

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"the allocator of node {clean(node)} answers", "stop the node's agent first, or name another node"
        )


class NodeMayLive(Unavailable):
    """
    Raised when a node may still run: its allocator was connected to NATS a moment ago.

    It does not answer: it may be stopped or slow.

    Remedy: Stop its agent, and try again after some minutes.
    """

    def __init__(self, node: NodeName, why: str) -> None:
        super().__init__(
            f"node {clean(node)} may still run, so nothing was deleted: {why}",
            "stop the node's agent if it still runs, and try again; NATS notices within minutes that a machine is gone",
        )


async def forget_gone(url: str, node: NodeName) -> None:
    """
    Delete the facts of a node, if no allocator of it is connected. Raises NodeLives, NodeMayLive if the request is not
    answered in time, and NotFound for a node that has published nothing.
    """
    async with connect_to_bus(url) as bus:
        question = msgspec.json.encode(ExplainRequest(node=node, target=""))
        try:
            await bus.ask(wire.admission_subject(node, "explain"), question, CONNECT_SECONDS)
        except NobodyAnswers:
            pass
        except BusUnavailable as error:
            raise NodeMayLive(node, error.finding) from error
        else:
            raise NodeLives(node)
        if not await has_published(bus, node):
            raise NotFound("node", node, "GET /v1/nodes of the registry lists the nodes that have announced themselves")
        await forget_node(bus, node)


@click.command()
@click.argument("node")
@options.NATS
@options.JSON
def forget(node: str, nats: str | None, as_json: bool) -> None:
    """
    Delete the facts of a node that is gone for good; registries stop showing it at their next check.

    The command is refused while the node's allocator is connected to NATS. It needs the permission to purge streams.

    \b
    Examples:
      topoalign forget gpu-7
    """
    if not node:  # such as an unset variable of a script: it does not mean this machine
        raise InvalidField("NODE", "it is empty", "give the name of the node that is gone")
    url, meant = locate_bus(nats, node)
    anyio.run(forget_gone, url, meant)
    if as_json:
        output.print_json({"forgotten": meant})
    else:
        output.print_line(f"{clean(meant)} is forgotten")
