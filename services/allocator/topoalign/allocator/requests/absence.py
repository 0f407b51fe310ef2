"""Why nothing is known of an allocation or pod, in a sentence of its own for each reason."""

from topoalign.core.model.errors import NotFound, clean

REMEDY = "name an allocation's id, or a pod as NAMESPACE/NAME"


def lists_nothing(target: str) -> bool | None:
    """Stands for `DeviceAllocations.lists` on a node without a kubelet: it is not known which pods run."""
    return None


def absence(target: str, listed: bool | None, *, by_kubelet: bool) -> str:
    """
    The sentence with which `explain` answers for a target without allocation, decision or ending.

    `by_kubelet`: whether a kubelet admits the pods of this node; `listed`: whether it lists a pod of this name, None if it
    was not asked yet.

    Raises NotFound where no such pod is known to run. One that the kubelet refused is among them: it does not list it, and
    most often it has not asked for a device either.
    """
    if listed:
        return f"{clean(target, 300)} runs here and has no device of ours: none of its containers asked for one"
    if not by_kubelet:
        raise NotFound("allocation or pod", target, REMEDY)
    raise NotFound(
        "allocation or pod" if listed is None else "allocation or running pod",
        target,
        f"{REMEDY}; a pod that the kubelet refused is not known here: `kubectl describe pod` has its reason",
    )
