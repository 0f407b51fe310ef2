"""
Which cards a pod accepts, and how they are chosen: its annotations, read once.

Types are matched without regard to case, as a part of the model; uuids exactly. A list that is empty or blank is no
constraint; one that has only commas matches nothing.

Source: HAMi 4707fb02, CheckType, CheckUUID and the scheduler's policies.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.sharing.hami.go_text import is_true
from topoalign.core.sharing.hami.names import (
    CORDON,
    GPU_POLICY,
    NO_USE_TYPE,
    NO_USE_UUID,
    NUMA_BIND,
    SCORING_WEIGHTS,
    USE_TYPE,
    USE_UUID,
    VGPU_MODE,
)
from topoalign.core.sharing.hami.scores import read_weights
from topoalign.core.sharing.rules import EQUAL_WEIGHTS, Selection, Weights

BINPACK, SPREAD, NUMA = "binpack", "spread", "numa"
"""Policies that order the cards of a node."""
MUTEX, TOPOLOGY_AWARE = "mutex", "topology-aware"
"""Policies that take only unused cards, and the best connected ones."""


class PodRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod's annotations say about its cards."""

    types: Selection = Selection()
    uuids: Selection = Selection()
    mode: str | None = None
    """Modes that are accepted; a card's must be a part of it. None: all."""
    numa_bind: bool = False
    """Whether a container's cards are to be on one NUMA node."""
    policy: str = SPREAD
    """How cards are chosen: a policy, or several with commas in between."""
    weights: Weights = EQUAL_WEIGHTS

    @property
    def mutex(self) -> bool:
        """Whether only cards are taken that nobody uses."""
        return MUTEX in words(self.policy)

    @property
    def topology_aware(self) -> bool:
        """Whether the best connected cards are taken."""
        return TOPOLOGY_AWARE in words(self.policy)

    def takes_mode(self, mode: str) -> bool:
        """Whether a card in this mode is accepted."""
        return self.mode is None or mode in self.mode


def read_rules(annotations: Mapping[str, str], policy: str = SPREAD) -> PodRules:
    """The rules of a pod; `policy` where it names none. Raises InvalidField for weights that are not valid."""
    weights = annotations.get(SCORING_WEIGHTS)
    return PodRules(
        types=type_selection(annotations),
        uuids=uuid_selection(annotations),
        mode=annotations.get(VGPU_MODE),
        numa_bind=is_true(annotations.get(NUMA_BIND)),
        policy=annotations.get(GPU_POLICY, policy),
        weights=EQUAL_WEIGHTS if weights is None else read_weights(weights),
    )


def type_selection(annotations: Mapping[str, str]) -> Selection:
    """Which models the pod accepts."""
    return Selection(_listed(annotations, USE_TYPE), _listed(annotations, NO_USE_TYPE))


def uuid_selection(annotations: Mapping[str, str]) -> Selection:
    """Which uuids the pod accepts."""
    return Selection(_listed(annotations, USE_UUID), _listed(annotations, NO_USE_UUID))


def cordoned(node_annotations: Mapping[str, str]) -> frozenset[str]:
    """The uuids of the cards of a node that nobody is to get."""
    return frozenset(_listed(node_annotations, CORDON) or ())


def words(policy: str) -> tuple[str, ...]:
    """The policies in a list of them."""
    return tuple(each.strip() for each in policy.split(","))


def _listed(annotations: Mapping[str, str], key: str) -> tuple[str, ...] | None:
    text = annotations.get(key, "")
    return tuple(filter(None, words(text))) if text.strip() else None
