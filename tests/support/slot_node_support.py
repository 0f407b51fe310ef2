"""A node with four GPUs in slots, over real sockets: the fake kubelet, and an agent that can be started anew."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
from anyio.abc import TaskGroup
from share_support import DEFAULT, GPUS, PLAIN, ShareNode, running
from slot_support import MIB, asks, in_slots
from slot_support import PLAIN as IN_SLOTS

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import GPU, DeviceID, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.share_amounts import equal_part, held_by_slot, offered_in_slots, sum_amounts

EACH = 16_384
"""MiB of each GPU."""
SLOTS = 8
MACHINE = msgspec.structs.replace(
    PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=EACH * MIB) for gpu in PLAIN.gpus)
)


class Ask(NamedTuple):
    """What a container asks for."""

    gpus: int = 1
    memory: int = 0
    """MiB; 0: by percentage."""
    cores: int = 0
    percentage: int = 0

    def request(self, name: str) -> ContainerRequest:
        """As it stands in a pod."""
        return asks(self.gpus, self.memory, self.cores, self.percentage, name=name)

    @property
    def amount(self) -> Amount:
        """Of each GPU, by HAMi's rules."""
        memory = self.memory or EACH * (self.percentage or 100) // 100
        return Amount(cores=self.cores, memory=memory * MIB)


class SlotNode(ShareNode):
    """The kubelet of a node whose GPUs are in slots, and the parts of its agent."""

    def __init__(
        self,
        directory: Path,
        policy: Policy = Policy.NONE,
        chance: Random | None = None,
        machine: Topology = MACHINE,
        terms: Slots = IN_SLOTS,
    ) -> None:
        """`terms`: on which the GPUs are offered, in `SLOTS` slots each."""
        self.terms = terms
        super().__init__(directory, machine, (GPU,), policy, chance)

    def offered(self, machine: Topology) -> Topology:
        return in_slots(machine, SLOTS, GPUS, self.terms)

    def asking(
        self, name: str, *asked: Ask, init: Sequence[Ask] = (), annotations: Mapping[str, str] = {}
    ) -> PodRequest:
        """A pod with a container for each of these, c0 first."""
        containers = [ask.request(f"c{number}") for number, ask in enumerate((*init, *asked))]
        return PodRequest(
            name=PodName(name),
            annotations={**annotations},
            init_containers=tuple(containers[: len(init)]),
            containers=tuple(containers[len(init) :]),
        )

    async def admit_pod(self, pod: PodRequest) -> Decision:
        """The kubelet decides about a pod."""
        return await self.kubelet.admit(pod, f"uid-{pod.name}")

    def reserve_beside(self, *pods: PodRequest) -> list[Decision]:
        """What a registry reserves for these pods, each beside what is reserved for those before it."""
        state, kept, decisions = self.ledger.state, [], []
        for pod in pods:
            decision = decide_demand(state, read_pod(pod, self.rules))
            decisions.append(decision)
            if isinstance(decision, Admission):
                kept.append(reserved_for(f"uid-{pod.name}", pod, decision.allocations, 60.0))
                for each in decision.allocations:
                    state = state.holding(each)
        self.set_reserved(*kept)
        return decisions

    def records(self, name: str, container: str = "c0") -> list[Allocation]:
        """What the record has of a container."""
        owners = [(each, each.owner) for each in self.ledger.state.allocations.values()]
        return [each for each, owner in owners if owner and (owner.pod, owner.container) == (name, container)]

    def held(self, name: str, container: str = "c0") -> dict[DeviceID, Amount]:
        """GPU -> what the record says that a container holds of it."""
        (record,) = self.records(name, container)
        hardware = self.ledger.state.hardware
        return {
            base_of(slot): record.slots.get(slot) or equal_part(hardware, base_of(slot)) for slot in record.device_ids
        }

    def slots_of(self, name: str) -> dict[str, list[DeviceID]]:
        """Container of a running pod -> its slots."""
        found: dict[str, list[DeviceID]] = {}
        for container, _, devices in self.kubelet.running[DEFAULT, PodName(name)].parts():
            found.setdefault(str(container), []).extend(map(DeviceID, devices))
        return found

    def check_amounts(self) -> None:
        """Of no GPU more cores or memory is held than it has, and a GPU with all cores held has one holder."""
        hardware = self.ledger.state.hardware
        for gpu, slots in held_by_slot(hardware, self.ledger.state.allocations.values()).items():
            offered, held = offered_in_slots(hardware)[gpu], sum_amounts(slots.values())
            assert held.cores <= offered.cores, (gpu, slots)
            assert held.memory <= offered.memory, (gpu, slots)
            assert len(slots) == 1 or all(each.cores < offered.cores for each in slots.values()), (gpu, slots)

    async def check(self, names: Collection[str]) -> None:
        """Nobody has another's GPU, no GPU is above what it has, and all who tell of it tell the same."""
        await self.allocations.reconcile()
        self.check_amounts()
        shown: dict[tuple[str, str], set[str]] = {}
        for name in names:
            running_pod = self.kubelet.running[DEFAULT, PodName(name)]
            for container, slots in self.slots_of(name).items():
                gpus = [base_of(slot) for slot in slots]
                assert len({*gpus}) == len(gpus), (name, container, slots)
                answers = [answer for (of, _), answer in running_pod.responses.items() if str(of) == container]
                assert [",".join(sorted(gpus))] == [each.envs["NVIDIA_VISIBLE_DEVICES"] for each in answers]
                shown[name, container] = {*slots}
        await self.check_records(names, shown)


def slot_node(*options: Any, **more: Any) -> AbstractAsyncContextManager[tuple[SlotNode, TaskGroup]]:
    """By the options of `SlotNode`."""
    return running(lambda directory: SlotNode(directory, *options, **more))
