"""
Reads the annotations of a pod, as HAMi does, that restrict which GPUs it accepts and how they are chosen.

A type matches if the model contains it, without regard to case; uuids match exactly. A list that is empty or blank is no
constraint; one that has only commas matches nothing (`demand.share_annotations` describes how lists are read).

Source: HAMi 4707fb02, CheckType, CheckUUID and the scheduler's policies.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.demand.share_annotations import (
    CORDON,
    EQUAL_WEIGHTS,
    VGPU_MODE,
    GpuRules,
    Selection,
    Weights,
    read_as_hami,
    read_list_annotation,
    split_list,
)

BINPACK = "binpack"
SPREAD = "spread"
NUMA = "numa"
"""Policies that order the GPUs of a node."""
MUTEX = "mutex"
TOPOLOGY_AWARE = "topology-aware"
"""Policies that take only unused GPUs, and the best connected ones."""


class PodRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a pod's annotations about its GPUs."""

    types: Selection = Selection()
    uuids: Selection = Selection()
    mode: str | None = None
    """Modes that are accepted; a GPU's must be a part of it. None: all."""
    numa_bind: bool = False
    """Whether a container's GPUs are to be on one NUMA node."""
    policy: str = SPREAD
    """How GPUs are chosen: a policy, or several with commas in between."""
    weights: Weights = EQUAL_WEIGHTS

    @property
    def mutex(self) -> bool:
        """Whether only GPUs are taken that nobody uses."""
        return MUTEX in split_list(self.policy)

    @property
    def topology_aware(self) -> bool:
        """Whether the best connected GPUs are taken."""
        return TOPOLOGY_AWARE in split_list(self.policy)

    def takes_mode(self, mode: str) -> bool:
        """Whether a GPU in this mode is accepted."""
        return self.mode is None or mode in self.mode


def read_rules(annotations: Mapping[str, str], policy: str = SPREAD) -> PodRules:
    """The rules of a pod; `policy` where it names none. Raises InvalidField for weights that are not valid."""
    return pod_rules(read_as_hami(annotations, policy), annotations.get(VGPU_MODE))


def pod_rules(rules: GpuRules, mode: str | None = None) -> PodRules:
    """The rules, with the modes that are accepted, as `fit` takes them."""
    return PodRules(
        types=rules.types,
        uuids=rules.uuids,
        mode=mode,
        numa_bind=rules.numa_bind,
        policy=rules.hami,
        weights=rules.weights,
    )


def read_cordoned_gpus(node_annotations: Mapping[str, str]) -> frozenset[str]:
    """The uuids of the GPUs of a node that nobody is to get."""
    return frozenset(read_list_annotation(node_annotations, CORDON) or ())
