"""
The accounts of a nats-server: who may publish, request and read which subjects.

Each node has its own account, and so do the registries, the readers, the administrator and the stores. Accounts share
only the subjects that one exports and another imports. Permissions in a shared account would not suffice. The server
publishes a reply on any reply subject that a request names, so a user that may send any request can publish on every
subject of its account (observed with nats-server 2.15). Between accounts, a reply goes only to the requesting account.

The text is a fragment of configuration: `include` it in the configuration of nats-server.
"""

import json
from collections.abc import Iterable, Iterator, Mapping

from topoalign.core import wire
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Stream
from topoalign.runtime.event_stores import NEWS

STORES = "TOPOALIGN"
ADMIN = "TOPOALIGN_ADMIN"
REGISTRY = "TOPOALIGN_REGISTRY"
READERS = "TOPOALIGN_READERS"
"""
The accounts of the stores, of the administrator, of the registries, and of read-only users. The account of the stores
imports nothing: nats-server needs a long time to check the imports of an account from which thousands of others import.
"""
P = wire.PREFIX
EVERY_NODE = NodeName("*")
"""Used instead of a node's name for one account that all nodes share. Each node can then publish as another node."""

FACTS = tuple(pattern for pattern, writer in wire.SUBJECTS.values() if writer != "registry")
"""The subjects that a node publishes on."""
NEWS_OF_NODE = (*(f"{kind}.{{node}}" for kind in wire.READINGS), "reservation.{node}")
"""The news of the stores that a node receives, about its own hardware and about reservations on it."""
OF_ADMIN = ("admission.{node}.*", "devices.{node}.*")
"""The requests to a node's services that only the node itself and the administrator may send."""
OF_REGISTRY = ("allocator.{node}.*", "discovery.{node}.*")
"""The requests that a registry may also send. None of them allocates or releases a device."""
OF_READERS = ("allocator.{node}.alive",)
READS = tuple(f"$JS.API.DIRECT.GET.{stream}" for stream in Stream)
"""The subjects for reading the stores. Requests on them create and change nothing on the server."""
PURGE = "$JS.API.STREAM.PURGE.*"
PURGED_AS = f"{P}.purge.*"
"""The subject for deleting messages, and its name in the administrator's account, which has its own streams."""


def format_accounts(nodes: Mapping[NodeName, str], registry: str, reader: str, admin: str, stores: str) -> str:
    """
    The block `accounts` of a nats-server's configuration. `nodes`: name -> public key of its user (`U…`), or only
    `EVERY_NODE` for one account that all nodes share. The other parameters are public keys, too.
    """
    reading = [
        *(format_import("service", STORES, each) for each in READS),
        format_import("stream", STORES, f"{NEWS}.>"),
    ]

    def of_nodes(patterns: Iterable[str]) -> list[str]:
        return [format_import("service", account_of(node), each) for node in nodes for each in subjects(patterns, node)]

    lines = ["accounts {"]
    stored = (*(pattern.format(node="*") for pattern in FACTS), "reservation.*", "deadletter.registry")
    exports = [
        *(format_service_export(f"{P}.{each}") for each in stored),
        *(format_service_export(each, stream=True) for each in READS),
        format_service_export(PURGE, [ADMIN]),
        f'{{ stream: "{NEWS}.>" }}',
    ]
    lines += format_account(STORES, stores, exports=exports, imports=[], jetstream=True)
    imports = [
        *reading,
        f'{{ service: {{ account: "{STORES}", subject: "{PURGE}" }}, to: "{PURGED_AS}" }}',
        format_import("service", REGISTRY, f"{P}.registry.*"),
        *of_nodes(OF_ADMIN + OF_REGISTRY),
    ]
    lines += format_account(ADMIN, admin, exports=[], imports=imports)
    imports = [
        *(format_import("service", STORES, f"{P}.{each}") for each in ("reservation.*", "deadletter.registry")),
        *reading,
        *of_nodes(OF_REGISTRY),
    ]
    exports = [format_service_export(f"{P}.registry.*", [ADMIN])]
    lines += format_account(REGISTRY, registry, exports=exports, imports=imports)
    lines += format_account(READERS, reader, exports=[], imports=[*reading, *of_nodes(OF_READERS)])
    for node, key in nodes.items():
        news = [f"{NEWS}.{pattern.format(node=token_of(node))}" for pattern in NEWS_OF_NODE]
        exports = [
            *(format_service_export(each, [ADMIN]) for each in subjects(OF_ADMIN, node)),
            *(format_service_export(each, [ADMIN, REGISTRY, READERS]) for each in subjects(OF_REGISTRY, node)),
        ]
        imports = [
            *(format_import("service", STORES, each) for each in (*subjects(FACTS, node), *READS)),
            *(format_import("stream", STORES, each) for each in news),
        ]
        lines += format_account(account_of(node), key, exports=exports, imports=imports)
    return "\n".join([*lines, "}", ""])


def account_of(node: NodeName) -> str:
    """The name of the account of a node."""
    return "TOPOALIGN_NODES" if node == EVERY_NODE else f"TOPOALIGN_NODE_{wire.encode_node_token(node)}"


def token_of(node: NodeName) -> str:
    """The token of the node in subjects; `*` for every node."""
    return "*" if node == EVERY_NODE else wire.encode_node_token(node)


def subjects(patterns: Iterable[str], node: NodeName) -> list[str]:
    """Fills the name of a node into these subjects."""
    return [f"{P}.{pattern.format(node=token_of(node))}" for pattern in patterns]


def format_account(
    name: str, key: str, *, exports: Iterable[str], imports: Iterable[str], jetstream: bool = False
) -> Iterator[str]:
    """Formats the lines of one account with one user."""
    yield f"  {json.dumps(name)}: {{"
    yield f"    users: [ {{ nkey: {key} }} ]"
    if jetstream:
        yield "    jetstream: enabled"
    for heading, entries in (("exports", exports), ("imports", imports)):
        yield f"    {heading}: ["
        yield from (f"      {entry}" for entry in entries)
        yield "    ]"
    yield "  }"


def format_service_export(subject: str, to: Iterable[str] = (), *, stream: bool = False) -> str:
    """The export of a subject whose requests this account answers. `to`: accounts that may import it; empty: all."""
    allowed = f", accounts: {json.dumps([*to])}" if to else ""
    return f"{{ service: {json.dumps(subject)}{', response_type: stream' if stream else ''}{allowed} }}"


def format_import(kind: str, account_name: str, subject: str) -> str:
    """Formats the import of a service or a stream of another account."""
    return f"{{ {kind}: {{ account: {json.dumps(account_name)}, subject: {json.dumps(subject)} }} }}"
