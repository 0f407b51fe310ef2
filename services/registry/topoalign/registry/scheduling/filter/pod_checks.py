"""Whether a pod can be meant in this cluster: what the webhook denies, and the filter refuses on all nodes alike."""

from collections import OrderedDict
from collections.abc import Mapping

from topoalign.core.demand.share_annotations import uuid_selection
from topoalign.core.model.errors import InvalidField, NoFit
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import Compat, PodRequest
from topoalign.core.sharing.pod_checks import check_gpus_known, check_pod
from topoalign.core.sharing.pod_warnings import warnings_of
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.model import PodToSchedule

PODS_KEPT = 4_096
"""Pods of which the answer is kept: those that wait are asked about again and again."""


class PodChecks:
    """Judges pods by what the nodes offer."""

    def __init__(self, offers: OfferedResources, *, ranks_as_hami: bool = False) -> None:
        """`ranks_as_hami`: whether a pod's policy of HAMi ranks the nodes for it."""
        self._offers = offers
        self._ranks_as_hami = ranks_as_hami
        self._known: OrderedDict[str, tuple[PodRequest, object, InvalidField | NoFit | None]] = OrderedDict()
        """UID -> the pod as it came, what was offered then, and why it cannot be meant."""

    @property
    def _compat(self) -> Compat:
        """As for a pod that may come to any node with slots: HAMi's reading takes all that topoalign's does."""
        return "hami" if "hami" in self._offers.compats else ""

    def check(self, request: PodRequest) -> None:
        """Raises what `check_pod` of the core does: a kubelet decides on every node of Kubernetes."""
        offers = self._offers
        check_pod(request, offers.units, offers.slots, self._compat, otherwise=offers.not_in_slots, by_kubelet=True)
        check_gpus_known(request, offers.gpus, offers.slots, offers.not_in_slots)

    def warnings(self, annotations: Mapping[str, str], limits: Mapping[ResourceName, str]) -> tuple[str, ...]:
        """What of a pod probably means something else than it says (`warnings_of`)."""
        return warnings_of(annotations, limits, self._offers.names, ranks_as_hami=self._ranks_as_hami)

    def check_waiting(self, pod: PodToSchedule) -> None:
        """The same of a pod that may come again."""
        offers = self._offers
        known = self._known.get(pod.uid)
        offered = offers.units, offers.slots, offers.not_in_slots, self._compat, self._has_known(pod.request)
        if known is None or known[0] is not pod.request or known[1] != offered:
            known = pod.request, offered, self._error(pod.request)
            self._known[pod.uid] = known
            if len(self._known) > PODS_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(pod.uid)
        if known[2] is not None:
            raise known[2].with_traceback(None)

    def _has_known(self, request: PodRequest) -> bool:
        """Whether some node has a GPU that is named as one to be used."""
        return not self._offers.gpus.isdisjoint(uuid_selection(request.annotations).wanted or ())

    def _error(self, request: PodRequest) -> InvalidField | NoFit | None:
        try:
            self.check(request)
        except (InvalidField, NoFit) as error:
            return error
        return None
