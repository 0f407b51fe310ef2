"""
Checks whether the kubelet would admit all pending pods in every order, whichever running pods end first.

A kubelet aligns a new pod to the first preferred set of NUMA nodes with room. If another pod ends first, an earlier set
can get room. The pod then also takes resources that were already free there, and that other pending pods need:

    policy restricted; free are 1 GPU, 2 CPUs and 40 GiB on NUMA node 0, and 1 GPU, 8 CPUs and 4 GiB on node 1
    A requests 1 GPU and 4 CPUs, B requests 1 GPU and 20 GiB: in any order, A is aligned to node 1 and B to node 0
    a pod with 2 CPUs of node 0 ends: A is aligned to node 0 and takes its GPU, and B is refused

So for each pod, all preferred sets up to the first one with room are considered (`feasibility`). If the pod is aligned
to an earlier set, it takes what is free there now, up to its request. Other resources that ended pods release only help
the other pods, and are not counted. A pod that is aligned to several NUMA nodes is assumed to take everything on them,
because amounts do not show how it is spread.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from topoalign.core.admission.feasibility import PodNeed, judge_amounts, left_where_taken
from topoalign.core.admission.free_amounts import Free, count_free, first_with_room
from topoalign.core.admission.share_alignment import group_by_pod, without_all
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.bitmask import several
from topoalign.core.state.fold import NodeState

MOST_STEPS = 300
"""
Maximum number of alignments tried for a group of pods. On eight NUMA nodes, three pods with one container each need 20
to 80, and four need up to 600.
"""

MOST_CONTAINER_STEPS = 2_000
"""Maximum number for the containers of a pod. Eight containers on two NUMA nodes need 250, four on eight need 600."""


class PendingPod(NamedTuple):
    """A pod that a kubelet will admit or refuse."""

    key: object
    """Equal for pods of one class, whose relative order does not matter."""
    demand: PodDemand
    """The pod has a unique name, unless only amounts are compared."""
    must_fit: bool
    """Whether the whole plan fails if this pod is refused."""
    takes: PodNeed | None = None
    """The amounts that it takes from the set to which it is aligned. None: unknown; the predicted set is assumed."""
    decides: bool = False
    """Whether amounts alone decide whether it is admitted."""
    may_wait: bool = True
    """
    Whether the bind can wait as long as the end of another pod could make the kubelet refuse this pod. False for a pod
    that is planned with its gang while no other pod is pending. Its reservation would expire, and the gang would be
    planned on the same devices again.
    """


class AlignmentBudget:
    """The number of alignments that can still be tried."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.left = most


def fit_whatever_ends(
    free: Free, pods: Sequence[PendingPod], steps: AlignmentBudget, later: Sequence[PendingPod] = ()
) -> bool:
    """
    Whether all `must_fit` pods are admitted if at least `free` is free, in every order of `pods` and for every possible
    alignment of each, followed by the `later` pods in their order. Also False if amounts alone do not decide, or if the
    budget `steps` is exceeded.
    """
    tried = set()
    if not pods:
        pods = later[:1]
        later = later[1:]
    for place, pod in enumerate(pods):
        if pod.key in tried:
            continue
        tried.add(pod.key)
        steps.left -= 1
        if steps.left < 0:
            return False
        if pod.must_fit and not (pod.takes is not None and pod.decides and _fits_wherever(pod.takes, free, steps)):
            return False
        rest = (*pods[:place], *pods[place + 1 :])
        if (rest or later) and not all(fit_whatever_ends(left, rest, steps, later) for left in left_by(pod, free)):
            return False
    return True


def _fits_wherever(need: PodNeed, free: Free, steps: AlignmentBudget) -> bool:
    """Whether a pod is admitted for every possible alignment of its containers. False: it might be refused."""
    rest = need.rest
    steps.left -= rest is not None
    if steps.left < 0 or judge_amounts(need, free) != "":
        return False
    return rest is None or all(_fits_wherever(rest, left, steps) for left in _left_by_first(need, free))


def containers_fit(need: PodNeed, free: Free, most: Free, steps: AlignmentBudget | None = None) -> bool:
    """
    Whether a pod that is admitted with `free` is also admitted after other pods end, judged by amounts only. If more is
    free, its first containers can be aligned to NUMA nodes whose resources its later containers need. `most`: what is
    free when all running pods have ended. Also False if it takes more than `MOST_CONTAINER_STEPS`. Example under policy
    restricted, for a pod with 1 GPU and 4 CPUs in one container and 2 GPUs in the next:

        free: 2 GPUs and 2 CPUs on NUMA node 0, 1 GPU and 8 CPUs on node 1; a pod with CPUs of node 0 ends: the first
        container is aligned to node 0, and neither node has two GPUs for the second
    """
    if need.rest is None:
        return True
    steps = steps or AlignmentBudget(MOST_CONTAINER_STEPS)
    room = need.first_with_room(free)
    for number in need.preferred:
        left = left_where_taken(need, free, number)
        if number == room:
            return containers_fit(need.rest, left, most, steps)
        if first_with_room((number,), need.near, need.memory, most) and not _fits_wherever(need.rest, left, steps):
            return False
    return True


def iterate_realigning_ends(state: NodeState, rules: AdmissionRules, need: PodNeed) -> Iterator[NodeState]:
    """The node's states after one of its pods ends, for each pod whose end can change the alignment of the new pod."""

    def place(now: NodeState) -> int:
        return need.first_with_room(count_free(now, rules))

    room = place(state)
    if need.rest is None and room in need.preferred[:1]:
        return
    for ended in group_by_pod(state.allocations.values()).values():
        left = without_all(state, ended)
        if need.rest is not None or place(left) != room:
            yield left


def fit_as_counted(free: Free, pods: Sequence[PendingPod]) -> bool:
    """Whether the pods are admitted in this order if exactly `free` is free, each aligned to a single NUMA node."""
    for pod in pods:
        if pod.takes is None or pod.takes.rest is not None or not pod.decides or judge_amounts(pod.takes, free) != "":
            return False
        room = pod.takes.first_with_room(free)
        if not room or several(room):
            return False
        free = left_where_taken(pod.takes, free, room)
    return True


def have_ample_memory(free: Free, pods: Sequence[PendingPod]) -> bool:
    """Whether the memory manager admits all pods for every alignment, under a policy that admits unaligned pods."""
    asked = list[PodNeed]()
    total = Counter[ResourceName]()
    for pod in pods:
        need = pod.takes
        if need is None or not need.complete:
            return False
        while need is not None:
            asked.append(need)
            need = need.rest
    for each in asked:
        if any(several(number) for number in each.preferred) or (each.asks and each.memory and not each.preferred):
            return False
        total.update(dict(each.memory))
    nodes = [1 << node for node in range(len(free.usable).bit_length() - 1)]
    return bool(nodes) and all(
        free.usable[number] and all(free.within[name][number] >= amount for name, amount in total.items())
        for number in nodes
    )


def left_by(pod: PendingPod, free: Free) -> Iterator[Free]:
    """What can be free after the pod is admitted or refused. Includes `free` unchanged if the pod can be refused."""
    if pod.takes is None or not pod.takes.first_with_room(free):
        yield free
    if pod.takes is not None:
        yield from _left_after(pod.takes, free)


def left_elsewhere(pod: PendingPod, free: Free) -> Iterator[Free]:
    """What can be free if a pod is aligned to a preferred set before the first with room, and takes something there."""
    if pod.takes is not None:
        is_one = pod.takes.rest is None
        moved = _left_by_first(pod.takes, free, besides=True) if is_one else _left_after(pod.takes, free)
        yield from (left for left in moved if left is not free)


def _left_after(need: PodNeed, free: Free) -> Iterator[Free]:
    """What can be free after the pod, for each combination of sets to which its containers can be aligned."""
    for left in _left_by_first(need, free):
        if need.rest is None:
            yield left
        else:
            yield from _left_after(need.rest, left)


def _left_by_first(need: PodNeed, free: Free, *, besides: bool = False) -> Iterator[Free]:
    """What can be free after the first container is aligned. `besides`: to a set before the first one with room."""
    room = need.first_with_room(free)
    for number in need.preferred:
        if number == room and besides:
            return
        yield left_where_taken(need, free, number)
        if number == room:
            return
