"""
Checks that a hint answer from another process is valid for its request.

A resource that a provider omits would count as no preference, and the pod would be admitted unaligned. A rule that is
larger than any rule of this machine's providers would keep the search busy for minutes despite its limit on steps,
because each step compares every need.
"""

from itertools import pairwise

from topoalign.core.hints.hint_rules import MOST_LISTED
from topoalign.core.hints.provider import HintRequest, Largest
from topoalign.core.hints.providers import PROVIDERS
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.hints import HintAnswer, HintRule, Hints
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.numa_sets.search import mask_meets_needs
from topoalign.core.numa_sets.subsets import MOST_NODES

MOST_HINTS = (1 << MOST_NODES) - 1
"""The most hints in one list. Subsets of more NUMA nodes are never listed (`subsets`)."""

REMEDY = "see that the hinting service is of this version"


def check_answer(asked: HintRequest, answer: HintAnswer) -> None:
    """Raises InvalidField if the providers here cannot return this answer. The error names the fault."""
    if answer.providers.keys() != PROVIDERS.keys():
        *names, last = PROVIDERS
        raise InvalidField("providers", f"not {', '.join(names)} and {last}", REMEDY)
    for name, provider in PROVIDERS.items():
        answered = answer.providers[name]
        silent = not answered and provider.may_be_silent(asked)
        if answered.keys() != provider.resources(asked) and not silent:
            raise InvalidField("providers", "not on the resources that were asked for", REMEDY)
    machine = node_mask(asked.state.hardware.node_ids or (0,))
    for name, resources in answer.providers.items():
        provider = PROVIDERS[name]
        for resource, hints in resources.items():
            if isinstance(hints, HintRule):
                fault = _fault_of_rule(hints, machine, provider.largest_rule(resource, asked))
            else:
                fault = _fault_of_list(hints, machine, provider.may_have_no_opinion(resource, asked))
            if fault:
                raise InvalidField(f"providers.{name}[{resource}]", fault, REMEDY)


def _fault_of_list(hints: Hints, machine: Mask, may_not_care: bool) -> str:
    """The fault of listed hints. Empty: none."""
    if hints is None:
        return "" if may_not_care else "has no opinion, and there is something to align to"
    assert not isinstance(hints, HintRule), "rules are judged by `_fault_of_rule`"
    if len(hints) > MOST_HINTS:
        return f"has {len(hints)} hints, and at most {MOST_HINTS} are listed"
    if any(hint.affinity is None for hint in hints):
        return "has a hint that names no NUMA nodes"
    if any(not _is_subset_of(hint.affinity or 0, machine) for hint in hints):
        return "names NUMA nodes that do not exist"
    return ""


def _fault_of_rule(rule: HintRule, machine: Mask, largest: Largest) -> str:
    """The fault of a rule. Empty: none. Sizes are compared first, because they bound the cost of the other checks."""
    if machine.bit_count() <= MOST_LISTED:
        return "is a rule, and hints for so few NUMA nodes are listed"
    sizes = (len(rule.needs), max((len(need.supply) for need in rule.needs), default=0), len(rule.besides))
    if any(size > most for size, most in zip(sizes, largest, strict=True)):
        return "is larger than any rule for this request on this machine"
    if rule.nodes & ~machine or not all(_is_subset_of(mask, machine) for mask in rule.besides):
        return "names NUMA nodes that do not exist"
    if not all(_is_subset_of(mask, rule.nodes) for need in rule.needs for mask in need.supply):
        return "counts what is near none of its NUMA nodes"
    if any(amount < 0 for need in rule.needs for amount in (need.amount, *need.supply.values())):
        return "has amounts below 0"
    if not any(need.amount for need in rule.needs):
        return "needs nothing, which no NUMA node at all would meet"
    if not 1 <= rule.least <= machine.bit_count():
        return f"prefers {rule.least} of {machine.bit_count()} NUMA nodes"
    if any(one >= other for one, other in pairwise(rule.besides)):
        return "has masks besides that do not ascend"
    if not rule.besides and not mask_meets_needs(rule.needs, rule.nodes):
        return "has needs that its NUMA nodes do not meet"
    return ""


def _is_subset_of(mask: Mask, nodes: Mask) -> bool:
    return mask > 0 and not mask & ~nodes
