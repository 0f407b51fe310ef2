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
from topoalign.runtime.stores import NEWS

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
"""In place of the name of a node: one account that all nodes share. Each of them can then publish for the others."""

FACTS = tuple(pattern for pattern, writer in wire.SUBJECTS.values() if writer != "registry")
"""What a node publishes."""
NEWS_OF_NODE = (*(f"{kind}.{{node}}" for kind in wire.READINGS), "reservation.{node}")
"""What a node receives of the stores as it is stored: its own hardware, and what is reserved on it."""
OF_ADMIN = ("admission.{node}.*", "devices.{node}.*")
"""What the services of a node answer to one another and to the administrator."""
OF_REGISTRY = ("allocator.{node}.*", "discovery.{node}.*")
"""What they answer to a registry, too: nothing that gives or takes a device."""
OF_READERS = ("allocator.{node}.alive",)
READS = tuple(f"$JS.API.DIRECT.GET.{stream}" for stream in Stream)
"""The right to read the stores, which creates and changes nothing at the server."""
PURGE = "$JS.API.STREAM.PURGE.*"
PURGED_AS = f"{P}.purge.*"
"""Deletion of messages, and the name of the request in the account of the administrator, which has streams of its own."""


def accounts(nodes: Mapping[NodeName, str], registry: str, reader: str, admin: str, stores: str) -> str:
    """
    The block `accounts` of a nats-server's configuration. `nodes`: name -> public key of its user (`U…`), `EVERY_NODE` alone
    for one account of all; the others are public keys, too.
    """
    lines = ["accounts {"]
    lines += account(
        STORES,
        stores,
        ["jetstream: enabled"],
        exports=[
            *(service(f"{P}.{each}") for each in exported()),
            *(service(each, stream=True) for each in READS),
            service(PURGE, [ADMIN]),
            f'{{ stream: "{NEWS}.>" }}',
        ],
        imports=[],
    )
    lines += account(
        ADMIN,
        admin,
        [],
        exports=[],
        imports=[
            *(imported("service", STORES, each) for each in READS),
            f'{{ service: {{ account: "{STORES}", subject: "{PURGE}" }}, to: "{PURGED_AS}" }}',
            imported("stream", STORES, f"{NEWS}.>"),
            imported("service", REGISTRY, f"{P}.registry.*"),
            *(
                imported("service", account_of(node), s)
                for node in nodes
                for s in subjects(OF_ADMIN + OF_REGISTRY, node)
            ),
        ],
    )
    lines += account(
        REGISTRY,
        registry,
        [],
        exports=[service(f"{P}.registry.*", [ADMIN])],
        imports=[
            *(imported("service", STORES, each) for each in (f"{P}.reservation.*", f"{P}.deadletter.registry", *READS)),
            imported("stream", STORES, f"{NEWS}.>"),
            *(imported("service", account_of(node), each) for node in nodes for each in subjects(OF_REGISTRY, node)),
        ],
    )
    lines += account(
        READERS,
        reader,
        [],
        exports=[],
        imports=[
            *(imported("service", STORES, each) for each in READS),
            imported("stream", STORES, f"{NEWS}.>"),
            *(imported("service", account_of(node), each) for node in nodes for each in subjects(OF_READERS, node)),
        ],
    )
    for node, key in nodes.items():
        news = [f"{NEWS}.{pattern.format(node=token_of(node))}" for pattern in NEWS_OF_NODE]
        lines += account(
            account_of(node),
            key,
            [],
            exports=[
                *(service(each, [ADMIN]) for each in subjects(OF_ADMIN, node)),
                *(service(each, [ADMIN, REGISTRY, READERS]) for each in subjects(OF_REGISTRY, node)),
            ],
            imports=[
                *(imported("service", STORES, each) for each in (*subjects(FACTS, node), *READS)),
                *(imported("stream", STORES, each) for each in news),
            ],
        )
    return "\n".join([*lines, "}", ""])


def account_of(node: NodeName) -> str:
    """The name of the account of a node."""
    return "TOPOALIGN_NODES" if node == EVERY_NODE else f"TOPOALIGN_NODE_{wire.encode_node_token(node)}"


def token_of(node: NodeName) -> str:
    """The token of the node in subjects; `*` for every node."""
    return "*" if node == EVERY_NODE else wire.encode_node_token(node)


def subjects(patterns: Iterable[str], node: NodeName) -> list[str]:
    """These subjects, of one node."""
    return [f"{P}.{pattern.format(node=token_of(node))}" for pattern in patterns]


def exported() -> Iterator[str]:
    """What the account of the stores takes from others, without the prefix of subjects."""
    yield from (pattern.format(node="*") for pattern in FACTS)
    yield from ("reservation.*", "deadletter.registry")


def account(
    name: str, key: str, settings: Iterable[str], *, exports: Iterable[str], imports: Iterable[str]
) -> Iterator[str]:
    """The lines of one account with one user."""
    yield f"  {json.dumps(name)}: {{"
    yield f"    users: [ {{ nkey: {key} }} ]"
    yield from (f"    {setting}" for setting in settings)
    yield from block("exports", exports)
    yield from block("imports", imports)
    yield "  }"


def block(name: str, entries: Iterable[str]) -> Iterator[str]:
    """A list in an account."""
    yield f"    {name}: ["
    yield from (f"      {entry}" for entry in entries)
    yield "    ]"


def service(subject: str, to: Iterable[str] = (), *, stream: bool = False) -> str:
    """A subject whose requests this account answers. `to`: the accounts that may import it; none stands for all."""
    allowed = f", accounts: {json.dumps([*to])}" if to else ""
    return f"{{ service: {json.dumps(subject)}{', response_type: stream' if stream else ''}{allowed} }}"


def imported(kind: str, account_name: str, subject: str) -> str:
    """A service or a stream of another account."""
    return f"{{ {kind}: {{ account: {json.dumps(account_name)}, subject: {json.dumps(subject)} }} }}"
