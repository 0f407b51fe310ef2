"""
Chooses which shares, MIG instances or virtual functions a container gets.

They are chosen one by one, from the GPU of which the fewest are held (`distributed`) or the most (`packed`), counting those
chosen already; of equals from the GPU that this container has the fewest of, then from the nearest to the GPUs that it
has, then in the hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which leaves the
order of the rest open.

A node may offer thousands of shares, and few of them are wanted. So those of each GPU are counted (`device_sets`), and of
a chosen GPU the first ones are taken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score


def prefer_parts(
    topology: Topology,
    resource: ResourceName,
    available: DeviceSet,
    must_include: Sequence[DeviceID],
    size: int,
    near: Sequence[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """
    The `size` of them that are best, in the hardware's order; `near` are other devices of the container. () where there is
    no preference to give: size below 1 or above what is available, or too small for `must_include`, or one of these is not
    available.
    """
    if not max(1, len(must_include)) <= size <= len(available) or not all(map(available.__contains__, must_include)):
        return ()
    chosen = available.devices.some(must_include)
    gpus = _listed_parts(topology)[resource]
    left = {gpu: available & parts - chosen for gpu, parts in gpus.items()}
    free = {gpu: len(parts) for gpu, parts in left.items()}
    held = {gpu: len(parts) - free[gpu] for gpu, parts in gpus.items()}
    sign = -1 if any(offer.packing == "packed" for offer in topology.offers_of[resource]) else 1
    taken: Counter[DeviceID] = Counter(map(topology.card_of, chosen))
    others = [topology.card_of(device) for device in near]
    links = {gpu: sum(_link_score_between(topology, gpu, other) for other in (*others, *taken)) for gpu in gpus}
    order = {gpu: index for index, gpu in enumerate(gpus)}
    more: Counter[DeviceID] = Counter()
    for _ in range(size - len(chosen)):
        gpu = min(
            (gpu for gpu, count in free.items() if count),
            key=lambda gpu: (sign * held[gpu], taken[gpu], -links[gpu], order[gpu]),
        )
        if not taken[gpu]:
            links = {other: links[other] + _link_score_between(topology, other, gpu) for other in links}
        free[gpu] -= 1
        held[gpu] += 1
        taken[gpu] += 1
        more[gpu] += 1
    for gpu, amount in more.items():
        chosen |= left[gpu].first(amount)
    return tuple(chosen)


@computed_once
def _listed_parts(topology: Topology) -> Mapping[ResourceName, Mapping[DeviceID, DeviceSet]]:
    """Resource that the node offers -> GPU -> its parts that are listed, in the hardware's order."""
    found: dict[ResourceName, dict[DeviceID, DeviceSet]] = {}
    for resource in topology.offers_of:
        devices = topology.devices[resource]
        gpus = found.setdefault(resource, {})
        for base, parts in devices.by_base.items():
            gpu = topology.card_of(base)
            gpus[gpu] = gpus.get(gpu, devices.nothing) | parts
    return found


def _link_score_between(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    return connection_score(topology, a, b) if a != b else 0
