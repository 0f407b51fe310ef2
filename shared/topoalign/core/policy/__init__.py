"""
Topology policies: they merge hints, and decide whether the merged hint is admitted. The names are those of the kubelet.

A policy is a module with its class, a line in POLICIES and its name in `Policy`. Other code uses only its members.
"""

from collections.abc import Mapping

from topoalign.core.model.requests import Policy
from topoalign.core.policy.best_effort import BestEffortPolicy
from topoalign.core.policy.none import NonePolicy
from topoalign.core.policy.restricted import RestrictedPolicy
from topoalign.core.policy.single_numa_node import SingleNumaNodePolicy
from topoalign.core.policy.topology_policy import TopologyPolicy

POLICIES: Mapping[Policy, TopologyPolicy] = {
    Policy.NONE: NonePolicy(),
    Policy.BEST_EFFORT: BestEffortPolicy(),
    Policy.RESTRICTED: RestrictedPolicy(),
    Policy.SINGLE_NUMA_NODE: SingleNumaNodePolicy(),
}

PREFERRED_ALONE = Policy.RESTRICTED
"""The policy that merges as `best-effort` does, and refuses hints that are not preferred."""
