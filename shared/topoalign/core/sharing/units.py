"""
On which GPUs a container gets its units of computing time and of memory.

Which GPU is decided by `choice`, or with `compat: gaia` by gpu-manager's rules (`gaia.machine`). A kubelet counts units
per NUMA node, and not per GPU: where its alignment leaves no GPU with enough, the container is refused (`ShareSplit`).
Example:

    left of GPU-0: 100 and 320 blocks, of GPU-1: 60 and 200, of GPU-2: 40 and 30
    asked for 20 and 16 blocks: GPU-2; for 20 and 60 blocks: GPU-1; for 100: GPU-0
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


def cards_of(topology: Topology, left: Left) -> tuple[SharedCard, ...]:
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


def choose_gpus(
    topology: Topology, left: Left, share: Share, among: Iterable[DeviceID], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs, of these, that a container gets its units of; () where none have enough left. `compat`: as in the rules of the
    node.
    """
    request = ShareRequest(cores=share.cores, memory=-(-share.blocks // share.gpus) * MEMORY_BLOCK)
    cards, some = cards_of(topology, left), tuple(among)
    try:
        if compat == "gaia":
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
        found = healthy & units_of(self._state, gpus_for_units(self._state, self._container), self._resource)
        if healthy and not found:
            raise ShareSplit(SHARE, "no GPU has enough left of what the container asks for")
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
    """These GPUs, and of whole ones as many others as the share has more; () where there are not so many."""
    missing = share.gpus - len(gpus)
    if missing <= 0:
        return tuple(gpus)
    rest = share if not gpus else Share(missing * CORES, share.blocks * missing // share.gpus)
    others = choose_gpus(topology, left, rest, (gpu for gpu in among if gpu not in gpus), compat)
    return (*gpus, *others) if others else ()


def gpus_of(topology: Topology, devices: Mapping[ResourceName, Sequence[DeviceID]]) -> tuple[DeviceID, ...]:
    """The GPUs of which a container has something, each once. `devices`: resource -> what it has been given of it."""
    given = (each for name, some in devices.items() if topology.kind_of(name) in ("gpu", "unit") for each in some)
    return tuple(dict.fromkeys(map(topology.card_of, given)))


def units_on(
    available: DeviceSet, must_include: Sequence[DeviceID], size: int, gpus: Collection[DeviceID]
) -> tuple[DeviceID, ...]:
    """
    So many of the available units of these GPUs, those that must be included first, and equally many of each as far as can
    be. Fewer where they have not enough.
    """
    devices = available.devices
    rest, found = available - devices.some(must_include), devices.nothing
    of_gpus = sorted((rest & devices.by_base[gpu] for gpu in gpus if gpu in devices.by_base), key=len)
    for number, units in enumerate(of_gpus):
        missing = size - len(must_include) - len(found)
        found |= units.first(missing // (len(of_gpus) - number))
    return (*must_include, *found)


def check_units(state: NodeState, demand: PodDemand, devices: Mapping[ResourceName, Sequence[DeviceID]]) -> None:
    """
    Raises ShareSplit where the units that a container would get are not of one GPU, and WholeGpuInUse where somebody else
    has it whole, or has units of one that it would have whole, and ShareSplit for memory alone of one of which all computing
    time is held: an init container may have had it whole. Init containers of its own pod have ended by then. `devices`:
    resource -> what it would get.
    """
    amounts = amounts_of(device for ids in devices.values() for device in ids)
    check_gpus(amounts)
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


def check_gpus(amounts: Mapping[DeviceID, Amount], field: str = SHARE) -> None:
    """
    Raises ShareSplit where the units that a container has are not of one GPU, or not of whole ones and memory of each or
    none of them: both halves tell the container which GPUs it has. `amounts`: GPU -> what it has of it; `field`: where it
    asks for them.
    """
    whole = all(each.cores == CORES for each in amounts.values())
    if len(amounts) <= 1 or (whole and len({each.memory > 0 for each in amounts.values()}) == 1):
        return
    found = " and ".join(
        f"{each.cores} units of computing time and {each.memory // MEMORY_BLOCK} blocks of {quoted([gpu])}"
        for gpu, each in sorted(amounts.items())
    )
    is_large = sum(each.cores for each in amounts.values()) >= CORES
    raise ShareSplit(field, f"the units are of {len(amounts)} GPUs: {found}", WHOLE_REMEDY if is_large else WAIT)
