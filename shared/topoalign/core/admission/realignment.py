"""
Checks whether pods that wait for their kubelet are admitted in every order, whatever pods end before.

A kubelet aligns a pod when it admits it, to the first preferred set of NUMA nodes that has room. If another pod ends before,
an earlier set may have room, and the pod takes what was free there, too, which others were to get:

    policy restricted; free are 1 GPU, 2 CPUs and 40 GiB on NUMA node 0, and 1 GPU, 8 CPUs and 4 GiB on node 1
    A asks for 1 GPU and 4 CPUs and is aligned to node 1, B asks for 1 GPU and 20 GiB and is aligned to node 0, in any order
    a pod with 2 CPUs of node 0 ends: A is aligned to node 0 and takes its GPU, and B is refused

So of each pod all preferred sets count up to the first one with room, as `feasibility` finds them. Of an earlier one it
takes whatever is free there now, up to what it asks for; what else has ended helps the others, and does not count. A set
of several NUMA nodes counts as taken whole: how a pod is spread over it is not known from amounts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from topoalign.core.admission.feasibility import PodNeed, judge_amounts, left_where_taken
from topoalign.core.admission.free_amounts import Free, count_free, first_with_room
from topoalign.core.admission.share_alignment import by_pod, without_all
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.bitmask import several
from topoalign.core.state.fold import NodeState

MOST_STEPS = 300
"""Alignments that are tried for some pods. Three pods of one container take 20 to 80 on eight NUMA nodes, four up to 600."""

MOST_CONTAINER_STEPS = 2_000
"""Alignments that are tried for the containers of one pod. Eight of them take 250 on two NUMA nodes, four 600 on eight."""


class PendingPod(NamedTuple):
    """A pod that a kubelet will admit or refuse."""

    key: object
    """Equal for pods of one class: their order among one another does not matter."""
    demand: PodDemand
    """Under a unique name, unless amounts alone are judged."""
    must_fit: bool
    """Whether the whole plan fails if this pod is refused."""
    takes: PodNeed | None = None
    """Its consumption in amounts. None: not known."""
    decides: bool = False
    """Whether amounts alone decide whether it fits."""
    may_wait: bool = True
    """
    Whether it can wait until the end of another pod can no longer lead its kubelet to refuse it. A pod that is planned with
    its gang cannot if no other pod is pending: its reservation would end and be planned again on the same devices.
    """


class AlignmentBudget:
    """How many alignments may still be tried."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.left = most


def fit_whatever_ends(
    free: Free, pods: Sequence[PendingPod], steps: AlignmentBudget, later: Sequence[PendingPod] = ()
) -> bool:
    """
    Whether those of the pods that must fit are admitted where at least this is free, in whatever order all of them come and
    wherever each is aligned; then those that come `later`, one after the other. False also where amounts alone do not
    decide, or it takes more steps than are left.
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
    """Whether a pod is admitted wherever its containers are aligned one after the other. False: it may not be."""
    rest = need.rest
    steps.left -= rest is not None
    if steps.left < 0 or judge_amounts(need, free) != "":
        return False
    return rest is None or all(_fits_wherever(rest, left, steps) for left in _left_by_first(need, free))


def containers_fit(need: PodNeed, free: Free, most: Free, steps: AlignmentBudget | None = None) -> bool:
    """
    Whether a pod that is admitted where this is free is admitted whatever ends, judged by amounts only: once more is free,
    its first containers may be aligned to where they take what the others were to get. `most`: what is free when all has
    ended. False also where it takes more than `MOST_CONTAINER_STEPS`. Example under restricted, for a pod with 1 GPU and
    4 CPUs in one container and 2 GPUs in the next:

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
    """The node after the end of one of its pods, of each that may have another one aligned elsewhere than as it is now."""

    def place(now: NodeState) -> int:
        return need.first_with_room(count_free(now, rules))

    room = place(state)
    if need.rest is None and room in need.preferred[:1]:
        return
    for ended in by_pod(state.allocations.values()):
        left = without_all(state, ended)
        if need.rest is not None or place(left) != room:
            yield left


def fit_as_counted(free: Free, pods: Sequence[PendingPod]) -> bool:
    """Whether the pods are admitted one after the other where just this is free, each to one NUMA node."""
    for pod in pods:
        if pod.takes is None or pod.takes.rest is not None or not pod.decides or judge_amounts(pod.takes, free) != "":
            return False
        room = pod.takes.first_with_room(free)
        if not room or several(room):
            return False
        free = left_where_taken(pod.takes, free, room)
    return True


def have_ample_memory(free: Free, pods: Sequence[PendingPod]) -> bool:
    """Whether memory refuses none of these pods wherever a policy that admits without alignment aligns them."""
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
    """What may be left once the pod is admitted or refused, as `left_elsewhere`; all, where it may get nothing of it."""
    if pod.takes is None or not pod.takes.first_with_room(free):
        yield free
    if pod.takes is not None:
        yield from _left_after(pod.takes, free)


def left_elsewhere(pod: PendingPod, free: Free) -> Iterator[Free]:
    """What may be left once the pod is aligned to another set than the first one with room, and takes something."""
    if pod.takes is not None:
        is_one = pod.takes.rest is None
        moved = _left_by_first(pod.takes, free, besides=True) if is_one else _left_after(pod.takes, free)
        yield from (left for left in moved if left is not free)


def _left_after(need: PodNeed, free: Free) -> Iterator[Free]:
    """What may be left, by the sets that the containers of a pod are aligned to."""
    for left in _left_by_first(need, free):
        if need.rest is None:
            yield left
        else:
            yield from _left_after(need.rest, left)


def _left_by_first(need: PodNeed, free: Free, *, besides: bool = False) -> Iterator[Free]:
    """What may be left once the first container is aligned. `besides`: to another set than the first one with room."""
    room = need.first_with_room(free)
    for number in need.preferred:
        if number == room and besides:
            return
        yield left_where_taken(need, free, number)
        if number == room:
            return
