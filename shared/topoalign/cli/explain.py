"""`topoalign explain` and `topoalign what-if`: the reasons of a decision, and a decision without effect."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from topoalign.cli import formatting, output
from topoalign.cli.allocation_commands import AskedPod, changes, pod_request, request_options, show_prediction
from topoalign.cli.gpu_partitioning import list_partitioning_rows, partitioning_document
from topoalign.cli.link import NodeLink, on_node
from topoalign.cli.options import PATH
from topoalign.cli.whole_cluster import ClusterOptions, ask_cluster, cluster_options, show_answer, show_best_nodes
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Decision, Explained
from topoalign.core.model.errors import clean
from topoalign.core.model.holdings import Whole
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import AllocateRequest, Compat, ExplainRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.core.state.gpu_partitioning import GpuPartitioning, partitioning_by_gpu, parts_of_allocation
from topoalign.kubelet.files import manifest

OF_THE_POD = ("gpus", "cpus", "memory", "nics", "annotations", "pod")
"""The options of `request_options` that a manifest replaces."""


@click.command(name="what-if")
@request_options
@click.option("--pod-file", type=PATH, metavar="FILE", help="Use this Pod (YAML or JSON) instead of one container.")
@click.option("--machine", metavar="NAME|FILE", help="Predict for this machine, without any service.")
@click.option("--config", type=PATH, metavar="FILE", help="What the machine's devices are offered as.")
@click.option("--kubelet-config", type=PATH, metavar="FILE", help="The machine's KubeletConfiguration.")
@click.option("--kubelet-root", type=PATH, metavar="DIR", help="The machine's kubelet root directory.")
@click.option("--cluster", is_flag=True, help="Ask all nodes, and rank those that would admit the pod.")
@cluster_options
@on_node
def what_if(
    link: NodeLink,
    pod_file: Path | None,
    machine: str | None,
    config: Path | None,
    kubelet_config: Path | None,
    kubelet_root: Path | None,
    cluster: bool,
    query: ClusterOptions,
    **asked: Any,
) -> int | None:
    """
    Show what `allocate`, or the kubelet of the node, would decide now, without effect.

    With --machine no service is asked. The answer is what kubelet v1.36 would decide on that machine with the
    configuration of --kubelet-config. Devices, CPUs and memory are in use as the files in --kubelet-root show; without
    it nothing is in use. With --config, the file of `topoalign node`, the machine can offer shares of GPUs.

    With --cluster every node is asked. Use --pods, --scoring, --snapshot and --from only with --cluster. `topoalign why`
    shows more about refusals.

    \b
    Examples:
      topoalign what-if --gpus 8 --policy single-numa-node
      topoalign what-if --gpus 4 --cpus 32 --memory 64Gi --json
      topoalign what-if --machine dgx-a100 --kubelet-config config.yaml --pod-file pod.yaml
      topoalign what-if --machine dgx-a100 --config topoalign.yaml --pod-file share.yaml
      topoalign what-if --cluster --gpus 8 --pods 16
    """
    pod = pod_request(**asked) if pod_file is None else pod_in(pod_file, asked)
    if cluster:
        of_one_node = (machine, config, kubelet_config, kubelet_root, link.node_option)
        if any(option is not None for option in of_one_node):
            raise click.UsageError(
                "--cluster asks all nodes: leave out --node, --machine, --config and the kubelet's files"
            )
        return show_answer(
            *ask_cluster(link.nats_option, query, *pod, as_json=link.as_json), link.as_json, show_best_nodes
        )
    if query.given:
        raise click.UsageError("--pods, --scoring, --snapshot and --from go with --cluster")
    if machine is None:
        if config is not None or kubelet_config is not None or kubelet_root is not None:
            raise click.UsageError("--config, --kubelet-config and --kubelet-root go with --machine")
        request = AllocateRequest(node=link.node, pod=pod.request, rules=pod.rules)
        return show_prediction(link.node, pod.request, *link.ask("what-if", request, Decision), link.as_json)
    from topoalign.cli.predict import Described  # imports the readers of machines

    described = Described(machine, kubelet_config, kubelet_root, config)
    node, decision, topology = described.predict(pod.request, pod.rules)
    return show_prediction(node, pod.request, decision, topology, link.as_json)


def pod_of_manifest(read: Callable[[], manifest.PodManifest], asked: dict[str, Any], instead: str) -> AskedPod:
    """
    The pod of a manifest. `instead`: the source of the manifest, for errors. Raises UsageError if options also describe
    a pod, and InvalidField and NoFit for a pod that an API server with topoalign's webhook would reject.
    """
    if any(asked.pop(option) for option in OF_THE_POD):
        raise click.UsageError(
            f"{instead} describes the whole pod: leave out --gpus, --cpus, --memory, --nics, --annotation and --pod"
        )
    rules = changes(asked)
    pod = read()
    request = manifest.request_from_pod(pod)
    check_pod(request, compat=msgspec.convert(rules.get("compat", ""), Compat))
    return AskedPod(request, rules, manifest.constraints_of(pod))


def pod_in(file: Path, asked: dict[str, Any]) -> AskedPod:
    """The pod of a manifest in a file. Raises the errors of `pod_of_manifest`."""
    return pod_of_manifest(partial(manifest.load_manifest, file), asked, "--pod-file")


@click.command()
@click.argument("target", metavar="ID|NS/POD")
@on_node
def explain(link: NodeLink, target: str) -> None:
    """
    Show what an allocation or pod got, the hints of each provider, the merged hint, and the sets considered.

    \b
    Examples:
      topoalign explain ml/train
      topoalign explain ml/train --json
      topoalign explain ml/train --json | jq '.divided[].left'
    """
    explained, topology = link.ask("explain", ExplainRequest(node=link.node, target=target), Explained)
    if link.as_json:
        gpus, _ = partitioned_gpus(link, explained.allocations, topology)
        divided = {gpu: partitioning_document(each) for gpu, each in gpus}
        output.print_json({"node": link.node, "explained": explained, "divided": divided})
        return
    for allocation in explained.allocations:
        known = explained.decision is not None or bool(allocation.cpus or allocation.memory or allocation.affinity)
        formatting.show_allocation(allocation, topology, decided=known)
    show_partitioned_gpus(link, explained.allocations, topology)
    for device, health in explained.ailing.items():
        cordoned = " and cordoned" if health.cordoned else ""
        output.print_line(
            f"holds a device that is {health.state}{cordoned}: {clean(device, 120)}, {clean(health.reason, 400)}"
        )
    for note in explained.notes:
        output.print_line(clean(note, 600))
    if explained.decision is None:
        if explained.allocations:
            output.note(
                "the reasons are not known: the kubelet made this decision, or the allocator has restarted since"
            )
        return
    if not explained.allocations:
        output.print_line("the pod holds nothing now; the latest decision was:")
        formatting.show_decision(explained.decision, topology)
    formatting.show_explanation(explained.decision.explanation, topology)


def show_partitioned_gpus(link: NodeLink, allocations: Iterable[Allocation], topology: Topology) -> None:
    """Prints the partitioned GPUs of these allocations: who else has a share of them, and their remaining amounts."""
    divided, newest = partitioned_gpus(link, allocations, topology)
    if divided:
        output.print_line()
        output.print_line(output.heading("The GPUs that this is a part of"))
        output.columns(("GPU", "DIVIDED", "HELD BY", "LEFT"), list_partitioning_rows(newest, divided))


def partitioned_gpus(
    link: NodeLink, allocations: Iterable[Allocation], topology: Topology
) -> tuple[Sequence[tuple[DeviceID, GpuPartitioning]], Topology]:
    """The partitioned GPUs of these allocations, with the partitioning of each, and the topology that it refers to."""
    gpus = {
        gpu
        for each in allocations
        for _, gpu, part in parts_of_allocation(each, topology)
        if not isinstance(part, Whole)
    }
    if gpus.isdisjoint(topology.gpu_by_id):
        return (), topology
    status = link.read_node()
    return [(gpu, each) for gpu, each in partitioning_by_gpu(status.state).items() if gpu in gpus], status.topology
