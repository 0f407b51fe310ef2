"""`topoalign nats-config`: the accounts of a nats-server, and a key for each node and role."""

import os
from pathlib import Path
from typing import TextIO

import click

from topoalign.cli import options, output
from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, StateFault, clean
from topoalign.core.model.ids import NodeName
from topoalign.runtime.nats_accounts import EVERY_NODE, format_accounts

LONGEST_NAME = 253
"""Characters of the name of a Kubernetes node."""
ROLES = ("registry", "reader", "admin", "stores")


@click.command("nats-config")
@click.option("--nodes", required=True, type=click.File(), metavar="FILE", help="Names of nodes, one in each line.")
@click.option(
    "--out",
    default="nats",
    type=options.PATH,
    metavar="DIR",
    help="Directory to write to.  [default: nats]",
)
def nats_config(nodes: TextIO, out: Path) -> None:
    """
    Write accounts.conf for nats-server, and the seeds of keys: one for each node, for registries, for readers, for
    the administrator, and for `topoalign stores apply`.

    Each node has an account of its own: it can publish its own facts and answer requests for itself, and nothing else.
    A line `*` instead of names makes one account for all nodes, each of which can then publish for the others.

    Keys that exist are kept, so add nodes to FILE, run it again and reload nats-server. The key of a node that is no
    longer in FILE stays in DIR and has no effect.

    \b
    Examples:
      topoalign nats-config --nodes nodes.txt --out nats
      kubectl get nodes -o name | cut -d/ -f2 | topoalign nats-config --nodes -
    """
    names = names_in(nodes.read().splitlines())
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = {
            name: "nodes.nk" if name == EVERY_NODE else f"node-{wire.encode_node_token(name)}.nk" for name in names
        }
        public = {name: public_key(out / file) for name, file in files.items()}
        keys = {role: public_key(out / f"{role}.nk") for role in ROLES}
        (out / "accounts.conf").write_text(format_accounts(public, **keys))
    except OSError as error:
        raise StateFault(
            f"cannot write {clean(str(out), 200)}: {error.strerror}", "name a directory that can be written with --out"
        ) from error
    output.note(f"{out / 'accounts.conf'}: include it in the configuration of nats-server")
    output.note(f"{out / '*.nk'}: seeds for TOPOALIGN_NATS_NKEY, {len(names)} of nodes, and {', '.join(ROLES)}")


def names_in(lines: list[str]) -> list[NodeName]:
    """The names of nodes in these lines. Raises InvalidField if there are none, or for an invalid name."""
    names = list(dict.fromkeys(NodeName(line.strip()) for line in lines if line.strip() and not line.startswith("#")))
    if not names:
        raise InvalidField("--nodes", "the file names no node", "write the name of a node in each line")
    for name in names:
        if len(name) > LONGEST_NAME or any(character.isspace() or character == "/" for character in name):
            raise InvalidField("--nodes", f"{clean(name)!r} is no name of a node", "write one name in each line")
    if EVERY_NODE in names and len(names) > 1:
        raise InvalidField(
            "--nodes", "there are names in addition to `*`", "write `*` alone, or the names of all nodes"
        )
    return names


def public_key(file: Path) -> str:
    """The public key of the seed in a file, which is created if it does not exist. Raises InvalidField, OSError."""
    import nkeys  # here, because it loads another library

    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)) + b"\n")
    try:
        return str(nkeys.from_seed(bytearray(file.read_bytes().strip())).public_key.decode())
    except (nkeys.NkeysError, ValueError) as error:
        raise InvalidField(
            "--out", f"{clean(str(file), 200)} is not the seed of an nkey user", "move the file away; a new key is made"
        ) from error
