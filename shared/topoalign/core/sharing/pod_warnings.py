"""
Warns about settings of a pod that do not prevent it from running, but probably do not have the intended effect.

The webhook returns these texts as warnings of an AdmissionReview, and `what-if` prints them as notes:

    nvidia.com/gpumem: "4000" as an annotation      an amount is a limit of a container
    nvidia.com/use-gpu-uuid                         a key that nobody reads, similar to nvidia.com/use-gpuuuid
    nvidia.com/gpus: 2 as a limit                   a name that no node serves, similar to nvidia.com/gpu

Pods that are invalid, or that would get other devices than they name, are refused (`pod_checks`).

Kubernetes recommends at most 120 characters per warning, and can truncate warnings that are longer than 256 characters
(admission.k8s.io/v1, AdmissionResponse.warnings).
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from topoalign.core.demand import share_annotations
from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.gangs import annotation_path
from topoalign.core.demand.unserved import SETTINGS, nearest_name
from topoalign.core.deviceshare.demand import OWN_DOMAIN
from topoalign.core.deviceshare.koordinator_names import ALLOCATED_ANNOTATION, ANNOTATIONS, PARTITION_TABLE
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, NIC, ResourceName, is_native
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.device_offers import Slots

MOST = 8
"""Maximum number of warnings of a pod."""
LONGEST = 256
"""Maximum length of a warning in characters."""
MOST_LOOKED_AT = 64
"""
Maximum number of annotations that are checked, and of names in limits. A pod can have a thousand, and the comparison of
one with all known names takes 0.1 ms.
"""
CORE_LIMIT = "tencent.com/vcuda-core-limit"
"""Annotation of Gaia: how much computing time a pod's containers can use if other containers do not use it."""
READ = (*share_annotations.OF_PODS, CORE_LIMIT, *ANNOTATIONS)
"""Annotations that users write for HAMi, gpu-manager and Koordinator."""
AMOUNTS = frozenset(Slots().resources)
WRITTEN = frozenset((ALLOCATED_ANNOTATION, PARTITION_TABLE))
"""Annotations that a scheduler or a node writes. Their keys are similar to those in `READ`."""


def warnings_of(
    annotations: Mapping[str, str],
    limits: Mapping[ResourceName, str],
    served: Collection[ResourceName],
) -> tuple[str, ...]:
    """
    The warnings, at most `MOST`. `limits`: resource -> path of a container that names it in its limits. `served`: the
    resources that at least one node serves, including amounts.
    """

    def texts() -> Iterator[str]:
        # annotations that have no effect
        for key in sorted(annotations)[:MOST_LOOKED_AT]:
            path = annotation_path(key)
            if key in served or key in (GPU, NIC, *SETTINGS):
                if key not in limits:
                    yield f"{path}: has no effect; write it in resources.limits of a container"
            elif key == CORE_LIMIT:
                yield f"{path}: has no effect; a container gets its tencent.com/vcuda-core"
            elif key not in READ and key not in WRITTEN and not key.startswith(OWN_DOMAIN):
                meant = nearest_name(key, {*READ, *AMOUNTS})
                if meant is not None:
                    where = " in resources.limits of a container" if meant in AMOUNTS else ""
                    yield f"{path}: nobody reads this key; did you mean {meant}{where}?"
        # names that no node serves, but that are similar to one that a node serves
        unknown = sorted(name for name in limits if name not in served and name not in SETTINGS and not is_native(name))
        for name in unknown[:MOST_LOOKED_AT]:
            if (near := nearest_name(name, served)) is not None:
                path = f"{limits[name]}.resources.limits[{clean(name, 80)}]"
                yield f"{path}: topoalign serves no such name; did you mean {near}?"

    return tuple(clean(text, LONGEST) for text in islice(texts(), MOST))


def paths_of_limits(pod: PodRequest) -> dict[ResourceName, str]:
    """Resource that containers name in their limits -> path of one of these containers."""
    return {name: where for where, container in containers_with_paths(pod) for name in container.limits}
