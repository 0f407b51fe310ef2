"""
On which GPUs a container gets its units of computing time and of memory.

Which GPU is decided by `choice`. A kubelet counts units per NUMA node, and not per GPU: where its alignment leaves no GPU
with enough, the container is refused (`ShareSplit`). Example:

    left of GPU-0: 100 and 320 blocks, of GPU-1: 60 and 200, of GPU-2: 40 and 30
    asked for 20 and 16 blocks: GPU-2; for 20 and 60 blocks: GPU-1; for 100: GPU-0
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, zip_longest

from topoalign.core.demand.units import Left, Share, gpus_with_room, unit_of
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES, MEMORY_BLOCK
from topoalign.core.placement.devices import Choice
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.cards import SharedCard, ShareRequest
from topoalign.core.sharing.choice import choose
from topoalign.core.sharing.refusals import ShareDoesNotFit, ShareSplit
from topoalign.core.sharing.rules import CardRules, Selection
from topoalign.core.state.fold import NodeState

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


def choose_gpus(topology: Topology, left: Left, share: Share, among: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """The GPUs, of these, that a container gets its units of; () where none have enough left."""
    request = ShareRequest(cores=share.cores, memory=-(-share.blocks // share.gpus) * MEMORY_BLOCK)
    rules = CardRules(uuids=Selection(wanted=tuple(among)))
    try:
        chosen = choose(cards_of(topology, left), request, set_scorer(topology), rules)
    except (InvalidField, ShareDoesNotFit):
        return ()
    return tuple(card.device for card in chosen)


def units_with_room(
    state: NodeState, share: Share, resource: ResourceName, reusable: Collection[DeviceID]
) -> frozenset[DeviceID]:
    """
    The healthy units of a resource that are of GPUs with room for the share. Raises ShareSplit where none are, and none are
    left by init containers either.
    """
    gpus, healthy = frozenset(gpus_with_room(state.ownership.units_left, share)), state.healthy(resource)
    found = frozenset(unit for unit in healthy if state.hardware.card_of(unit) in gpus)
    if healthy and not found and not reusable:
        raise ShareSplit(SHARE, "no GPU has enough left of what the container asks for")
    return found


def prefer_units(state: NodeState, share: Share, choice: Choice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
    """
    The units that a container gets, of those that may be chosen; () where no GPU has enough. `near`: GPUs of which it has
    units already, of the other kind. Units that it takes over from an init container decide as these do.
    """
    topology = state.hardware
    gpus = near or tuple(dict.fromkeys(map(topology.card_of, choice.must_include)))
    if len(gpus) < share.gpus:
        among = frozenset(map(topology.card_of, choice.available))
        gpus = choose_gpus(topology, state.ownership.units_left, share, among)
    return units_on(topology, choice.available, choice.must_include, choice.size, gpus)


def units_on(
    topology: Topology,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    gpus: Sequence[DeviceID],
) -> tuple[DeviceID, ...]:
    """
    So many of the available units of these GPUs, those that must be included first, and equally many of each as far as can
    be. Fewer where they have not enough.
    """
    rest: dict[DeviceID, list[DeviceID]] = {gpu: [] for gpu in gpus}
    required = frozenset(must_include)
    for unit in available:
        of_gpu = rest.get(topology.card_of(unit))
        if of_gpu is not None and unit not in required:
            of_gpu.append(unit)
    turns = (unit for row in zip_longest(*rest.values()) for unit in row if unit is not None)
    return (*must_include, *islice(turns, size - len(must_include)))


def check_gpus(topology: Topology, share: Share, devices: Mapping[ResourceName, Sequence[DeviceID]]) -> None:
    """Raises ShareSplit where the units that a container has, by resource, are not of one GPU, or not of whole ones."""
    counted: dict[DeviceID, Counter[str]] = {}
    for resource, units in devices.items():
        kind = unit_of(topology, resource)
        for unit in units if kind is not None else ():
            counted.setdefault(topology.card_of(unit), Counter())[str(kind)] += 1
    if len(counted) == 1 or (share.whole and all(each["cores"] == CORES for each in counted.values())):
        return
    found = " and ".join(
        f"{each['cores']} units of computing time and {each['memory']} blocks of {quoted([gpu])}"
        for gpu, each in sorted(counted.items())
    )
    raise ShareSplit(SHARE, f"the units are of {len(counted)} GPUs: {found}")
