"""
Predicts the decision about a pod, without any effect: `what-if` for people, `confirm` for the registry before it binds.

On a node with a kubelet both predict what it would decide, from its files as they are at that moment: `what-if` reads them
all, `confirm` those that have changed by their times, because a scheduler waits for it. A registry that knows pods as
terminated which the node still shows with devices has everything read anew: such a pod may leave no trace in these times.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.kubelet_files import KubeletWatch
from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.prediction import describe_unconfirmed_record, predict
from topoalign.core.admission.resolvability import explain_decision
from topoalign.core.demand.device_lists import list_notes
from topoalign.core.demand.pod_demand import pod_demand, read_pod
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.unserved import unserved_names
from topoalign.core.model.decisions import Decision, with_notes, with_unserved
from topoalign.core.model.errors import HardwareUnknown, InvalidField, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ConfirmRequest,
    Mode,
    PodRequest,
    override_rules,
)
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.node_reservations import with_reserved


class Predictions:
    """Answers what-if and confirm for one node."""

    def __init__(
        self,
        ledger: Ledger,
        rules: AdmissionRules,
        kubelet: KubeletWatch | None,
        *,
        kubelet_owns_devices: bool,
        confirmed: Callable[[PodRequest], None] = lambda pod: None,
        by_variable_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        `kubelet`: reads what predictions are based on; None: the node's own rules and record. `confirmed` is called for
        each pod that is confirmed. `by_variable_alone`: whether containers see what NVIDIA_VISIBLE_DEVICES names, and
        nothing else.
        """
        self._confirmed = confirmed
        self._by_variable_alone = by_variable_alone
        self._ledger = ledger
        self._kubelet = kubelet
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET) if kubelet_owns_devices else rules

    async def what_if(self, request: AllocateRequest) -> Decision:
        """Predicts the decision that `allocate` or the kubelet would make now. Nothing is recorded."""
        check_own(self._ledger, request.node)
        check_discovered(self._ledger)
        if self._kubelet is not None:
            await self._kubelet.read_all()
        decision = self._predict(request.pod, request.rules, explain=True)
        if not self._by_variable_alone():
            return decision
        return with_notes(decision, list_notes(self._ledger.state.hardware, read_pod(request.pod, self._rules)))

    async def confirm(self, request: ConfirmRequest) -> Decision:
        """Predicts the decision after others were given what is reserved for them. Nothing is recorded."""
        check_own(self._ledger, request.node)
        check_discovered(self._ledger)
        if self._kubelet is not None:
            await (self._kubelet.read_all() if request.terminated else self._kubelet.read_changed())
        decision = self._predict(request.pod, {}, request.reserved)
        self._confirmed(request.pod)
        return decision

    def _predict(
        self,
        pod: PodRequest,
        changes: Mapping[str, str | int | bool],
        reserved: Sequence[Reservation] = (),
        *,
        explain: bool = False,
    ) -> Decision:
        pod = validate_pod(pod)
        if self._kubelet is not None:
            now = self._ledger.clock.wall()
            return predict(self._ledger.state, pod, now, changes, explain=explain, reserved=reserved)
        state = with_reserved(self._ledger.state, self._ledger.state, reserved)
        demand = pod_demand(pod, override_rules(self._rules, changes))
        decision = explain_decision(state, demand) if explain else decide_demand(state, demand)
        decision = with_unserved(decision, unserved_names(demand, state.hardware))
        return with_notes(
            decision,
            () if self._ledger.unconfirmed is None else (describe_unconfirmed_record(self._ledger.unconfirmed),),
        )


def check_own(ledger: Ledger, node: NodeName) -> None:
    """Raises InvalidField for a request to another node."""
    if node != ledger.node:
        raise InvalidField("node", f"{clean(node)!r} is not this node", f"ask {ledger.node!r} here")


def check_discovered(ledger: Ledger) -> None:
    """Before the hardware is known nothing can be decided: not a refusal, and nothing to record. Raises HardwareUnknown."""
    state = ledger.state
    if state.topology is None or state.health is None:
        raise HardwareUnknown(ledger.node, "no facts of discovery have been received")
