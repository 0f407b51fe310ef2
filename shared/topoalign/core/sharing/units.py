"""
On which GPUs a container gets its units of computing time and of memory.

Which GPU is decided by `choice`, or with `compat: gaia` by gpu-manager's rules (`gaia.machine`). A kubelet counts units
per NUMA node, and not per GPU: where its alignment leaves no GPU with enough, the container is refused (`ShareSplit`).
Example:

    left of GPU-0: 100 and 320 blocks, of GPU-1: 60 and 200, of GPU-2: 40 and 30
    asked for 20 and 16 blocks: GPU-2; for 20 and 60 blocks: GPU-1; for 100: GPU-0
    asked for 60 and 40 blocks, spread over two: 30 and 20 of each of GPU-1 and GPU-2
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from topoalign.core.demand.card_rules import CardRules, Selection
from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.demand.units import Left, Share
from topoalign.core.hints.devices import gpus_for_units, taken_over, units_of
from topoalign.core.hints.reuse import held_by_pod
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES, MEMORY_BLOCK
from topoalign.core.placement.devices import Choice
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.cards import SharedCard, ShareRequest
from topoalign.core.sharing.choice import choose
from topoalign.core.sharing.gaia.machine import choose_cards
from topoalign.core.sharing.refusals import WAIT, ShareDoesNotFit, ShareSplit, WholeGpuInUse
from topoalign.core.state.fold import NodeState
from topoalign.core.state.unit_amounts import NOTHING, held_of_gpus, unshareable

WHOLE_REMEDY = (
    "ask for whole GPUs without memory, all of which comes with them, or let topoalign's scheduler reserve both halves"
)

SHARE = "share"
"""What refusals call the units that a container has, of both kinds."""


def unit_candidates(topology: Topology, left: Left) -> tuple[SharedCard, ...]:
    """All GPUs of the machine, in its order; of those that are not in units nothing is to be had."""
    found = []
    for gpu in topology.gpus:
        units = left.get(gpu.id)
        found.append(
            SharedCard(
                device=gpu.id,
                index=gpu.index,
                minor=gpu.index if gpu.minor is None else gpu.minor,
                model=gpu.name,
                memory=units.all_blocks * MEMORY_BLOCK if units else 0,
                cores_held=CORES - units.cores if units else CORES,
                memory_held=(units.all_blocks - units.blocks) * MEMORY_BLOCK if units else 0,
                processes=units.sharers if units else 0,
                exclusive=units is None,
            )
        )
    return tuple(found)


def choose_gpus_for_units(
    topology: Topology, left: Left, share: Share, among: Iterable[DeviceID], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs, of these, that a container gets its units of; () where none have enough left. `compat`: as in the rules of the
    node; gpu-manager knows no parts of several GPUs.
    """
    part = share.of_each
    request = ShareRequest(
        cores=share.cores if share.whole else part.cores,
        memory=part.blocks * MEMORY_BLOCK,
        cards=1 if share.whole else share.gpus,
    )
    cards, some = unit_candidates(topology, left), tuple(among)
    try:
        if compat == "gaia" and request.cards == 1:
            chosen = choose_cards(topology, cards, request, frozenset(some))
        else:
            chosen = choose(cards, request, set_scorer(topology), CardRules(uuids=Selection(wanted=some)))
    except (InvalidField, ShareDoesNotFit):
        return ()
    return tuple(card.device for card in chosen)


class UnitChooser:
    """Chooses the units of one resource of a container."""

    def __init__(
        self, state: NodeState, container: ContainerDemand, share: Share, resource: ResourceName, compat: str
    ) -> None:
        """`compat`: as in the rules of the node."""
        self._state, self._container, self._share, self._resource = state, container, share, resource
        self._compat = compat

    def room(self) -> DeviceSet:
        """
        The healthy units of the resource that are of GPUs with room for what the container asks for. Raises ShareSplit where
        there are none.
        """
        healthy = self._state.ownership.usable(self._resource)
        gpus, cards = gpus_for_units(self._state, self._container), self._share.cards
        found = healthy & units_of(self._state, gpus, self._resource)
        if healthy and (not found or len(gpus) < cards):
            lacking = "no GPU has" if cards == 1 else f"{len(gpus)} GPUs, and not {cards}, have"
            raise ShareSplit(SHARE, f"{lacking} enough left of what the container asks for")
        return found

    def check_takeover(self, reusable: Collection[DeviceID], amount: int) -> None:
        """
        Raises ShareSplit where a kubelet picks `amount` of the units that init containers left, which are more, and may pick
        them of other GPUs than those of one share: it picks them at random.
        """
        by_gpu = Counter(map(self._state.hardware.card_of, reusable))
        if len(by_gpu) <= 1:
            return
        unused = len(reusable) - amount
        if self._share.whole and len(by_gpu) == self._share.gpus and unused < min(by_gpu.values()):
            return  # memory of each of its GPUs, whichever blocks these are
        raise ShareSplit(
            SHARE,
            f"it takes over {amount} of the {len(reusable)} units that init containers left, at random, of "
            f"{len(by_gpu)} GPUs",
            "let its init containers ask for units of one GPU, or for as much as it asks for itself",
        )

    def prefer(self, choice: Choice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The units that the container gets, of those that may be chosen; () where no GPU has enough. `near`: GPUs of which it
        has units already, of the other kind. Units that it takes over from an init container decide as these do.
        """
        topology = self._state.hardware
        near = near or taken_over(self._state, self._container)
        gpus = near or tuple(dict.fromkeys(map(topology.card_of, choice.must_include)))
        by_gpu = choice.available.devices.by_base.items()
        among = [gpu for gpu, units in by_gpu if (units & choice.available).bits]
        gpus = with_missing(topology, self._state.ownership.units_left, self._share, gpus, among, self._compat)
        return units_on(choice.available, choice.must_include, choice.size, gpus)


def with_missing(
    topology: Topology,
    left: Left,
    share: Share,
    gpus: Sequence[DeviceID],
    among: Iterable[DeviceID],
    compat: str,
) -> tuple[DeviceID, ...]:
    """These GPUs, and as many others as the share has more; () where there are not so many."""
    missing = share.gpus - len(gpus)
    if missing <= 0:
        return tuple(gpus)
    rest = share._replace(
        cores=share.cores * missing // share.gpus,
        blocks=share.blocks * missing // share.gpus,
        cards=1 if share.whole else missing,
    )
    others = choose_gpus_for_units(topology, left, rest, (gpu for gpu in among if gpu not in gpus), compat)
    return (*gpus, *others) if others else ()


def gpus_of(topology: Topology, devices: Mapping[ResourceName, Sequence[DeviceID]]) -> tuple[DeviceID, ...]:
    """The GPUs of which a container has something, each once. `devices`: resource -> what it has been given of it."""
    given = (each for name, some in devices.items() if topology.kind_of(name) in ("gpu", "unit") for each in some)
    return tuple(dict.fromkeys(map(topology.card_of, given)))


def units_on(
    available: DeviceSet, must_include: Sequence[DeviceID], size: int, gpus: Collection[DeviceID]
) -> tuple[DeviceID, ...]:
    """
    So many of the available units of these GPUs, those that must be included first, and with them equally many of each as
    far as can be. Fewer where they have not enough.
    """
    devices = available.devices
    must = devices.some(must_include)
    of_gpus = [devices.by_base[gpu] & (available | must) for gpu in gpus if gpu in devices.by_base]
    found, missing = devices.nothing, size - len(must) + sum(len(units & must) for units in of_gpus)
    for number, units in enumerate(sorted(of_gpus, key=len)):
        own = units & must
        more = (units - must).first(max(0, missing // (len(of_gpus) - number) - len(own)))
        found, missing = found | more, missing - len(own) - len(more)
    return (*must_include, *found)


def check_units(
    state: NodeState, demand: PodDemand, devices: Mapping[ResourceName, Sequence[DeviceID]], share: Share
) -> None:
    """
    Raises ShareSplit where the units that a container would get are not of as many GPUs as its share, and WholeGpuInUse
    where somebody else has one whole, or has units of one that it would have whole, and ShareSplit for memory alone of one
    of which all computing time is held: an init container may have had it whole. Init containers of its own pod have ended
    by then. `devices`: resource -> what it would get.
    """
    amounts = amounts_of(device for ids in devices.values() for device in ids)
    check_gpus(amounts, cards=share.cards)
    own = {each.id for each in held_by_pod(state, demand) if each.role == "init"}
    live = [each for each in state.allocations.values() if each.id not in own]
    for each in unshareable(live, amounts):
        raise WholeGpuInUse(sorted(each.amounts.keys() & amounts.keys()), titled(each), SHARE)
    if not any(each.cores for each in amounts.values()):
        held = held_of_gpus(each for each in live if not amounts.keys().isdisjoint(each.amounts))
        if spent := [gpu for gpu in amounts if held.get(gpu, NOTHING).cores >= CORES]:
            raise ShareSplit(
                SHARE, f"all computing time of {quoted(spent)} is held, and memory alone would take some", WAIT
            )


def titled(allocation: Allocation) -> str:
    """Whose an allocation is, or its id."""
    owner = allocation.owner
    return allocation.id if owner is None else f"{owner.namespace}/{owner.pod}"


def check_gpus(amounts: Mapping[DeviceID, Amount], field: str = SHARE, cards: int | None = 1) -> None:
    """
    Raises ShareSplit where the units that a container has are not equal parts of so many GPUs, or not of whole ones and
    memory of each or none of them: both halves tell the container which GPUs it has. `amounts`: GPU -> what it has of it;
    `field`: where it asks for them; `cards`: over how many it is spread, None: it is not known.
    """
    whole = all(each.cores == CORES for each in amounts.values())
    if not amounts or (whole and len({each.memory > 0 for each in amounts.values()}) == 1):
        return
    if len({*amounts.values()}) == 1 and cards in (None, len(amounts)):
        return
    found = " and ".join(
        f"{each.cores} units of computing time and {each.memory // MEMORY_BLOCK} blocks of {quoted([gpu])}"
        for gpu, each in sorted(amounts.items())
    )
    asked = "" if cards in (None, 1) else f", and not equal parts of {cards}"
    is_large = sum(each.cores for each in amounts.values()) >= CORES
    raise ShareSplit(field, f"the units are of {len(amounts)} GPUs{asked}: {found}", WHOLE_REMEDY if is_large else WAIT)
