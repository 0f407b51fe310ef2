"""
Whether an answer from elsewhere can be one to its question.

A provider that left something out would read as one that does not care, and the pod would be admitted unaligned. A rule
larger than any that this machine's providers make would keep the search for an alignment busy for minutes, whatever its
limit on steps: each step looks at every need. So nothing is taken that the providers here could not have said, as far as
that is told without asking them.
"""

from itertools import pairwise
from typing import NamedTuple

from topoalign.core.deviceshare.node_devices import RESOURCES
from topoalign.core.hints.joint_devices import decided_jointly
from topoalign.core.hints.providers import asked_devices
from topoalign.core.hints.requested import cpu_request, manages_memory, memory_request
from topoalign.core.hints.rules import MOST_LISTED
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation
from topoalign.core.model.hints import HintAnswer, HintQuestion, HintRule, Hints
from topoalign.core.model.ids import CPU, ResourceName
from topoalign.core.model.topology.bitmask import Mask, mask_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.search import meets
from topoalign.core.numa_sets.subsets import MOST_NODES
from topoalign.core.profile import profile_of

MOST_HINTS = (1 << MOST_NODES) - 1
"""In one list: more NUMA nodes than these are never listed (`subsets`)."""

REMEDY = "see that the hinting service is of this version"


class Largest(NamedTuple):
    """The size of the largest rule that a provider makes of some resource on this machine."""

    needs: int
    supply: int
    """Entries per need."""
    besides: int


def check_answer(question: HintQuestion, answer: HintAnswer, topology: Topology) -> None:
    """
    All providers have spoken, on every resource that was asked for, of NUMA nodes that exist and within what they could say.

    Raises InvalidField that says what is wrong.
    """
    if answer.providers.keys() != {"device", "cpu", "memory"}:
        raise InvalidField("providers", "not device, cpu and memory", REMEDY)
    check_resources(question, answer, topology)
    machine = mask_of(topology.node_ids or (0,))
    for provider, resources in answer.providers.items():
        for resource, hints in resources.items():
            if isinstance(hints, HintRule):
                fault = fault_of_rule(hints, machine, largest_rule(provider, resource, question, topology))
            else:
                fault = fault_of_list(hints, machine, may_not_care(provider, resource, question, topology))
            if fault:
                raise InvalidField(f"providers.{provider}[{resource}]", fault, REMEDY)


def check_resources(question: HintQuestion, answer: HintAnswer, topology: Topology) -> None:
    """
    Raises InvalidField where a provider left a resource out, or speaks of another.

    On memory nothing at all may be said by the kubelet, for what fits nowhere, and for a container that holds some already
    and asks for another amount.
    """
    pod, container, rules = question.pod, question.container, question.rules
    devices = {name for name, _ in asked_devices(topology, pod, container, rules)}
    cpus = {CPU} if rules.cpu_manager == "static" and cpu_request(pod, container, rules.mode) else set()
    memory = memory_of(question)
    said = {provider: set(resources) for provider, resources in answer.providers.items()}
    omitted = profile_of(rules.mode).silent_on_unmet_memory or any(each.memory for each in held_before(question))
    silent = not said["memory"] and omitted
    if said["device"] != devices or said["cpu"] != cpus or (said["memory"] != memory and not silent):
        raise InvalidField("providers", "not on the resources that were asked for", REMEDY)


def memory_of(question: HintQuestion) -> set[ResourceName]:
    """The resources that the memory manager is asked for."""
    if question.rules.memory_manager == "None" or not manages_memory(question.pod, question.rules.mode):
        return set()
    return set(memory_request(question.pod, question.container, question.rules.mode))


def held_before(question: HintQuestion) -> list[Allocation]:
    """What containers of the pod hold already, which may restrict the others to some NUMA nodes."""
    pod = (question.pod.name, question.pod.namespace)
    return [
        held
        for held in question.allocations
        if held.owner is not None and (held.owner.pod, held.owner.namespace) == pod
    ]


def may_not_care(provider: str, resource: ResourceName, question: HintQuestion, topology: Topology) -> bool:
    """Whether no opinion can be meant: only on devices of which no NUMA node is known, or that are decided jointly."""
    if provider != "device":
        return False
    together = resource in RESOURCES and decided_jointly(question.pod, question.rules)
    return together or not any(topology.devices[resource].values())


def largest_rule(provider: str, resource: ResourceName, question: HintQuestion, topology: Topology) -> Largest:
    """
    Devices and CPUs are one need, and one more for each place where the pod left some; devices are supplied from as many
    places as there are devices. Memory is a need per resource and one that keeps groups apart; it may have, beside the
    nodes that are free, those in use alone or in groups, and the groups of what the pod left.
    """
    nodes, before = len(topology.nodes), held_before(question)
    if provider == "memory":
        return Largest(len(memory_of(question)) + 1, nodes, 2 * nodes + sum(len(each.memory) for each in before))
    places = len(topology.devices.get(resource, ())) if provider == "device" else nodes
    return Largest(1 + (nodes if before else 0), max(1, places), 0)


def fault_of_list(hints: Hints, machine: Mask, may_not_care: bool) -> str:
    """What is wrong with hints that are listed; nothing if they can be meant."""
    if hints is None:
        return "" if may_not_care else "has no opinion, and there is something to align to"
    assert not isinstance(hints, HintRule), "rules are judged by `fault_of_rule`"
    if len(hints) > MOST_HINTS:
        return f"has {len(hints)} hints, and at most {MOST_HINTS} are listed"
    if any(hint.affinity is None for hint in hints):
        return "has a hint that names no NUMA nodes"
    if any(not within(hint.affinity or 0, machine) for hint in hints):
        return "names NUMA nodes that do not exist"
    return ""


def fault_of_rule(rule: HintRule, machine: Mask, largest: Largest) -> str:
    """What is wrong with a rule; nothing if it can be meant. Sizes are looked at first: they bound what the rest costs."""
    if machine.bit_count() <= MOST_LISTED:
        return "is a rule, and hints for so few NUMA nodes are listed"
    sizes = (len(rule.needs), max((len(need.supply) for need in rule.needs), default=0), len(rule.besides))
    if any(size > most for size, most in zip(sizes, largest, strict=True)):
        return "is larger than any rule for this request on this machine"
    if rule.nodes & ~machine or not all(within(mask, machine) for mask in rule.besides):
        return "names NUMA nodes that do not exist"
    if not all(within(mask, rule.nodes) for need in rule.needs for mask in need.supply):
        return "counts what is near none of its NUMA nodes"
    if any(amount < 0 for need in rule.needs for amount in (need.amount, *need.supply.values())):
        return "has amounts below 0"
    if not any(need.amount for need in rule.needs):
        return "needs nothing, which no NUMA node at all would meet"
    if not 1 <= rule.least <= machine.bit_count():
        return f"prefers {rule.least} of {machine.bit_count()} NUMA nodes"
    if any(one >= other for one, other in pairwise(rule.besides)):
        return "has masks besides that do not ascend"
    if not rule.besides and not meets(rule.needs, rule.nodes):
        return "has needs that its NUMA nodes do not meet"
    return ""


def within(mask: Mask, nodes: Mask) -> bool:
    """Whether a mask names some of these nodes and nothing else."""
    return mask > 0 and not mask & ~nodes
