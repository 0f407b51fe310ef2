"""
The time of merging the providers' hints.

`8x5` and `12x5` are explicit lists of all hints, with no preferred hint common to all lists. In mode `best`, `64x8` are
hints by rule, of eight resources spread unevenly over 64 NUMA nodes; `gb200` is the whole decision about a pod on a
machine whose 34 NUMA nodes all have devices. The cases `growth` show the cost of the same pod on more NUMA nodes.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from topoalign.core.admission.admit import admit
from topoalign.core.hints.hint_rules import Supply
from topoalign.core.model.decisions import Decision
from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.bitmask import masks_by_size, node_mask
from topoalign.core.model.topology.model import PluginDevice
from topoalign.core.policy import POLICIES
from topoalign.core.policy.topology_policy import MergeQuestion
from topoalign.machines import load_machine
from topoalign.tools.bench.admit import empty_node, pod_of
from topoalign.tools.measuring import measure_calls

RESTRICTED = POLICIES[Policy.RESTRICTED]
LISTED = ((8, 5, 200), (12, 5, 100))
"""NUMA nodes, providers, calls."""
GROWTH = (8, 12, 16, 24, 34, 48, 64)
"""NUMA nodes."""
SLICE = ResourceName("example.com/slice")


def cases() -> Iterator[dict[str, object]]:
    """Measure each case; times in milliseconds."""
    for nodes, providers, n in LISTED:
        lists = [
            [TopologyHint(mask, mask.bit_count() == width) for mask in masks_by_size(range(nodes))]
            for width in range(1, providers + 1)
        ]
        question = MergeQuestion(lists, node_mask(range(nodes)))
        yield measure_calls(f"{nodes}x{providers}", partial(RESTRICTED.merge, question), n)
    yield measure_calls("64x8", partial(RESTRICTED.merge, by_rules(64, 8)), 100)
    yield measure_calls("gb200", gb200())
    for nodes in GROWTH:
        yield measure_calls(f"growth-{nodes}x5", partial(RESTRICTED.merge, by_rules(nodes, 5)), 50)


def by_rules(nodes: int, resources: int) -> MergeQuestion:
    """The merge of rules of resources of which each NUMA node has a little more or less, asked for on one to five nodes."""
    chance = random.Random(nodes)
    rules = []
    for number in range(resources):
        supply = {1 << node: chance.randint(4, 16) for node in range(nodes)}
        wanted = Supply(node_mask(range(nodes)), (ResourceNeed(10 * (number % 5 + 1), supply),))
        rules.append(HintRule(nodes=wanted.nodes, needs=wanted.needs, least=wanted.least_size() or 0))
    return MergeQuestion(rules, node_mask(range(nodes)), mode=Mode.BEST)


def gb200() -> Callable[[], Decision]:
    """4 GPUs, 64 CPUs, 4 NICs, 128 GiB and a device of each of two NUMA nodes, in mode `best`."""
    tray = load_machine("gb200-tray").topology
    slices = tuple(
        PluginDevice(id=DeviceID(f"slice-{node}-{i}"), resource=SLICE, nodes=(node,))
        for node in tray.node_ids
        for i in range(4)
    )
    state = empty_node(msgspec.structs.replace(tray, others=slices))
    pod = pod_of({GPU: 4, CPU: 64_000, NIC: 4, MEMORY: 128 << 30, SLICE: 6})
    rules = AdmissionRules(mode=Mode.BEST)
    return partial(admit, state, pod, rules)
