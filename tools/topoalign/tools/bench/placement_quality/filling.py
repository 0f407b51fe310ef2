"""
How full a cluster gets before the first pod finds no place: 8 nodes of 8 A100, pods with parts of one GPU or whole ones.

- `ours`: the score `quality` with its default settings ranks the nodes, and the pod is admitted by the first that would;
- `fgd`: fragmentation gradient descent (ATC'23), as its paper and the README of `../shared/vectors/openb` define it: the
  node and GPU where the expected amount of GPU that a task of the workload cannot use grows least. For free thousandths f of
  a node and task types (k, m) of probability p:
  F = sum over types of p x (all of f if the task does not fit there, else those f that are smaller than what it needs of one
  GPU: m for a part, 1000 for whole ones). It is given the true probabilities;
- `best-fit`: the GPUs with the least left that have enough, of equals on the node with the least left.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.machines import load_machine
from topoalign.tools.bench.admit import NODE, pod_of

NODES = 8
GPUS = 8
WHOLE = 1000
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)
"""Those of a kubelet without configuration."""


class Task(NamedTuple):
    """A kind of pod: so many GPUs, and thousandths of each."""

    gpus: int
    milli: int


Workload = Sequence[tuple[Task, float]]
"""Kinds of pods, and how often each comes."""
Node = tuple[int, ...]
"""Thousandths that are free of each GPU, ascending."""
Place = Callable[[Sequence[Node], Task], tuple[int, Node] | None]
"""The node that takes a pod, and what is free there afterwards; None: no node does."""


def tasks(workload: Workload, seed: int) -> Iterator[Task]:
    """An endless stream of pods."""
    chance = Random(seed)
    kinds, weights = zip(*workload, strict=True)
    while True:
        yield chance.choices(kinds, weights)[0]


def filled(workload: Workload, place: Place, seed: int) -> float:
    """The part of the capacity that is given when the first pod finds no place."""
    nodes = [(WHOLE,) * GPUS] * NODES
    given = 0
    for task in tasks(workload, seed):
        found = place(nodes, task)
        if found is None:
            break
        at, nodes[at] = found
        given += task.gpus * task.milli
    return given / (NODES * GPUS * WHOLE)


def filled_by_us(workload: Workload, seed: int) -> float:
    """The same by the product's own functions."""
    states = [node_in_slots()] * NODES
    slots = Slots()
    given = 0
    for task in tasks(workload, seed):
        amount = task.milli // 10
        pod = pod_of({GPU: task.gpus, slots.cores: amount, slots.percentage: amount}, f"pod-{given}")
        if not admitted_by_first(states, read_pod(pod, RULES)):
            break
        given += task.gpus * task.milli
    return given / (NODES * GPUS * WHOLE)


def node_in_slots() -> NodeState:
    """A DGX A100 of whose GPUs nothing is held, each in 100 slots."""
    plain = load_machine("dgx-a100").topology
    offer = Offer(resource=GPU, devices=tuple(plain.gpu_by_id), replicas=100, slots=Slots(), limiter="none")
    health = dict.fromkeys(offer.devices, DeviceHealth(state=HealthState.HEALTHY))
    return initial_state(NODE, msgspec.structs.replace(plain, offers=(offer,)), health, "described: bench")


def admitted_by_first(states: list[NodeState], demand: PodDemand) -> bool:
    """Admits the pod on the first node, in the order of the scores, that accepts it. False: none does."""
    scorer = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
    need = scorer.need(states[0].hardware, demand)
    keys = [scorer.key(state.hardware, need, scorer.left(state, RULES)) for state in states]
    scores = scorer.scores(keys)
    for at in sorted(range(len(states)), key=lambda at: -scores[at]):
        decision = decide_demand(states[at], demand)
        if isinstance(decision, Admission):
            for allocation in decision.allocations:
                states[at] = states[at].holding(allocation)
            return True
    return False


def gradient_descent(workload: Workload) -> Place:
    """The placement of `fgd`."""
    total = sum(weight for _, weight in workload)
    chances = [(task, weight / total) for task, weight in workload]

    @cache
    def unusable(node: Node) -> float:
        return sum(chance * (sum(node) if not fits(node, task) else wasted(node, task)) for task, chance in chances)

    @cache
    def best(node: Node, task: Task) -> tuple[float, Node] | None:
        rests = (without(node, gpus, task.milli) for gpus in choices(node, task))
        return min(((round(unusable(rest) - unusable(node), 6), rest) for rest in rests), default=None)

    def place(nodes: Sequence[Node], task: Task) -> tuple[int, Node] | None:
        found = [(step[0], at, step[1]) for at, node in enumerate(nodes) if (step := best(node, task)) is not None]
        return min(found)[1:] if found else None

    return place


def best_fit(nodes: Sequence[Node], task: Task) -> tuple[int, Node] | None:
    """The placement of `best-fit`."""
    found = []
    for at, node in enumerate(nodes):
        for gpus in choices(node, task):
            found.append(([node[gpu] for gpu in gpus], sum(node), at, without(node, gpus, task.milli)))
    return min(found)[2:] if found else None


def choices(node: Node, task: Task) -> Iterator[tuple[int, ...]]:
    """The sets of GPUs of a node that differ in what is free of them, each once."""
    enough = [gpu for gpu, free in enumerate(node) if free >= task.milli]
    if task.gpus > 1 or task.milli == WHOLE:
        if len(enough) >= task.gpus:
            yield tuple(enough[: task.gpus])
        return
    yield from ((gpu,) for gpu in {node[gpu]: gpu for gpu in enough}.values())


def fits(node: Node, task: Task) -> bool:
    """Whether the task fits on the node."""
    return sum(free >= task.milli for free in node) >= task.gpus


def wasted(node: Node, task: Task) -> int:
    """The thousandths of GPUs that have too little for the task."""
    return sum(free for free in node if free < task.milli)


def without(node: Node, gpus: Sequence[int], milli: int) -> Node:
    """What is left of the node."""
    return tuple(sorted(free - milli if gpu in gpus else free for gpu, free in enumerate(node)))
