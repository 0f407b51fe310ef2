"""
What must hold after every step, whatever happened (the invariants I1 to I9, I12 and I14), and in the end (I10): against the
naive record of all facts, and against what the kubelet's containers really use.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
from simulation.amounts import Amounts, spelled_way
from simulation.divisions import ALL_CORES, ALL_MEMORY, Much, card, much, way
from simulation.instance_checks import InstanceChecks
from simulation.kubelet import Kubelet
from simulation.liar_deeds import FORGED
from simulation.limit_checks import LimitChecks
from simulation.node import COMPACT_AFTER, PENDING_LIMIT, REMEMBERED, Agent, Hub
from simulation.patience import Patience
from simulation.record import Held, Record, clashing, held_by, spelled
from simulation.replaying import digest_on, replayed
from simulation.world import HEALTHY, NODE, Violation, World

from topoalign.client import Delivery
from topoalign.core.admission.admit import admit
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import AllocationReleased, AllocationsSnapshot, LedgerEvent, LedgerFact, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

UNHELD_SECONDS = 15.0
"""So long may a container run whose devices are in no record: until the kubelet's list was read again."""


class Checks:
    """Looks at everything from outside."""

    def __init__(self, world: World, kubelet: Kubelet | None) -> None:
        self.world, self.kubelet = world, kubelet
        self.record = Record(world)
        self.patience = Patience(world)
        world.preferences.append(self.preferred)
        world.marks.append(self.what_counts_as_published_is_stored)
        world.facts += [self.no_running_container_is_released, self.record.hear, self.patience.hear]
        self.amounts = Amounts(world, kubelet)
        self.limits = LimitChecks(world, kubelet, self.amounts)
        self.instances: InstanceChecks | None = None
        if world.driver is not None and kubelet is not None:
            self.instances = InstanceChecks(world, world.driver, kubelet, self.running)
        self.unheld: dict[tuple[ResourceName, DeviceID], float] = {}
        self.init_in_doubt = False
        """
        Whether something was done to the record, by damage or by a kubelet that lost count, after which nobody may know of
        init containers any more: the kubelet shows them nowhere.
        """
        self.marked = -1
        """Which fact of the history counts as published."""
        self.unreadable: set[str] = set()
        """Pods that run, and that the kubelet had lost before the record could know to which pod its devices belong."""
        self.acknowledged: dict[str, frozenset[AllocationID]] = {}
        """Pod -> what its admission was answered with, until it asks for its release."""
        self.asked: dict[str, PodRequest] = {}
        self.asks: Counter[str] = Counter()
        """Pod -> how many requests were made for it."""

    def expect(self, invariant: str, holds: bool, finding: str) -> None:
        self.record.expect(invariant, holds, finding)

    def no_running_container_is_released(self, event: LedgerEvent) -> None:
        """
        As gone, that is: neither a jump of a clock nor a pause nor a kubelet that starts makes a container end. A container
        that the kubelet has lost makes way for another one only with a word.
        """
        if self.kubelet is None or not isinstance(event, AllocationReleased):
            return
        owner, released = self.record.live.get(event.allocation, (None, frozenset()))
        for uid, places in self.running().items():
            both, is_lost = sorted(released & places), uid in self.kubelet.lost
            is_own = owner is not None and owner.pod == self.kubelet.wanted[uid].name
            if event.reason in ("gone", "orphan"):
                self.expect(
                    "C29", not both or (is_lost and not is_own), f"{both} of {uid}, which runs, are {event.reason}"
                )
            elif event.reason == "superseded":
                self.expect(
                    "F21", not (both and is_lost and is_own), f"{both} of {uid}, which runs, are silently given"
                )

    def what_counts_as_published_is_stored(self, epoch: int, seq: int) -> None:
        """And so is what was recorded since the last such fact, but for what a snapshot in between may stand for."""
        history, before = self.world.disk.history, self.marked
        at = next((i for i, each in enumerate(history) if (each.epoch, each.seq) == (epoch, seq)), None)
        if at is None:
            return
        self.marked = at
        since = [i for i in range(before + 1, at + 1) if isinstance(history[i], AllocationsSnapshot)]
        for event in history[max([*since, before + 1]) : at + 1] if before < at else history[at : at + 1]:
            stored = self.world.broker.stores({msgspec.json.encode(event)})
            self.expect("I5", stored, f"fact {event.epoch}/{event.seq} counts as published, and the stream lacks it")

    def preferred(
        self,
        state: NodeState,
        available: Sequence[DeviceID],
        chosen: Sequence[DeviceID],
        must_include: Sequence[DeviceID],
    ) -> None:
        """
        What runs is not preferred as long as there is enough that no record has. A kubelet that admits several pods at once
        may write its checkpoint before it has put down what it was just given, and that then looks as if it had ended.
        """
        if self.kubelet is None or not self.kubelet.serial:
            return
        running = {device for places in self.running().values() for _, device in places}
        spare = [device for device in available if device in must_include or not state.ownership.is_held(device)]
        bad = sorted({*chosen} & running - {*must_include} & {d for d in chosen if state.ownership.is_held(d)})
        self.expect("F21", not bad or len(spare) < len(chosen), f"{bad} are preferred, of {spare} that are free")

    def subscriber_hears(self, hub: Hub, delivery: Delivery) -> None:
        """
        What a subscriber is given has neither gaps nor repetitions, but for a snapshot after lies, which says that it begins
        anew.
        """
        event = delivery.event
        if not isinstance(event, LedgerFact) or event.node != NODE:
            return
        epoch, seq = hub.place
        follows = (event.epoch, event.seq) == (epoch, seq + 1) or (
            isinstance(event, AllocationsSnapshot)
            and ((event.epoch, event.seq) > hub.place or (delivery.anew and self.world.lies > 0))
        )
        self.expect("I5", follows, f"a subscriber hears {event.epoch}/{event.seq} after {epoch}/{seq}")
        hub.place = event.epoch, event.seq

    def after_step(self, agent: Agent) -> None:
        """Raises the first Violation of the run."""
        if agent.ledger is not None and not agent.process.dead:
            self.of_ledger(agent)
        else:
            self.unheld.clear()
        if self.kubelet is not None and self.kubelet.serial:
            used = sorted(self.running().items())
            for at, (uid, places) in enumerate(used):
                for other, others in used[:at]:
                    both = clashing(places, others)
                    if {uid, other} & self.kubelet.lost:
                        both = [device for device in both if not self.is_watched(agent, DeviceID(device), {uid, other})]
                    self.expect("I1", not both, f"{uid} and {other} use {', '.join(both)}")
        if self.instances is not None:
            self.instances.after_step()
        elif self.world.has_shares:
            self.amounts.after_step()
            self.limits.after_step()
        if self.world.violations:
            raise self.world.violations[0]

    def of_ledger(self, agent: Agent) -> None:
        assert agent.ledger is not None
        ledger, state = agent.ledger, agent.ledger.state
        live = {name: (a.owner, held_by(a)) for name, a in state.allocations.items()}
        if live != self.record.live:
            both = f"in the ledger: {spelled(live.values())}; on disk: {spelled(self.record.live.values())}"
            self.world.violate(Violation("I9", both))
        owners = [owner for owner, _ in live.values() if owner is not None]
        self.expect("I6", self.kubelet is not None or len(owners) == len(set(owners)), "a container was admitted twice")
        places = [place for _, held in live.values() for place in held]
        self.expect("I1", len(places) == len(set(places)), "a device is held twice")
        for resource, devices in state.hardware.devices.items():
            free = set(state.ownership.free(resource))
            allocated = {device for kind, device in places if kind == resource and device in devices}
            unavailable = {device for device in devices if not state.health_of(device).usable}
            spent = self.spent(devices, state.hardware) if self.world.has_shares else set()
            everything = free | allocated | unavailable | spent
            self.expect("I3", everything == devices.keys(), f"some {resource} are in no set")
            self.expect("I3", not free & (allocated | unavailable), f"free and not free: {sorted(free)}")
        self.expect("I4", digest_on(self.world.disk) == state.digest, "replaying the journal gives another state")
        most = PENDING_LIMIT + 2 * COMPACT_AFTER
        longest = most + (COMPACT_AFTER + 1) * self.world.disk.failures
        kept = len(self.world.disk.journal.load())
        self.expect("I12", len(ledger.pending) <= most and kept <= longest, f"{len(ledger.pending)} wait, {kept} kept")
        decisions = len(agent.allocator.admissions._decisions) if agent.allocator is not None else 0
        self.expect("I12", decisions <= REMEMBERED, f"{decisions} decisions are remembered")
        self.of_containers(agent, live)

    def running(self) -> dict[str, Held]:
        """Pods with containers that run -> what these use."""
        assert self.kubelet is not None
        used: dict[str, Held] = {}
        for uid in sorted(self.kubelet.admitted - self.unreadable):
            roles = {container.name: container.role for container in self.kubelet.wanted[uid].containers}
            used[uid] = frozenset(
                (resource, device)
                for (of, container, resource), devices in self.kubelet.used.items()
                if of == uid and not (roles[container] == "init" and self.init_in_doubt)
                for device in devices
            )
        return used

    def is_watched(self, agent: Agent, device: DeviceID, uids: set[str]) -> bool:
        """Whether the record says that one of these pods had to make way of this device, or nobody can be asked now."""
        if agent.ledger is None or agent.process.dead or agent.process.stopped:
            return True
        former = [each for a in agent.ledger.state.allocations.values() for each in a.displaced]
        return any(each.pod_uid in uids and device in chain(*each.devices.values()) for each in former)

    def of_containers(self, agent: Agent, live: dict[AllocationID, tuple[Owner | None, Held]]) -> None:
        """What runs is in the record: at once where we gave it, after the next look where the kubelet did."""
        for pod, names in self.acknowledged.items():
            self.expect("I9", names <= live.keys(), f"the answer to {pod} is forgotten: {sorted(names - live.keys())}")
        if self.kubelet is None:
            return
        held = {place for _, places in live.values() for place in places}
        now = self.world.loop.time()
        unable = agent.ledger is None or self.is_misled(agent.ledger.state) or agent.process.stopped
        if unable or not self.kubelet.up or self.kubelet.hidden:
            self.unheld.clear()
            return
        running = frozenset[tuple[ResourceName, DeviceID]]().union(*self.running().values())
        self.unheld = {place: self.unheld.get(place, now) for place in running - held}
        for place, since in self.unheld.items():
            self.expect("I9", now - since <= UNHELD_SECONDS, f"{place[1]} is used by a container and held by nobody")

    def is_misled(self, state: NodeState) -> bool:
        """
        Whether nobody can tell which of the devices that a kubelet shows are ours: it shows those of all plugins alike. So
        it is before any topology was received, and where an agent that starts finds a forged one and no discovery to ask.
        """
        topology = state.topology
        return topology is None or (topology.source == FORGED and not self.world.is_discovery_up)

    def decides_equally(self, agent: Agent, pod: PodRequest) -> None:
        """I7: the same decision from a state that came about in another way."""
        assert agent.ledger is not None
        state = agent.ledger.state
        again = msgspec.structs.replace(replayed(self.world.disk), topology=state.topology, health=state.health)
        self.expect("I7", decision(state, pod, self.world) == decision(again, pod, self.world), f"{pod.name} twice")

    def converged(self, agent: Agent, hub: Hub) -> str | None:
        """I10 and C13, in the end: what is not yet as it must become; None if all is."""
        ledger = agent.ledger
        if ledger is None or agent.process.dead:
            return "the allocator does not run"
        if ledger.pending:
            return f"{len(ledger.pending)} facts wait for the bus"
        if NODE not in hub.cluster:
            return "the registry has not received the node"
        view = hub.cluster.member(NODE).state
        if (view.digest, view.epoch, view.seq) != (ledger.state.digest, ledger.state.epoch, ledger.state.seq):
            return f"the registry is at {view.epoch}/{view.seq}, the node at {ledger.state.epoch}/{ledger.state.seq}"
        if view.health is None or dict(view.health.devices) != self.world.health:
            return "the registry has an old health"
        if view.hardware != self.world.machine:
            return "the registry has an old topology"
        usable, spent = (
            self.usable(),
            self.spent(chain.from_iterable(self.world.machine.devices.values()), self.world.machine),
        )
        listed = {d for resource in self.world.machine.devices for d in ledger.state.healthy(resource)}
        if listed - spent != usable - spent:
            return f"offered are {sorted(listed)}, sound are {sorted(usable)}, and {sorted(spent)} may be"
        missing = self.owners(ledger.state) if self.kubelet is not None else None
        if self.instances is not None and agent.instances is not None:
            missing = missing or self.instances.converged(ledger.state, agent.instances)
        return missing or self.limits.converged(ledger.state)

    def rebooted(self) -> None:
        """All MIG instances are gone."""
        if self.instances is not None:
            self.instances.rebooted()

    def contest(self, slots: Iterable[DeviceID]) -> None:
        """Somebody asks for these beside the kubelet, so that it may look as if they were another's."""
        if self.instances is not None:
            self.instances.contested |= {*slots}

    def agent_was_away(self) -> None:
        """No agent has run for long."""
        if self.instances is not None:
            self.instances.was_away()

    def usable(self) -> set[DeviceID]:
        """What should be offered as sound: of a sound card, and no container's under the former division."""
        former = {(card(device), spelled_way(device, amount)) for device, amount in self.amounts.recorded()}
        slots = self.world.division in ("slots", "dynamic")
        return {
            device
            for devices in self.world.machine.devices.values()
            for device in devices
            if self.world.health[card(device)] == HEALTHY
            and not any(
                card(device) == other and not is_same_way(way(device), held, slots=slots) for other, held in former
            )
        }

    def spent(self, devices: Iterable[DeviceID], hardware: Topology) -> set[DeviceID]:
        """Those of the devices that need not be offered, as nothing is left of their card: units and slots of nobody."""
        own = {device for device, _ in self.amounts.recorded()}
        if self.instances is not None:
            full = self.instances.full(hardware)
            return {device for device in devices if card(device) in full and way(device) == "share"} - own
        held: dict[DeviceID, Much] = {}
        for device, amount in self.amounts.recorded():
            cores, memory = held.get(card(device), Much(0, 0))
            more = amount or much(device)
            held[card(device)] = Much(cores + more.cores, memory + more.memory)
        full = {each for each, m in held.items() if m.cores >= ALL_CORES or m.memory >= ALL_MEMORY}
        return {
            device
            for device in devices
            if card(device) in full and way(device) in ("unit", "share") and device not in own
        }

    def owners(self, state: NodeState) -> str | None:
        """Who holds what, by our record and by the kubelet's."""
        assert self.kubelet is not None
        shown = {
            (holding.owner, frozenset((holding.resource, device) for device in holding.devices))
            for pod in self.kubelet.wanted.values()
            for holding in self.kubelet.holdings(pod)
        }
        lost = {self.kubelet.wanted[uid].name for uid in self.kubelet.lost}
        of_lost = {held_by(a) for a in state.allocations.values() if a.owner is not None and a.owner.pod in lost}
        recorded = {(a.owner, held_by(a)) for a in state.allocations.values()}
        if shown - recorded:
            return f"the kubelet shows {spelled(shown)}, recorded are {spelled(recorded)}"
        visible = {place for _, places in shown for place in places}
        rest = {place for _, places in recorded - shown if places not in of_lost for place in places}
        kept = self.kept()
        # An entry of a pod that is gone keeps whatever record has something of it. The entry of an init container that has
        # ended keeps a record without an owner.
        kept |= {
            place
            for owner, places in recorded - shown
            if not kept.isdisjoint(places) and (owner is None or not self.kubelet.mounted)
            for place in places
        }
        kept |= self.ended_unheard(state)
        if rest & visible or not rest <= kept:
            return f"recorded and not held: {spelled(recorded - shown)}"
        return None

    def ended_unheard(self, state: NodeState) -> Held:
        """
        What is recorded of pods without volumes that have ended and are not deleted, where a checkpoint or a journal
        was lost, or kubelet or agent started anew around that: before the end, or so shortly before it that this kubelet
        was not asked in between. For all that can be told they run, and the record keeps what a container may use.
        """
        assert self.kubelet is not None
        uids = self.kubelet.undelivered & self.kubelet.directories.now().unreadable - self.kubelet.wanted.keys()
        return frozenset(place for a in state.allocations.values() if a.pod_uid in uids for place in held_by(a))

    def kept(self) -> Held:
        """What the checkpoint has given to pods that are not gone by their directories, where these can be read."""
        assert self.kubelet is not None
        directories = self.kubelet.directories.now() if self.kubelet.mounted else None
        return frozenset(
            (resource, device)
            for (uid, _, resource), devices in self.kubelet.file.items()
            if directories is None or not directories.is_gone(uid)
            for device in devices
        )


def is_same_way(offered: str, held: str, *, slots: bool) -> bool:
    """Whether what is offered of a card goes with what is held of it; `slots`: whether shares are slots now."""
    if offered == "share":
        return held == "slice" or (held == "slot" and slots)
    return offered == held


def decision(state: NodeState, pod: PodRequest, world: World) -> object:
    try:
        return admit(state, pod, world.rules)
    except TopoalignError as error:
        return type(error), error.finding, error.remedy
