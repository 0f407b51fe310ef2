"""Reads from a ResourceQuota's manifest what it limits that Kubernetes itself does not count: `limits.<resource>`."""

from collections.abc import Mapping

from topoalign.core.model.ids import ResourceName
from topoalign.kubelet.files.quantities import whole

LIMITS = "limits."
"""How the keys of `spec.hard` begin that are about limits."""


def limits_of(hard: Mapping[str, str | int | float]) -> dict[ResourceName, int]:
    """
    Extended resource -> its limit in `spec.hard`. An amount that is none is no limit; an API server shows none.

    `limits.nvidia.com/gpumem: 2k` is a limit of 2000; `limits.cpu` and `requests.nvidia.com/gpu` are Kubernetes' own.
    """
    return {
        ResourceName(name.removeprefix(LIMITS)): amount
        for name, said in hard.items()
        if name.startswith(LIMITS) and "/" in name and (amount := whole(str(said))) is not None
    }
