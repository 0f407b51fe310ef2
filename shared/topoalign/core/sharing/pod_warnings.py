"""
Warns about settings of a pod that do not prevent it from running, and that probably do not do what the user wants.

The webhook returns these texts as warnings of an AdmissionReview, and `what-if` prints them as notes:

    nvidia.com/gpumem: "4000" as an annotation      an amount is a limit of a container
    nvidia.com/use-gpu-uuid                         a key that nobody reads, near nvidia.com/use-gpuuuid
    hami.io/node-scheduler-policy: spread           a preference without effect where nodes are ranked otherwise
    nvidia.com/gpus: 2 as a limit                   a name that no node serves, near nvidia.com/gpu

What is invalid, or would get other devices than it names, is refused (`pod_checks`).

Kubernetes asks for at most 120 characters in a warning, and may cut what is longer than 256 (admission.k8s.io/v1,
AdmissionResponse.warnings).
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice

from topoalign.core.demand import share_annotations
from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.gangs import annotation_path
from topoalign.core.demand.shares import USUAL_SLOTS
from topoalign.core.demand.unserved import SETTINGS, nearest_name
from topoalign.core.deviceshare.demand import OWN_DOMAIN
from topoalign.core.deviceshare.koordinator_names import ALLOCATED_ANNOTATION, ANNOTATIONS, PARTITION_TABLE
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, NIC, ResourceName, is_native
from topoalign.core.model.requests import PodRequest

MOST = 8
"""Warnings of a pod."""
LONGEST = 256
"""Characters of a warning."""
MOST_LOOKED_AT = 64
"""Annotations, and names in limits: a pod may have a thousand, and comparing one with all that are known takes 0.1 ms."""
CORE_LIMIT = "tencent.com/vcuda-core-limit"
"""Gaia's: up to how much computing time the containers of a pod may use while nobody else does."""
READ = (*share_annotations.OF_PODS, CORE_LIMIT, *ANNOTATIONS)
"""Annotations that users write for HAMi, gpu-manager and Koordinator."""
AMOUNTS = frozenset(USUAL_SLOTS.slots.resources)
WRITTEN = frozenset((ALLOCATED_ANNOTATION, PARTITION_TABLE))
"""Annotations that a scheduler or a node writes, of which the keys are near those."""
DOMAINS = frozenset(key.partition("/")[0] for key in READ) | {"koordinator.sh", "volcano.sh"}
"""Where a key is looked for under another domain."""


def warnings_of(
    annotations: Mapping[str, str],
    limits: Mapping[ResourceName, str],
    served: Collection[ResourceName],
    *,
    ranks_as_hami: bool = False,
) -> tuple[str, ...]:
    """
    The texts, at most `MOST`. `limits`: resource -> path of the container that names it in its limits; `served`: what some
    node serves, amounts included; `ranks_as_hami`: whether HAMi's policies rank the nodes.
    """
    resources = {*served, GPU, NIC, *SETTINGS}
    found = chain(
        _warn_of_annotations(annotations, limits, resources, ranks_as_hami=ranks_as_hami),
        _warn_of_limits(limits, served),
    )
    return tuple(clean(text, LONGEST) for text in islice(found, MOST))


def paths_of_limits(pod: PodRequest) -> dict[ResourceName, str]:
    """The resources that containers name in their limits, each with the path of one of them."""
    return {name: where for where, container in containers_with_paths(pod) for name in container.limits}


def _warn_of_annotations(
    annotations: Mapping[str, str],
    limits: Collection[ResourceName],
    resources: Collection[str],
    *,
    ranks_as_hami: bool,
) -> Iterator[str]:
    """Of annotations that have no effect. `resources`: by which devices can be asked for."""
    for key in sorted(annotations)[:MOST_LOOKED_AT]:
        if key in resources:
            if key not in limits:
                yield f"{annotation_path(key)}: has no effect; write it in resources.limits of a container"
        elif key == share_annotations.NODE_POLICY and not ranks_as_hami:
            yield f"{annotation_path(key)}: has no effect unless nodes are ranked by TOPOALIGN_SCORING=hami"
        elif key == CORE_LIMIT:
            yield f"{annotation_path(key)}: has no effect; a container gets its tencent.com/vcuda-core"
        elif (meant := _meant_key(key)) is not None:
            where = " in resources.limits of a container" if meant in AMOUNTS else ""
            yield f"{annotation_path(key)}: nobody reads this key; did you mean {meant}{where}?"


def _meant_key(key: str) -> str | None:
    """The key that this one was probably meant for. None: it is known, or of another domain."""
    if key in READ or key in WRITTEN or key.startswith(OWN_DOMAIN):
        return None
    return nearest_name(key, {*READ, *AMOUNTS}, any_domain=key.partition("/")[0] in DOMAINS)


def _warn_of_limits(limits: Mapping[ResourceName, str], served: Collection[ResourceName]) -> Iterator[str]:
    """Of names that no node serves, near one that some node serves. `limits`: name -> path of a container."""
    unknown = sorted(name for name in limits if name not in served and name not in SETTINGS and not is_native(name))
    for name in unknown[:MOST_LOOKED_AT]:
        if (meant := nearest_name(name, served)) is not None:
            yield f"{limits[name]}.resources.limits[{clean(name, 80)}]: topoalign serves no such name; did you mean {meant}?"
