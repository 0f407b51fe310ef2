"""
The quality of the GPU sets that each device policy grants, and of those that remain for the next pods.

Pods with 1, 2, 4 or 8 GPUs arrive and leave on a node, each with its share of the node's NICs, so that 60 to 95 % of
the GPUs are in use. Every pod is decided by `admission` as the kubelet decides (policy `restricted`, container scope):
the merge chooses the NUMA nodes, and the device policy chooses among the GPUs there. Unlike with a kubelet, the device
policy knows the number of NICs that the pod asks for, and NICs are chosen near its GPUs. All policies get the same
arrivals and departures. There are four figures, each the mean over all runs with its standard error (`_se`):

- `mean_score_ratio`: link score of a granted set of at least two GPUs, relative to the best set of an empty machine;
- `refused_ratio`: pods that were refused though enough GPUs and NICs were free, of all that asked;
- `pairs_on_switch_ratio`: granted NICs that share a PCIe switch with a GPU of their container;
- `fragmentation`: how much worse the best free sets of 2, 4 and 8 GPUs are than the best possible sets with as
  many free GPUs (`placement.fragmentation`).
"""

import random
from collections.abc import Iterator
from itertools import chain
from statistics import mean, stdev
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import admission, answer_to
from topoalign.core.admission.drive import drive
from topoalign.core.admission.pipeline import Question, Reply
from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, Placement, Policy
from topoalign.core.model.topology.links import PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pcie_class
from topoalign.core.placement.fragmentation import fragmentation
from topoalign.core.placement.preference import set_scorer
from topoalign.machines import load_machine
from topoalign.tools.bench.admit import empty_node, pod_of

MACHINES = ("dgx1-volta", "dgx2", "hgx-h100", "two-socket-8xpcie", "8x-nvlink-pairs")
RANDOM = "random"
POLICIES = (Placement.TOPOLOGY.value, Placement.BEST_EFFORT.value, Placement.SIMPLE.value, RANDOM)
SIZES = (1, 2, 4, 8)
SHARES = (0.4, 0.3, 0.2, 0.1)
"""How often each size is asked for."""
LOADS = (0.6, 0.75, 0.85, 0.95)
SEEDS = 10
STEPS = 200
"""Arrivals and departures of one run."""
ON_SWITCH = (PcieClass.PSB, PcieClass.PIX, PcieClass.PXB)


class Run(NamedTuple):
    """The figures of one run: one each, or none where nothing was to be judged."""

    mean_score_ratio: list[float]
    refused_ratio: list[float]
    pairs_on_switch_ratio: list[float]
    fragmentation: list[float]


def cases() -> Iterator[dict[str, object]]:
    """The figures of each device policy on each machine."""
    for machine in MACHINES:
        topology = load_machine(machine).topology
        for policy in POLICIES:
            runs = [Node(topology, policy, seed).run(load_) for load_ in LOADS for seed in range(SEEDS)]
            figures: dict[str, float] = {}
            for name, column in zip(Run._fields, zip(*runs, strict=True), strict=True):
                values = list(chain(*column))
                figures[name] = round(mean(values), 4)
                figures[f"{name}_se"] = round(stdev(values) / len(values) ** 0.5, 4)
            yield {"case": f"{machine}/{policy}", "machine": machine, "policy": policy, **figures, "n": len(runs)}


class Node:
    """One node while pods come and go."""

    def __init__(self, topology: Topology, policy: str, seed: int) -> None:
        self.topology = topology
        self.gpus = len(topology.gpus)
        self.arrivals = random.Random(seed)
        self.chance = random.Random(seed)
        self.state = empty_node(topology)
        self.policy = policy
        placement = Placement.SIMPLE if policy == RANDOM else Placement(policy)
        self.rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, placement=placement)
        self.telling = msgspec.structs.replace(self.rules, mode=Mode.BEST)
        """In this mode a plugin is told more than a kubelet tells it."""
        self.scorer = set_scorer(topology)
        self.position = {gpu.id: i for i, gpu in enumerate(topology.gpus)}
        self.asked = self.refused = 0
        self.links: list[float] = []
        self.pairs: list[float] = []
        self.broken: list[float] = []

    def run(self, load: float) -> Run:
        """Pods arrive while less than `load` of the GPUs is in use; otherwise, or after a pod did not fit, one departs."""
        full = False
        for step in range(STEPS):
            free = len(self.state.ownership.free(GPU))
            if full or self.gpus - free >= load * self.gpus:
                self.depart()
                full = False
            else:
                full = not self.arrive(step)
            self.broken.append(fragmentation(self.topology, self.state.ownership.free(GPU)).overall)
        return Run(
            average(self.links),
            [self.refused / self.asked] if self.asked else [],
            average(self.pairs),
            average(self.broken),
        )

    def arrive(self, step: int) -> bool:
        """Whether a pod of random size was admitted."""
        size = self.arrivals.choices(SIZES, SHARES)[0]
        nics = size * len(self.topology.nics) // self.gpus
        if size > len(self.state.ownership.free(GPU)) or nics > len(self.state.ownership.free(NIC)):
            return False
        self.asked += 1
        amounts = {resource: amount for resource, amount in {GPU: size, NIC: nics}.items() if amount}
        decision = drive(admission(self.state, pod_of(amounts, f"pod-{step}"), self.rules), self.answer)
        if not isinstance(decision, Admission):
            self.refused += 1
            return False
        for allocation in decision.allocations:
            self.state = self.state.holding(allocation)
            self.judge(allocation.devices[GPU], allocation.devices.get(NIC, ()))
        return True

    def depart(self) -> None:
        """Release a live allocation, drawn at random, if there is one."""
        live: list[AllocationID] = sorted(self.state.allocations)
        if live:
            self.state = self.state.without(self.arrivals.choice(live))

    def answer(self, asked: Question) -> Reply:
        """As this process knows it, and for the plugin by all that is asked; GPUs by chance where that is the policy."""
        if isinstance(asked, HintRequest):
            return answer_to(asked, self.state, self.rules)
        if self.policy == RANDOM and asked.resource == GPU:
            return tuple(self.chance.sample([*asked.available], asked.size))
        return answer_to(asked, self.state, self.telling)

    def judge(self, gpus: tuple[DeviceID, ...], nics: tuple[DeviceID, ...]) -> None:
        """Record the figures of a granted set of GPUs and NICs."""
        if len(gpus) > 1:
            self.links.append(self.scorer.own(tuple(self.position[gpu] for gpu in gpus)))
        if nics:
            beside = [any(pcie_class(self.topology, nic, gpu) in ON_SWITCH for gpu in gpus) for nic in nics]
            self.pairs.append(sum(beside) / len(nics))


def average(values: list[float]) -> list[float]:
    """The mean in a list of its own; empty for no values."""
    return [mean(values)] if values else []
