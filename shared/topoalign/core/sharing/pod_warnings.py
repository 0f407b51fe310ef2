"""
Warns about settings of a pod that do not prevent it from running, and that probably do not do what the user wants.

The webhook returns these texts as warnings of an AdmissionReview, and `what-if` prints them as notes:

    nvidia.com/gpumem: "4000" as an annotation      an amount is a limit of a container
    nvidia.com/use-gpu-uuid                         a key that nobody reads, near nvidia.com/use-gpuuuid
    nvidia.com/gpus: 2 as a limit                   a name that no node serves, near nvidia.com/gpu

What is invalid, or would get other devices than it names, is refused (`pod_checks`).

Kubernetes asks for at most 120 characters in a warning, and may cut what is longer than 256 (admission.k8s.io/v1,
AdmissionResponse.warnings).
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
"""Warnings of a pod."""
LONGEST = 256
"""Characters of a warning."""
MOST_LOOKED_AT = 64
"""Annotations, and names in limits: a pod may have a thousand, and comparing one with all that are known takes 0.1 ms."""
CORE_LIMIT = "tencent.com/vcuda-core-limit"
"""Gaia's: up to how much computing time the containers of a pod may use while nobody else does."""
READ = (*share_annotations.OF_PODS, CORE_LIMIT, *ANNOTATIONS)
"""Annotations that users write for HAMi, gpu-manager and Koordinator."""
AMOUNTS = frozenset(Slots().resources)
WRITTEN = frozenset((ALLOCATED_ANNOTATION, PARTITION_TABLE))
"""Annotations that a scheduler or a node writes, of which the keys are near those."""


def warnings_of(
    annotations: Mapping[str, str],
    limits: Mapping[ResourceName, str],
    served: Collection[ResourceName],
) -> tuple[str, ...]:
    """
    The texts, at most `MOST`. `limits`: resource -> path of the container that names it in its limits; `served`: what some
    node serves, amounts included.
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
        # names that no node serves, near one that some node serves
        unknown = sorted(name for name in limits if name not in served and name not in SETTINGS and not is_native(name))
        for name in unknown[:MOST_LOOKED_AT]:
            if (near := nearest_name(name, served)) is not None:
                path = f"{limits[name]}.resources.limits[{clean(name, 80)}]"
                yield f"{path}: topoalign serves no such name; did you mean {near}?"

    return tuple(clean(text, LONGEST) for text in islice(texts(), MOST))


def paths_of_limits(pod: PodRequest) -> dict[ResourceName, str]:
    """The resources that containers name in their limits, each with the path of one of them."""
    return {name: where for where, container in containers_with_paths(pod) for name in container.limits}
