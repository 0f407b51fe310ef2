"""
The scheduler's questions about a pod, answered from the view of the cluster: filter, prioritize, preempt.

Nothing here has an effect on the view. A node that the registry does not know is judged by what its labels say it will be:
the machine of `topoalign.io/machine`, or an empty sibling of the same instance type, under the rules of a sibling's kubelet.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import not_

from topoalign.core.model.errors import InvalidField, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.model import Filtered, NodeRefusal, PodToSchedule, Victims
from topoalign.registry.scheduling.siblings import sibling
from topoalign.registry.scheduling.standing import UNKNOWN_NODE
from topoalign.registry.scheduling.verdicts import Request, Verdicts, decided
from topoalign.registry.scheduling.victims import without_pods
from topoalign.registry.scheduling.view import ClusterView

UNKNOWN = NodeRefusal(code=UNKNOWN_NODE)


class Scheduler:
    """Answers for one cluster."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self._verdicts = Verdicts(view)

    def filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        """As `Scheduling.filter`."""
        request, codes = self._looked_up(pod)
        places, refusals = self.view.places, self._verdicts.refusals
        try:
            numbers = bytes(map(codes.__getitem__, map(places.__getitem__, nodes)))
        except KeyError:
            numbers = bytes(
                codes[places[node]] if node in places else self._judge_unknown(request, labels.get(node, {}))
                for node in nodes
            )
        refused = {node: refusals[number] for node, number in zip(nodes, numbers, strict=True) if number}
        return Filtered(passed=tuple(compress(nodes, map(not_, numbers))), refused=refused)

    def preempt(self, pod: PodToSchedule, victims: Mapping[NodeName, Victims]) -> Mapping[NodeName, Victims]:
        """As `Scheduling.preempt`."""
        request, _ = self._looked_up(pod)
        return {node: each for node, each in victims.items() if self._fits_without(request, node, each)}

    def _looked_up(self, pod: PodToSchedule) -> tuple[Request, bytearray]:
        """What the pod asks for, and what each node says to it as of now."""
        self.view.renew()
        request = self._verdicts.request(pod)
        return request, self._verdicts.codes(request)

    def _judge_unknown(self, request: Request, labels: Mapping[str, str]) -> int:
        """The number of the refusal by a node that would have these labels."""
        kind = sibling(self.view, labels)
        code = UNKNOWN_NODE if kind is None else self._verdicts.judge_empty(request, kind)
        return self._verdicts.number(code, helped=False)

    def _fits_without(self, request: Request, node: NodeName, victims: Victims) -> bool:
        """Whether an offered node would admit the pod if these victims were gone."""
        view = self.view.nodes.get(node)
        if view is None or view.kind is None:
            return False
        asked = request.of(view.kind, self.view)
        if asked.unlisted:
            return False
        uids, holds = frozenset(victims.uids), self.view.holds(node)
        state = without_pods(self.view.facts(node), uids, holds.names_of(uids))
        try:
            basis = self.view.basis_of(state, uids)
        except (Unavailable, InvalidField):
            return False
        return not decided(basis.state, asked.demand)
