"""
Decides whether a node admits a pod, container by container.

Init containers come first, then app containers, in the order of the pod's spec. In scope `container`, each container is
aligned separately: the policy merges the hints of the providers, and the pod is refused at the first container that the
policy does not admit. In scope `pod`, one merge applies to all containers. After its alignment, a container is
allocated devices, then CPUs, then memory. The allocation is applied to the state in the same way as a published fact,
so that the decision for the next container takes it into account.
"""

from collections.abc import Collection, Generator, Iterator
from typing import TypeVar

import msgspec

from topoalign.core.admission.alignment import Aligned, NotAligned, align
from topoalign.core.admission.alternatives import rank_alternatives
from topoalign.core.admission.joint import describe_joint_devices, place_jointly, place_within
from topoalign.core.admission.shortages import check_totals, describe_free_amounts
from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.demand.pod_demand import ContainerDemand, Demand, PodDemand
from topoalign.core.demand.share_annotations import CHOOSING
from topoalign.core.demand.shares import asks_for_both_halves, share_in_slots
from topoalign.core.demand.unserved import not_covered
from topoalign.core.deviceshare.node_devices import ContainerDevices
from topoalign.core.hints.cpu import CpuProvider, shared_cpus
from topoalign.core.hints.device_hints import DeviceProvider
from topoalign.core.hints.joint_hints import check_anywhere, nodes_within
from topoalign.core.hints.memory_hints import MemoryProvider
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.reuse import allocation_for, held_by_pod, reusable_cpus, reusable_devices
from topoalign.core.model.decisions import (
    Admission,
    Alignment,
    Considered,
    Explanation,
    PlacementContext,
    PreferenceFailed,
    PreferenceQuestion,
    Refusal,
)
from topoalign.core.model.errors import NoFit, TopoalignError, clean
from topoalign.core.model.hints import HintAnswer, TopologyHint
from topoalign.core.model.ids import NIC, ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import Scope
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.placement.device_choice import (
    choose_for_container,
    likely_takeover,
)
from topoalign.core.placement.exclusive_cpus import NotWholeCores, allocate_cpus
from topoalign.core.placement.memory_blocks import hold_allocation, memory_for
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.profile import profile_of
from topoalign.core.sharing.choosers import (
    check_shares,
    check_takeover,
    chooser_of,
    gpus_given,
    slots_given,
    with_peaks,
)
from topoalign.core.state.fold import NodeState

T = TypeVar("T")

Question = HintRequest | PreferenceQuestion
Reply = HintAnswer | tuple[DeviceID, ...] | None
"""The reply to a HintRequest is a HintAnswer. To a PreferenceQuestion: the preferred devices; None: no preference."""

Steps = Generator[Question, Reply, T]

BY_RESERVATION = (
    "the kubelet reads no annotations: devices are chosen so for a pod that the registry binds, for no other"
)

HALVES_BY_RESERVATION = (
    "this assumes that topoalign's scheduler reserves computing time and memory together; without a reservation the kubelet "
    "asks for one after the other, and refuses or does not start the pod (ShareSplit) where the first one's GPU has too "
    "little left of the second"
)


class AdmissionRun:
    """A decision in progress: the current container and manager, the allocations so far, and the explanation."""

    def __init__(self, state: NodeState, demand: PodDemand, *, explain: bool = False) -> None:
        """`explain`: compare alternative device sets, and list needed and free amounts in a refusal."""
        self.state = state
        self.demand = demand
        self.rules = rules = demand.rules
        self.explain = explain
        self.profile = profile_of(rules.mode)
        self.container: ContainerName | None = None
        self.provider: str | None = None
        self.work = NumaSearchBudget()
        self.alignments: list[Alignment] = []
        self.considered: list[Considered] = []
        self.is_refused_by_policy = False
        self.by_chance: list[str] = []  # notes on devices that the kubelet picks at random, human-readable

    def decide(self) -> Steps[None]:
        """Aligns each container and allocates its resources, in order. Raises NoFit if the pod is refused."""
        whole = (yield from self.align(self.demand)) if self.rules.scope is Scope.POD else None
        for container in self.demand.containers:
            self.container = container.container
            aligned = whole if whole is not None else (yield from self.align(container))
            yield from self.allocate(container, aligned)

    def align(self, demand: Demand) -> Steps[Aligned]:
        """The alignment of a container or the pod. Raises NotAligned, TooMuchWork, and the errors of `check_totals`."""
        container = demand.container
        asked = HintRequest(self.state, demand, self.rules)
        alignment = Alignment(container=container, hints={}, merged=NO_AFFINITY, admitted=True)
        aligned = Aligned(NO_AFFINITY, NO_AFFINITY)
        if POLICIES[self.rules.policy].asks:
            reply = yield asked
            assert isinstance(reply, HintAnswer), "a HintRequest is answered with a HintAnswer"
            alignment, aligned = align(asked, reply, self.work)
        self.alignments.append(alignment)
        if not alignment.admitted:
            self.provider = DeviceProvider.name
            check_anywhere(asked)
            self.provider = None
            self.is_refused_by_policy = True
            check_totals(asked)
            raise NotAligned(self.rules, container, alignment, describe_free_amounts(asked) if self.explain else "")
        if aligned.hint.affinity is None:
            return aligned
        return aligned._replace(together=nodes_within(asked, aligned.hint.affinity))

    def allocate(self, container: ContainerDemand, aligned: Aligned) -> Steps[None]:
        """Allocates what the container requests, and applies the allocation to the state."""
        hint = aligned.hint
        earlier = held_by_pod(self.state, self.demand)
        self.provider = DeviceProvider.name
        got = yield from self.devices(container, aligned)
        self.provider = CpuProvider.name
        cpus = self.cpus(container, hint)
        self.provider = MemoryProvider.name
        memory = memory_for(self.state, container, aligned.memory, self.rules)
        self.provider = None
        allocation = msgspec.structs.replace(
            allocation_for(container, got.devices, got.functions),
            cpus=format_cpuset(cpus),
            memory=memory,
            affinity=None if hint.affinity is None else nodes_of(hint.affinity),
            lowest_first=bool(memory) and self.profile.gives_back_lowest_first,
            co_allocated=got.co_allocated,
            slots=slots_given(self.state, container, got.devices),
        )
        after = hold_allocation(self.state, allocation, earlier)
        self.state = after.listed_as(self.state) if self.profile.updates_devices_later else after

    def devices(self, container: ContainerDemand, aligned: Aligned) -> Steps[ContainerDevices]:
        """
        The devices of a container. Jointly allocated devices are chosen first. In mode `best`, GPUs come next, so that
        other devices can be chosen near them. The remaining resources follow in the order of their names. The kubelet
        asks a plugin about one resource at a time, and does not send it the container's devices of other resources.
        """
        joint = ContainerDevices()
        hardware = self.state.hardware
        if container.joint is not None:
            affinity = aligned.together if container.together else aligned.hint.affinity
            place = place_jointly if container.together else place_within
            joint = place(self.state, container, self.rules, affinity)
            if self.explain:
                self.considered += describe_joint_devices(hardware, container, joint)
        given = dict(joint.devices)
        known = {*joint.devices, *container.together}
        apart = [name for name in container.devices if name not in known and name in hardware.devices]
        if self.profile.gpus_first:
            apart.sort(key=lambda name: hardware.kind_of(name) != "gpu")
        for resource in apart:
            chosen = yield from self.devices_of(resource, container, aligned.hint, gpus_given(hardware, given))
            given.update({resource: chosen} if chosen else {})
        check_shares(self.state, self.demand, container, given)
        return ContainerDevices(given, joint.functions, joint.co_allocated)

    def devices_of(
        self,
        resource: ResourceName,
        container: ContainerDemand,
        hint: TopologyHint,
        near: tuple[DeviceID, ...],
    ) -> Steps[tuple[DeviceID, ...]]:
        """Devices of one resource. `near`: the container's GPUs. Raises NoFit if they cannot be allocated."""
        amount = container.devices[resource]
        devices = self.state.hardware.devices[resource]
        reusable = reusable_devices(held_by_pod(self.state, self.demand), resource)
        chooser = chooser_of(self.state, container, resource, self.rules.compat, hint.affinity)
        among = chooser.room() if chooser is not None and self.profile.seeks_units_by_gpu else None
        taken_over: frozenset[DeviceID] | None = None
        if self.profile.takes_over_at_random and 0 < amount < len(reusable):
            self.by_chance.append(
                f"container {clean(container.container)} takes over {amount} of the {len(reusable)} {clean(resource)} of "
                "init containers, and the kubelet picks them at random: these, and what later containers get, are by chance"
            )
            if chooser is not None:
                check_takeover(self.state.hardware, resource, reusable, amount)
            else:
                taken_over = likely_takeover(devices, reusable, amount)
        choice = choose_for_container(self.state, container, resource, hint.affinity, among, taken_over)
        asking: PreferenceQuestion | None = None
        preferred: Collection[DeviceID] | None = None
        if choice.is_open:
            nics = container.devices.get(NIC, 0) if self.state.hardware.kind_of(resource) == "gpu" else 0
            asking = PreferenceQuestion(
                resource=resource,
                available=choice.available,
                must_include=choice.must_include,
                size=choice.size,
                container=container.container,
                near=near,
                context=PlacementContext(
                    free=self.state.ownership.free(resource),
                    nics=self.state.ownership.free(NIC) if nics else (),
                    nics_wanted=nics,
                ),
            )
            if chooser is not None:
                preferred = chooser.prefer(choice, near)
            else:
                try:
                    reply = yield asking
                except TopoalignError as error:
                    raise PreferenceFailed(resource, error) from error
                assert not isinstance(reply, HintAnswer), "a PreferenceQuestion is answered with devices or None"
                preferred = reply
        chosen = choice.complete(preferred)
        if self.explain:
            could = reusable.union(self.state.ownership.free(resource))
            could_have = [device for device in devices if device in could]
            if not self.profile.gives_plugins_context:
                asking = asking and asking.without_context()
                near = ()
            aligned = hint.affinity is not None and not reusable
            placement = self.rules.placement
            self.considered += rank_alternatives(
                self.state.hardware, resource, could_have, asking, chosen, near, placement, aligned=aligned
            )
        return chosen

    def cpus(self, container: ContainerDemand, hint: TopologyHint) -> frozenset[int]:
        """The exclusive CPUs of the container; empty if it runs in the shared pool."""
        if not container.cpus:
            return frozenset()
        return allocate_cpus(
            self.state.hardware.cpu_topology,
            shared_cpus(self.state, self.rules),
            read_reserved_cpus(self.state.hardware, self.rules),
            reusable_cpus(held_by_pod(self.state, self.demand)),
            container.cpus,
            hint.affinity,
            self.rules,
        )

    def admission(self) -> Admission:
        """Returns the allocations of all containers."""
        explanation = self.explanation()
        # the kubelet allocates both halves, which must be on the same GPUs, in separate calls that name no container
        if not self.profile.seeks_units_by_gpu and any(
            asks_for_both_halves(self.state.hardware, each.devices) for each in self.demand.containers
        ):
            explanation = msgspec.structs.replace(explanation, notes=(*explanation.notes, HALVES_BY_RESERVATION))
        return Admission(allocations=with_peaks(held_by_pod(self.state, self.demand)), explanation=explanation)

    def refusal(self, misfit: NoFit) -> Refusal:
        """Returns why the pod does not fit, and what the kubelet had allocated before the refusal."""
        given = self.profile.gives_while_deciding and self.alignments
        return Refusal(
            reason="TopologyAffinityError" if self.is_refused_by_policy else reason_of(misfit),
            code=misfit.code,
            finding=misfit.finding,
            remedy=misfit.remedy,
            container=self.container,
            provider=self.provider,
            explanation=self.explanation(),
            undone=held_by_pod(self.state, self.demand) if given else (),
        )

    def explanation(self) -> Explanation:
        """The explanation of the decision so far."""
        return Explanation(
            not_covered=tuple(not_covered(self.demand)),
            alignments=tuple(self.alignments),
            considered=tuple(self.considered),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        """Notes on what a prediction cannot determine, and on unexpected behaviour of the kubelet."""
        hardware = self.state.hardware
        is_choosing = not self.demand.annotations.keys().isdisjoint(CHOOSING)
        chooses_gpus = any(  # annotations choose the GPUs for its slots, or spread its units
            (is_choosing and share_in_slots(hardware, each.devices) is not None)
            or (each.gpus > 1 and each.share_in_units(hardware) is not None)
            for each in self.demand.containers
        )
        if (self.demand.jointly or chooses_gpus) and not self.profile.aligns_jointly:
            yield BY_RESERVATION
        yield from self.by_chance


def reason_of(misfit: NoFit) -> str:
    """The kubelet's reason in the status of a refused pod that its topology policy had admitted."""
    return "SMTAlignmentError" if isinstance(misfit, NotWholeCores) else "UnexpectedAdmissionError"
