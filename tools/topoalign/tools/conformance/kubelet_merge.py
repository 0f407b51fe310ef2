"""The suite `kubelet/merge`: the merged hint of a topology policy."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from topoalign.core.model.hints import HintRule, Hints, TopologyHint
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import Policy
from topoalign.core.model.topology.bitmask import node_mask, nodes_of
from topoalign.core.numa_sets.subsets import hints_of_rule
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import offers_of_providers
from topoalign.core.policy.topology_policy import MergeQuestion
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome


class Hint(msgspec.Struct, frozen=True):
    """A hint as case files write it; `nodes` null stands for any."""

    nodes: list[int] | None
    preferred: bool

    @property
    def read(self) -> TopologyHint:
        """The hint in the types of the product."""
        return TopologyHint(None if self.nodes is None else node_mask(self.nodes), self.preferred)


def written(hint: TopologyHint) -> Hint:
    """A hint in the fields of a case."""
    return Hint(None if hint.affinity is None else list(nodes_of(hint.affinity)), hint.preferred)


def all_written(hints: Hints) -> list[Hint] | None:
    """All hints of a resource in the fields of a case; None means no preference."""
    listed_hints = hints_of_rule(hints) if isinstance(hints, HintRule) else hints
    return None if listed_hints is None else [written(hint) for hint in listed_hints]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a case."""

    prefer_closest_numa_nodes: bool = False


class Expected(msgspec.Struct, frozen=True):
    """The expected merged hint, and whether the policy admits it."""

    nodes: list[int] | None
    preferred: bool
    admit: bool


class MergeCase(msgspec.Struct, frozen=True):
    """A case of `kubelet/merge`; None for a provider or resource means no preference."""

    id: str
    numa_nodes: list[int]
    policy: Policy
    providers: list[dict[ResourceName, list[Hint] | None] | None]
    expect: Expected
    distances: list[list[int]] | None = None
    options: Options = Options()


def merge(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/merge`."""
    return results(path, MergeCase, outcome)


def outcome(case: MergeCase) -> Outcome:
    """Expected and actual merged hint of a case."""
    policy = POLICIES[case.policy]
    rows = case.distances if case.options.prefer_closest_numa_nodes else None
    distances = None if rows is None else distances_of(case.numa_nodes, rows)
    providers = [{name: hints_of(hints) for name, hints in (each or {}).items()} for each in case.providers]
    merged = policy.merge(MergeQuestion(offers_of_providers(providers), node_mask(case.numa_nodes), distances))
    return case.expect, Expected(written(merged).nodes, merged.preferred, policy.admits(merged))


def distances_of(nodes: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, dict[int, int]]:
    """
    Node -> node -> distance.

    The kubelet takes a node's id for the column. On sparse ids it would look past the end of a row that has one column per
    node; such a row is read by position. Raises ValueError for another number of rows or columns.
    """
    return {
        node: dict(enumerate(row)) if len(row) > max(nodes) else dict(zip(nodes, row, strict=True))
        for node, row in zip(nodes, rows, strict=True)
    }


def hints_of(hints: list[Hint] | None) -> Hints:
    """The hints of a resource in the types of the product."""
    return None if hints is None else tuple(hint.read for hint in hints)
