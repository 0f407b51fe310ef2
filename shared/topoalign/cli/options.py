"""Options that several commands share."""

import click

from topoalign.core.model.requests import Placement, Policy, Scope

NODE = click.option(
    "--node", envvar="TOPOALIGN_NODE", metavar="NODE", help="Name of the node.  [default: that of `up`, or this host]"
)
NATS = click.option("--nats", envvar="TOPOALIGN_NATS_URL", metavar="URL", help="URL of NATS.  [default: that of `up`]")
POLICY = click.option("--policy", type=click.Choice([p.value for p in Policy]), help="Topology policy.")
SCOPE = click.option("--scope", type=click.Choice([s.value for s in Scope]), help="What is aligned as one unit.")
PLACEMENT = click.option("--placement", type=click.Choice([p.value for p in Placement]), help="Device policy.")
