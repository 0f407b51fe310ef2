"""
Chooses the GPUs on which a container gets its slots where HAMi's rules apply (`compat: hami`).

The GPUs that a container may get are put in HAMi's order and tried one after the other by HAMi's checks (`hami.fit`),
with what is held of them as HAMi counts it. Without a policy of the pod that is `spread`. Example with ten slots, 100 cores
and 40960 MiB each, for one GPU with 40 cores:

    held of GPU-0: 1 slot, 30 cores, 4096 MiB: 10 x (0.1 + 0.3 + 0.1) = 5; of GPU-1: 2 slots, 8192 MiB: 10 x (0.2 + 0.2) = 4
    spread tries GPU-1 first, binpack GPU-0

topoalign's own rules still apply: a GPU without enough left by them is tried as one without a free slot, whatever
HAMi would decide. So HAMi's rules never give out more than there is:

- 100 cores are a whole GPU for HAMi only where it offers 100. Where it offers more, only unused ones serve; where it offers
  less, none does, as with HAMi.
- An unknown NUMA node is node 0 for HAMi; GPUs without a known one do not serve containers that bind several to one.
- HAMi gives a container several instances of a GPU in MIG mode; here each slot is of another GPU, and whether an instance
  fits is asked of the GPU's places.

Source: HAMi 4707fb02.
"""

from collections.abc import Collection, Sequence

import msgspec

from topoalign.core.demand.share_annotations import VENDOR, Selection
from topoalign.core.demand.shares import UNSET, HamiRequest, Share, ShareFields
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import kept_apart, pcie_class
from topoalign.core.sharing.hami.fit import Surroundings, Unfit
from topoalign.core.sharing.hami.gpu_links import link_score
from topoalign.core.sharing.hami.gpu_scores import choose_gpus_as_hami, score_gpus
from topoalign.core.sharing.hami.registration import PairScores
from topoalign.core.sharing.share_refusals import NoneByHami
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import NONE_HELD


def choose_as_hami(
    topology: Topology,
    gpus: Sequence[SharedGpu],
    share: Share,
    able: Collection[DeviceID],
    fields: ShareFields,
) -> tuple[DeviceID, ...]:
    """
    The GPUs, of these `gpus`, that HAMi chooses, in the order in which it takes them. `able`: those that have enough left
    by topoalign's own rules. Raises NoneByHami, and TooMuchWork where the best connected ones are not found in time.
    """
    rules = share.rules
    asked = HamiRequest(
        count=share.gpus,
        vendor=VENDOR,
        memory=share.memory // MIB,
        percent=share.percentage,
        cores=CORES if share.whole else share.cores,
    )
    if share.parts:
        # equal parts are the least of those of these GPUs; where a slot becomes a MIG instance, any that fits
        parts = [NONE_HELD if gpu.profiles else share.amount_of(gpu.offered) for gpu in gpus if gpu.device in able]
        memory = min(each.memory for each in parts) // MIB
        asked = msgspec.structs.replace(asked, memory=memory, percent=UNSET, cores=min(each.cores for each in parts))
    binds = rules.numa_bind and share.gpus > 1
    # the lists name a MIG instance by its GPU
    left_out = tuple(gpu.device for gpu in gpus if not rules.uuids.takes_uuid(gpu.gpu))
    around = Surroundings(
        rules=msgspec.structs.replace(rules, uuids=Selection(unwanted=left_out)),
        spent=frozenset(gpu.device for gpu in gpus if gpu.device not in able or (binds and gpu.numa_node is None)),
        scores=scores_of_links(topology),
    )
    without_mode = [msgspec.structs.replace(gpu, mode="") for gpu in gpus]  # so that HAMi's rules place no instances
    found = choose_gpus_as_hami(score_gpus(without_mode, (asked,), rules.weights), asked, around)
    if isinstance(found, Unfit):
        raise NoneByHami(fields, share.gpus, found.reason)
    return tuple(each.uuid for each in found)


@computed_once
def scores_of_links(topology: Topology) -> PairScores:
    """What HAMi publishes of the links between the machine's GPUs; MIG instances have none."""

    def score(a: DeviceID, b: DeviceID) -> int:
        link = topology.link_by_pair.get((a, b))
        # a fabric manager may keep GPUs with NVLinks apart
        nvlinks = 0 if link is None or kept_apart(topology, a, b) else link.fabric_links
        return link_score(pcie_class(topology, a, b)) + (link_score(nvlinks) if nvlinks else 0)

    return {a.id: {b.id: score(a.id, b.id) for b in topology.gpus if b is not a} for a in topology.gpus}
