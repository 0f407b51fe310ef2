"""
The accounts of a nats-server: who may publish, request and read what.

Each node, the registries, the readers and the administrator have an account of their own, as have the stores.
Accounts share no subject but those that one exports and another imports. Permissions of users in one account are not
enough: the server publishes an answer on whatever reply subject a request names, so who may send any request may publish
on every subject of its account (seen with nats-server 2.15). Across accounts an answer goes only to the account of its
request.

The text is a part of a configuration: `include` it in the configuration of nats-server.
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
Accounts: of the stores, of the administrator, of the registries, of those who only read. That of the stores imports nothing
but purges: nats-server takes long to check imports of an account from which thousands of others import.
"""
P = wire.PREFIX
EVERY_NODE = NodeName("*")
"""Instead of the name of a node: one account that all nodes share. Each of them can then publish for the others."""

FACTS = tuple(pattern for pattern, writer in wire.SUBJECTS.values() if writer != "registry")
"""The subjects that a node publishes on."""
NEWS_OF_NODE = (*(f"{kind}.{{node}}" for kind in wire.READINGS), "reservation.{node}")
"""The news of the stores that a node receives: about its own hardware, and about reservations on it."""
OF_ADMIN = ("admission.{node}.*", "devices.{node}.*")
"""The requests that the services of a node answer to one another and to the administrator."""
OF_REGISTRY = ("allocator.{node}.*", "discovery.{node}.*")
"""The requests that they also answer to a registry: none that allocates or releases a device."""
OF_READERS = ("allocator.{node}.alive",)
READS = tuple(f"$JS.API.DIRECT.GET.{stream}" for stream in Stream)
"""The subjects by which stores are read; they create and change nothing at the server."""
PURGE = "$JS.API.STREAM.PURGE.*"
PURGED_AS = f"{P}.purge.*"
"""Deletion of messages, and the name of the request in the account of the administrator, which has streams of its own."""


def format_accounts(nodes: Mapping[NodeName, str], registry: str, reader: str, admin: str, stores: str) -> str:
    """
    The block `accounts` of a nats-server's configuration. `nodes`: name -> public key of its user (`U…`), `EVERY_NODE` alone
    for one account of all; the others are public keys, too.
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
    """The export of a subject whose requests this account answers. `to`: who may import it; empty: all."""
    allowed = f", accounts: {json.dumps([*to])}" if to else ""
    return f"{{ service: {json.dumps(subject)}{', response_type: stream' if stream else ''}{allowed} }}"


def format_import(kind: str, account_name: str, subject: str) -> str:
    """Formats the import of a service or a stream of another account."""
    return f"{{ {kind}: {{ account: {json.dumps(account_name)}, subject: {json.dumps(subject)} }} }}"
