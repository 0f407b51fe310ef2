"""`topoalign why`: why a pod fits on no node of the cluster, and what would make it fit."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from topoalign.cli import options, whole_cluster
from topoalign.cli.allocation_commands import pod_name, pod_request, request_options
from topoalign.cli.explain import pod_in, pod_of_manifest
from topoalign.cli.options import PATH
from topoalign.cli.whole_cluster import ClusterOptions, ask_cluster, cluster_options, show_answer, show_reasons
from topoalign.kubelet.files import documents, manifest


@click.command()
@click.argument("name", metavar="[POD]", required=False)
@request_options
@click.option("--pod-file", type=PATH, metavar="FILE", help="Ask for this Pod (YAML or JSON).")
@cluster_options
@options.NATS
@options.JSON
def why(
    name: str | None,
    pod_file: Path | None,
    nats: str | None,
    as_json: bool,
    query: ClusterOptions,
    **asked: Any,
) -> int | None:
    """
    Show why a pod fits on no node of the cluster, and what would make it fit.

    Every node is asked what its kubelet would decide now. POD is NAMESPACE/NAME of a pod in Kubernetes, and kubectl reads
    it. Without POD, the options or a manifest describe the pod. If it fits nowhere, the exit code is 4.

    The nodeSelector, node affinity and tolerations of POD or the manifest are applied to the nodes that kubectl shows.

    --snapshot FILE stores the facts about the cluster, and --from FILE gives the same answer from them, on any machine.

    \b
    Examples:
      topoalign why ml/train
      topoalign why --gpus 8 --cpus 32 --pods 512 --snapshot cluster.ndjson
      topoalign why --gpus 8 --cpus 32 --policy best-effort --from cluster.ndjson --json
    """
    if name is not None:
        if pod_file is not None:
            raise click.UsageError("give the name of a pod or --pod-file, not both")
        pod = pod_of_manifest(partial(read_pod_of_kubernetes, name), asked, "the name of a pod")
    else:
        pod = pod_request(**asked) if pod_file is None else pod_in(pod_file, asked)
    return show_answer(*ask_cluster(nats, query, *pod, as_json=as_json), as_json, show_reasons)


def read_pod_of_kubernetes(name: str) -> manifest.PodManifest:
    """The pod of this name, read with kubectl. Raises KubectlFailed, and the errors of reading a manifest."""
    namespace, pod = pod_name(name)
    document = whole_cluster.get("pod", f"--namespace={namespace}", "--output=json", "--", pod)
    return manifest.read_manifest(documents.parse_document(document, "the answer of kubectl"))
