"""
Answers `topoalign why` and `what-if --cluster`: reads the facts of all nodes, computes the answer and prints it.

The facts come from a running cluster's streams, or from a file of another run. The answer depends on these facts alone.
"""

import subprocess
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import click
import msgspec

from topoalign.cli import formatting, link, output
from topoalign.cli.exit_codes import REFUSED
from topoalign.cli.options import PATH
from topoalign.client.stored_records import read_cluster
from topoalign.core.demand.node_filters import Constraints, NodeNotAllowed, NodeTraits, Taint
from topoalign.core.demand.unserved import UnservedResource, asked_names, served_by
from topoalign.core.diagnosis.cluster_answer import ClusterAnswer
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import LONGEST_LINE, ClusterRecord, decode_lines, encode_lines
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.errors import NotFound, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import PodRequest, RuleChanges
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.sharing.pod_checks import check_gpus_known, check_pod, offers_of_machines
from topoalign.core.sharing.pod_warnings import paths_of_limits, warnings_of
from topoalign.runtime.clock import SystemClock

MOST_ROWS = 20
"""Maximum number of nodes in text output; --json has all."""
MOST_PODS = 100_000
FROM_FILE = click.option(
    "--from", "from_file", type=PATH, metavar="FILE", help="Read a file of `why --snapshot`, not a cluster."
)
SCORINGS = [each.value for each in Scoring]

WORDS = {
    Resolvability.IN_USE: "in use",
    Resolvability.UNHEALTHY: "unhealthy",
    Resolvability.NOT_KNOWN: "not known",
    Resolvability.EXCLUDED: "kept off",
    Resolvability.NEVER: "never fits",
    Resolvability.FOREIGN: "foreign",
    Resolvability.MISSING: "has none",
}
"""Why a node refuses a pod -> text for the output."""


class ClusterOptions(NamedTuple):
    """The options of a query to a cluster."""

    pods: int | None
    scoring: str | None
    snapshot: Path | None
    from_file: Path | None

    @property
    def given(self) -> bool:
        """Whether any of them was given."""
        return any(option is not None for option in self)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a query to a cluster, and passes them to the command as `query`."""

    @click.option(
        "--pods", type=click.IntRange(1, MOST_PODS), metavar="N", help="Number of equal pods to place.  [default: 1]"
    )
    @click.option("--scoring", type=click.Choice(SCORINGS), help="How nodes are ranked.  [default: quality]")
    @click.option("--snapshot", type=PATH, metavar="FILE", help="Write the facts about the cluster to this file.")
    @FROM_FILE
    @wraps(command)
    def asking(
        pods: int | None, scoring: str | None, snapshot: Path | None, from_file: Path | None, **rest: Any
    ) -> Any:
        """Calls the command with these options as one `ClusterOptions`."""
        return command(query=ClusterOptions(pods, scoring, snapshot, from_file), **rest)

    return asking


def ask_cluster(
    nats: str | None,
    query: ClusterOptions,
    pod: PodRequest,
    rules: RuleChanges,
    constraints: Constraints | None = None,
    *,
    as_json: bool,
) -> tuple[ClusterRecord, ClusterAnswer]:
    """
    The records of the cluster, and the answer computed from them. `constraints`: those of the pod; None: unknown.
    Raises InvalidField and InvalidShare for an invalid pod or invalid rules, and the errors of reading the facts.
    """
    record = read_cluster_record(nats, query.from_file)
    why_not_applied = "the pod comes from options, which have no nodeSelector, affinity or tolerations"
    if constraints is not None:
        record, why_not_applied = with_node_objects(record, query.from_file)
    if why_not_applied:
        output.note(f"labels, taints and cordons of the nodes were ignored: {why_not_applied}")
    check_in_cluster(pod, record, rules)
    scorer = scorer_by_name(Scoring(query.scoring or Scoring.QUALITY), NodePacking.BINPACK)
    rows = len(record.nodes) if as_json else MOST_ROWS
    answer = diagnose(Nodes(record, constraints), pod, scorer, rules, query.pods or 1, seams=rows)
    if query.snapshot is not None:
        with query.snapshot.open("wb") as file:
            file.writelines(encode_lines(record))
        output.note(
            f"wrote the facts of {format_count(len(record.nodes), 'node')} to {clean(str(query.snapshot), 200)}"
        )
    return record, answer


def with_node_objects(record: ClusterRecord, file: Path | None) -> tuple[ClusterRecord, str]:
    """
    The records, with labels, taints and cordons from kubectl unless they come from a file, and the reason why the pod's
    constraints cannot be applied; empty if they can.
    """
    if file is not None:
        return record, "" if record.has_traits else "the file does not have them"
    try:
        traits = read_node_traits()
    except KubectlFailed as error:
        return record, error.finding
    nodes = tuple(msgspec.structs.replace(each, traits=traits.get(each.node)) for each in record.nodes)
    record = msgspec.structs.replace(record, nodes=nodes)
    return record, "" if record.has_traits else "kubectl shows none of these nodes"


def check_in_cluster(pod: PodRequest, record: ClusterRecord, rules: RuleChanges) -> None:
    """
    Checks the pod against the hardware of all nodes, including nodes that do not answer. Raises InvalidField and NoFit,
    as the scheduler extender's filter call does, and UnservedResource for a device resource that no node offers.
    """
    nodes = [each for each in record.nodes if not each.foreign]
    machines = [each.topology.topology for each in nodes if each.topology is not None]
    offers = offers_of_machines(machine.shape for machine in machines)
    kubelets = [each.usage.kubelet for each in nodes if each.usage is not None]
    compats = {rules.get("compat"), *(each.rules.compat for each in kubelets if each is not None)}
    demand = check_pod(pod, offers, "hami" if "hami" in compats else "")
    served = list_served_devices(record)
    if served is not None and (names := asked_names(demand) - served):
        raise UnservedResource(pod, names, served)
    for warning in warnings_of(pod.annotations, paths_of_limits(pod), served or offers.names):
        output.note(f"note: {warning}")
    check_gpus_known(demand, {gpu.id for machine in machines for gpu in machine.gpus}, offers)


def list_served_devices(record: ClusterRecord) -> set[ResourceName] | None:
    """The device resources that any node serves, including those of other plugins; None if not all are known."""
    if any(each.foreign or each.topology is None for each in record.nodes):
        return None
    kubelets = [
        each.usage.kubelet for each in record.nodes if each.usage is not None and each.usage.kubelet is not None
    ]
    if any(each.devices is None for each in kubelets):
        return None
    others = {name for each in kubelets for name in (*(each.devices or ()), *(each.registered or ()))}
    return others | served_by(each.topology.topology for each in record.nodes if each.topology is not None)


def read_cluster_record(nats: str | None, file: Path | None) -> ClusterRecord:
    """The nodes' records, from a file or a running cluster. Raises NotFound if there is no node, and read errors."""
    if file is None:
        record = from_streams(nats)
    else:
        with file.open("rb") as lines:
            record = decode_lines(iter(partial(lines.readline, LONGEST_LINE + 1), b""))
    if not record.nodes:
        raise NotFound("node", "*", "see that `topoalign node` runs on the nodes of the cluster")
    return record


def from_streams(nats: str | None) -> ClusterRecord:
    """The records of a running cluster. Raises NothingRuns, BusUnavailable, BusRefused."""
    url, _ = link.locate_bus(nats)

    async def read() -> ClusterRecord:
        async with link.connect_to_bus(url, log_level="critical") as bus:
            return await read_cluster(bus, SystemClock())

    return anyio.run(read)


def show_answer(
    record: ClusterRecord, answer: ClusterAnswer, as_json: bool, show: Callable[[ClusterAnswer], None]
) -> int | None:
    """
    Prints an answer. With `as_json`: the answer and the time of the facts; else what the answer does not cover, a
    headline, and the output of `show`. Returns the exit code of a refusal.
    """
    if as_json:
        output.print_json({"time": record.time, **msgspec.to_builtins(answer)})
    else:
        formatting.show_not_covered(answer.not_covered)
        output.print_line(output.heading(_headline(answer)))
        show(answer)
    return None if answer.fit == answer.pods else REFUSED


def show_reasons(answer: ClusterAnswer) -> None:
    """Prints why the pod does not fit, the main reason first, and what would make it fit."""
    if answer.reason is not None:
        output.print_line(f"finding  {clean(answer.reason.finding, 1000)} ({clean(answer.reason.examples[0])})")
        output.print_line(f"remedy   {clean(answer.reason.remedy, 1000)}")
    if answer.changes:
        output.print_line()
        output.columns(
            ("WHAT WOULD MAKE IT FIT", "COST", "NODES", "FOR EXAMPLE"),
            [(each.text, f"{each.cost:.0%}", each.nodes, each.example) for each in answer.changes],
        )
    if answer.reasons:
        output.print_line()
        output.columns(
            ("REASON", "STATE", "NODES", "FOR EXAMPLE"),
            [
                (
                    # For nodes that Kubernetes' filters exclude, also the reason.
                    f"{each.code}: {each.finding}" if each.code == NodeNotAllowed.code else each.code,
                    WORDS[each.resolvability],
                    each.nodes,
                    " ".join(each.examples),
                )
                for each in answer.reasons
            ],
        )


def show_best_nodes(answer: ClusterAnswer) -> None:
    """Prints the nodes that would admit the pod, the best first."""
    if answer.admitting:
        best = answer.admitting[:MOST_ROWS]
        several_gpus = any(each.seam for each in best)
        output.columns(
            ("NODE", "SCORE", "PODS", "SEAM"),
            [(each.node, each.score, answer.placed.get(each.node, 0), each.seam) for each in best],
            without=(*(() if answer.placed else ("PODS",)), *(() if several_gpus else ("SEAM",))),
        )
        if len(answer.admitting) > MOST_ROWS:
            output.print_line(f"and {len(answer.admitting) - MOST_ROWS} more (--json lists all)")


def _headline(answer: ClusterAnswer) -> str:
    nodes = answer.nodes
    reason = answer.reason
    why = "" if reason is None else f": {clean(reason.code)} on {format_count(reason.nodes, 'node')}"
    if answer.pods > 1:
        taking = format_count(len(answer.placed), "node")
        return f"{answer.fit} of {answer.pods} pods fit, on {taking} of {nodes}{why}"
    if reason is not None:
        return f"no node of {nodes} admits the pod{why}"
    best = answer.admitting[0]
    return (
        f"{len(answer.admitting)} of {format_count(nodes, 'node')} would admit the pod; the best is {clean(best.node)}"
    )


def format_count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# kubectl reads a pod, and the fields of all nodes that kube-scheduler's filters use. Its own configuration selects the
# cluster and the user.


SECONDS = 15.0
"""Time-out of kubectl."""
LARGEST_NODES = 256 << 20
"""Maximum size in bytes of the list of nodes. That of 5,000 nodes, with their lists of images, has about 100 MB."""


class KubectlFailed(Unavailable):
    """
    Raised when the program kubectl gives no usable answer.

    Remedy: Check that kubectl is installed and can read pods and nodes, or give `--pod-file`.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(
            clean(finding, 300),
            "see that kubectl is installed and can read pods and nodes of the cluster, or describe the pod with --pod-file",
        )


class KubectlMetadata(msgspec.Struct, frozen=True):
    """The fields of a node's `metadata` that kube-scheduler's filters use."""

    name: NodeName
    labels: dict[str, str] | None = None


class KubectlNodeSpec(msgspec.Struct, frozen=True):
    """The fields of a node's `spec` that kube-scheduler's filters use."""

    taints: tuple[Taint, ...] | None = None
    unschedulable: bool | None = None


class KubectlNode(msgspec.Struct, frozen=True):
    """A v1 Node."""

    metadata: KubectlMetadata
    spec: KubectlNodeSpec | None = None


class KubectlNodeList(msgspec.Struct, frozen=True):
    """The nodes of a cluster, as `kubectl get nodes --output=json` prints them."""

    items: list[KubectlNode]


def get(*arguments: str) -> bytes:
    """The output of `kubectl get` with these arguments. Raises KubectlFailed."""
    try:
        done = subprocess.run(["kubectl", "get", *arguments], capture_output=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise KubectlFailed("there is no kubectl here") from None
    except subprocess.TimeoutExpired:
        raise KubectlFailed(f"kubectl did not answer within {SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        # The last line is the error, others are its log.
        raise KubectlFailed(lines[-1] if lines else f"kubectl ended with {done.returncode}")
    return done.stdout


def read_node_traits() -> dict[NodeName, NodeTraits]:
    """Name -> labels, taints and cordon of each node of the cluster. Raises KubectlFailed."""
    answer = get("nodes", "--output=json")
    if len(answer) > LARGEST_NODES:
        raise KubectlFailed(f"kubectl printed more than {LARGEST_NODES >> 20} MiB about the nodes")
    try:
        nodes = msgspec.json.decode(answer, type=KubectlNodeList).items
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KubectlFailed(f"kubectl printed no list of nodes: {error}") from error
    return {node.metadata.name: traits_of(node) for node in nodes}


def traits_of(node: KubectlNode) -> NodeTraits:
    """The traits of a node that the filters use."""
    metadata = node.metadata
    spec = node.spec or KubectlNodeSpec()
    return NodeTraits(
        name=metadata.name,
        labels=metadata.labels or {},
        taints=spec.taints or (),
        unschedulable=bool(spec.unschedulable),
    )
