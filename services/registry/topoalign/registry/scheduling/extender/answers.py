"""
What kube-scheduler reads: the answers to its calls, as JSON in Go's spelling.

A node stands in one map at most: the text of the second one would win. A node of a preemption never has null or no victims:
null ends the scheduler, and an empty list costs the whole answer. Scores are integers: of `9.0` the whole answer is
dropped.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import field

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.extender.arguments import Asked, MetaPod, MetaVictims
from topoalign.registry.scheduling.extender.refusals import text_of, text_of_error, text_of_pod
from topoalign.registry.scheduling.model import Filtered, Victims

VICTIMS_COUNT_FROM = (1, 38)
"""
The first version of Kubernetes that calls preempt for nodes in FailedNodes. An earlier one evicts nobody for them, and fails
in a new way at each try, which wakes the pod: 775 calls in 10 s.
"""

RENDERED_KEPT = 16
"""Answers of which the bytes are kept: of 1,000 nodes one has 0.1 MB."""


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """Whole nodes, as they came."""

    metadata: dict[str, str] = {}
    items: list[msgspec.Raw]


class FilterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to filter: nodes in the form in which they were asked about, and a text for each that is refused."""

    nodes: NodeList | None = field(name="Nodes", default=None)
    node_names: Sequence[NodeName] | None = field(name="NodeNames", default=None)
    failed: Mapping[NodeName, str] = field(name="FailedNodes", default={})
    unresolvable: Mapping[NodeName, str] = field(name="FailedAndUnresolvableNodes", default={})
    error: str = field(name="Error", default="")


class Score(msgspec.Struct, frozen=True, gc=False):
    """The score of a node, in the answer to prioritize."""

    host: NodeName = field(name="Host")
    score: int = field(name="Score")


class PreemptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to preempt."""

    victims: Mapping[NodeName, MetaVictims] = field(name="NodeNameToMetaVictims")


class BindAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to bind."""

    error: str = field(name="Error")


def filter_answer(asked: Asked, filtered: Filtered, kubernetes: tuple[int, int]) -> bytes:
    """Which nodes pass, and for each other why not; `kubernetes`: the scheduler's version, major and minor."""
    helps = kubernetes >= VICTIMS_COUNT_FROM
    failed: dict[NodeName, str] = {}
    unresolvable: dict[NodeName, str] = {}
    for node, refusal in filtered.refused.items():
        (failed if helps and refusal.helped_by_victims else unresolvable)[node] = text_of(
            refusal.code, refusal.resolvability
        )
    if asked.whole is None:
        return encoded(FilterAnswer(node_names=filtered.passed, failed=failed, unresolvable=unresolvable))
    whole = NodeList(items=[asked.whole[node] for node in filtered.passed])
    return encoded(FilterAnswer(nodes=whole, failed=failed, unresolvable=unresolvable))


class RenderedRefusals:
    """The bytes of answers in which no node is left: the same answer is given to all pods that wait for the same."""

    def __init__(self) -> None:
        self._rendered: OrderedDict[int, tuple[Filtered, bool, tuple[int, int], bytes]] = OrderedDict()
        """By the identity of an answer, with the answer, so that no other one gets it."""

    def answer(self, asked: Asked, filtered: Filtered, kubernetes: tuple[int, int]) -> bytes:
        """As `filter_answer`; rendered once for an answer that is the very same object."""
        known = self._rendered.get(id(filtered))
        named = asked.whole is None
        if known is not None and known[:3] == (filtered, named, kubernetes):
            return known[3]
        answer = filter_answer(asked, filtered, kubernetes)
        self._rendered[id(filtered)] = filtered, named, kubernetes, answer
        if len(self._rendered) > RENDERED_KEPT:
            self._rendered.popitem(last=False)
        return answer


def refuse_all(asked: Asked, error: TopoalignError) -> bytes:
    """
    The answer to filter about a pod that cannot be meant: no node takes it, and trying again is no help. Its text names the
    field: it is that of one pod, and the same for as long as the pod is.
    """
    texts = dict.fromkeys(asked.nodes, text_of_pod(error))
    if asked.whole is None:
        return encoded(FilterAnswer(node_names=[], unresolvable=texts))
    return encoded(FilterAnswer(nodes=NodeList(items=[]), unresolvable=texts))


def filter_failed(code: str) -> bytes:
    """The answer to filter where it is not known which nodes pass: the scheduler tries again, after a time."""
    return encoded(FilterAnswer(error=text_of_error(code)))


def scores_answer(nodes: Sequence[NodeName], scores: Sequence[int]) -> bytes:
    """A score for each of the nodes, in their order."""
    return encoded(list(map(Score, nodes, scores)))


def preempt_answer(victims: Mapping[NodeName, Victims]) -> bytes:
    """The nodes with victims, by their UIDs."""
    return encoded(
        PreemptAnswer(
            victims={
                node: MetaVictims(pods=[MetaPod(uid=uid) for uid in each.uids], disruptions=each.disruptions)
                for node, each in victims.items()
                if each.uids
            }
        )
    )


def bind_answer(error: str = "") -> bytes:
    """Whether the pod is bound: no error."""
    return encoded(BindAnswer(error=error))


encoded = msgspec.json.Encoder().encode
