"""`topoalign allocate`, `release` and `trust`: requests to the allocator of a node that has no kubelet."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import click

from topoalign.cli import formatting, options, output
from topoalign.cli.effects import Effect
from topoalign.cli.exit_codes import REFUSED
from topoalign.cli.link import NodeLink, on_node
from topoalign.cli.options import parse_size
from topoalign.core.demand.node_filters import Constraints
from topoalign.core.demand.unserved import UnservedResource, served_by
from topoalign.core.model.decisions import Decision, Refusal, with_notes
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, AllocationID, ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import (
    AllocateRequest,
    Compat,
    ContainerRequest,
    Mode,
    NodeRequest,
    PodRequest,
    ReleaseRequest,
    RuleChanges,
)
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.pod_warnings import paths_of_limits, warnings_of

COUNT = click.IntRange(0, 1_000_000)
"""The upper bound is larger than any count on any machine."""

request_options = options.add_options(
    click.option("--gpus", type=COUNT, default=0, metavar="N", help="GPUs (nvidia.com/gpu)."),
    click.option("--cpus", type=COUNT, default=0, metavar="N", help="Exclusive CPUs."),
    click.option(
        "--memory", type=parse_size, default="0", metavar="SIZE", help="Memory: 64Gi, 1.5G or a number of bytes."
    ),
    click.option("--nics", type=COUNT, default=0, metavar="N", help="NICs (topoalign.io/nic)."),
    click.option(
        "--annotation",
        "annotations",
        metavar="KEY=VALUE",
        multiple=True,
        help="An annotation of the pod; may be repeated.",
    ),
    click.option(
        "--pod", metavar="NS/NAME", help="Name of the pod. Namespace `default` if none is given.  [default: a new name]"
    ),
    options.POLICY,
    options.SCOPE,
    options.PLACEMENT,
    click.option(
        "--compat",
        type=click.Choice([each for each in get_args(Compat) if each]),
        help="Decide as this project: annotations (koordinator), units (gaia), slots (hami).",
    ),
    click.option(
        "--mode",
        type=click.Choice([m.value for m in Mode]),
        help="Decide exactly as the kubelet does, or as topoalign does by itself.",
    ),
)
"""The options for the requested resources and for the rules of the decision."""


@click.command("allocate")
@request_options
@on_node
def allocate_for_container(link: NodeLink, **asked: Any) -> int | None:
    """
    Request GPUs, CPUs, memory and NICs of a node for one container.

    The node's own rules apply where no option is given. A refusal ends with exit code 4.

    \b
    Examples:
      topoalign allocate --gpus 2
      topoalign allocate --gpus 4 --cpus 32 --memory 64Gi --nics 4 --pod ml/train --policy restricted
    """
    pod, rules, _ = pod_request(**asked)
    name = clean(f"{pod.namespace}/{pod.name}", 520)
    request = AllocateRequest(node=link.node, pod=pod, rules=rules)
    effect = Effect(
        f"the allocation for pod {name}",
        f"`topoalign explain {name}` shows what the pod holds, `topoalign release {name}` releases it; "
        "repeating the request is safe",
    )
    decision, topology = link.ask("allocate", request, Decision, effect)
    status = print_decision(link.node, decision, topology, link.as_json)
    if status is None and not link.as_json:
        output.note(f"to release it: topoalign release {name}")
    return status


def print_decision(node: NodeName, decision: Decision, topology: Topology, as_json: bool) -> int | None:
    """Print a decision and its notes. Returns the exit code of a refusal, None for an admission."""
    if as_json:
        output.print_json({"node": node, "decision": decision})
    else:
        formatting.show_decision(decision, topology)
        for note in decision.explanation.notes:
            output.note(f"note: {clean(note, 1000)}")
    return REFUSED if isinstance(decision, Refusal) else None


def show_prediction(
    node: NodeName, pod: PodRequest, decision: Decision, topology: Topology, as_json: bool
) -> int | None:
    """Print what a node would decide about a pod. Returns the exit code of a refusal. Raises UnservedResource."""
    served = served_by((topology,))
    # If nobody serves a requested device, the allocation of other resources does not matter.
    if names := decision.explanation.unserved:
        raise UnservedResource(pod, names, served)
    warnings = warnings_of(pod.annotations, paths_of_limits(pod), served)
    return print_decision(node, with_notes(decision, warnings), topology, as_json)


class AskedPod(NamedTuple):
    """The pod that a command line describes."""

    request: PodRequest
    rules: RuleChanges
    """Rules that override those of the kubelet."""
    constraints: Constraints | None = None
    """The constraints on its nodes. None: the pod comes from options, not from a manifest."""


def pod_request(
    gpus: int, cpus: int, memory: int, nics: int, annotations: Sequence[str], pod: str | None, **rules: str | None
) -> AskedPod:
    """The pod that options describe. Raises UsageError if nothing is requested."""
    every = {GPU: gpus, CPU: cpus * 1000, MEMORY: memory, NIC: nics}
    amounts = {resource: amount for resource, amount in every.items() if amount}
    if not amounts:
        raise click.UsageError("nothing is requested: give at least one of --gpus, --cpus, --memory, --nics")
    namespace, name = pod_name(f"cli-{secrets.token_hex(3)}" if pod is None else pod)
    container = ContainerRequest(name=ContainerName("main"), requests=amounts, limits=amounts)
    request = PodRequest(
        namespace=namespace, name=name, annotations=dict(map(parse_annotation, annotations)), containers=(container,)
    )
    return AskedPod(request, changes(rules))


def parse_annotation(text: str) -> tuple[str, str]:
    """`KEY=VALUE`. Raises BadParameter."""
    key, equals, value = text.partition("=")
    if not key or not equals or any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes that are no UTF-8
        raise click.BadParameter(f"{clean(text, 80)!r} is not KEY=VALUE", param_hint="--annotation")
    return key, value


def changes(rules: Mapping[str, str | None]) -> RuleChanges:
    """The rules that were given as options."""
    return {rule: value for rule, value in rules.items() if value is not None}


def pod_name(text: str) -> tuple[Namespace, PodName]:
    """`ml/train` or `train`. Raises BadParameter."""
    namespace, slash, name = text.rpartition("/")
    if not name or "/" in namespace or (slash and not namespace):
        raise click.BadParameter(f"{clean(text)!r} is not NAMESPACE/NAME", param_hint="--pod")
    return Namespace(namespace or "default"), PodName(name)


@click.command("release")
@click.argument("target", metavar="ID|NS/POD")
@on_node
def release_allocations(link: NodeLink, target: str) -> None:
    """
    Release one allocation by its id, or all allocations of a pod.

    \b
    Examples:
      topoalign release ml/train
      topoalign release 0198c1d2
    """
    name = clean(target, 520)
    effect = Effect(
        f"the release of {name}", f"`topoalign explain {name}` shows what is still held; repeating the release is safe"
    )
    request = ReleaseRequest(node=link.node, target=target)
    released, _ = link.ask("release", request, tuple[AllocationID, ...], effect)
    if link.as_json:
        output.print_json({"node": link.node, "released": released})
        return
    for allocation in released:
        output.print_line(f"released {clean(allocation, 120)}")


@click.command()
@on_node
def trust(link: NodeLink) -> None:
    """
    Confirm a node's record of allocations after its journal was damaged.

    Until then the node gives out no device, because containers may hold devices that the record does not have. First check
    what runs on the node, and cordon devices that are in use without an allocation. A node with a kubelet does not need
    this command: the kubelet confirms the record.

    \b
    Examples:
      topoalign watch --node gpu-7
      topoalign trust --node gpu-7
    """
    effect = Effect("the confirmation of the record", "`topoalign trust` can be repeated")
    reason, _ = link.ask("trust", NodeRequest(node=link.node), str | None, effect)
    if link.as_json:
        output.print_json({"node": link.node, "doubt": reason})
    elif reason is None:
        output.print_line("the record was confirmed already")
    else:
        output.print_line(f"the record is confirmed; it was unconfirmed: {clean(reason, 300)}")
