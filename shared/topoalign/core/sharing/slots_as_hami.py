"""
Chooses the GPUs for a container's slots by HAMi's rules (`compat: hami`).

The accepted GPUs are sorted in HAMi's order, and HAMi's checks (`hami.fit`) are applied to one after another. Held
amounts are counted as in HAMi. If the pod sets no policy, the order is `spread`. Example: two GPUs have ten slots, 100
cores and 40960 MiB each, and a container requests one GPU with 40 cores:

    held of GPU-0: 1 slot, 30 cores, 4096 MiB    10 x (0.1 + 0.3 + 0.1) = 5
    held of GPU-1: 2 slots, 8192 MiB             10 x (0.2 + 0.2) = 4
    spread tries GPU-1 first, and binpack tries GPU-0 first

topoalign's own rules still apply: a GPU that does not have enough by these rules counts as a GPU without a free slot.
So HAMi's rules never allocate more than is offered. The differences from HAMi are:

- HAMi treats 100 cores as a whole GPU only if the GPU offers exactly 100. Here, a GPU that offers more must be unused.
  A GPU that offers less does not fit, as in HAMi.
- HAMi treats an unknown NUMA node as node 0. Here, a GPU with an unknown NUMA node does not fit a container that binds
  several GPUs to one node.
- HAMi can allocate several instances of one GPU in MIG mode to a container. Here, each slot is on a different GPU, and
  the GPU's free placements determine whether an instance fits.

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
    The GPUs that HAMi chooses from `gpus`, in HAMi's order. `able`: the GPUs that have enough by topoalign's own rules.
    Raises NoneByHami, and TooMuchWork if the best connected GPUs are not found in time.
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
        # for equal parts: the smallest part of these GPUs; if a slot becomes a MIG instance, any instance that fits
        parts = [NONE_HELD if gpu.profiles else share.amount_of(gpu.offered) for gpu in gpus if gpu.device in able]
        memory = min(each.memory for each in parts) // MIB
        asked = msgspec.structs.replace(asked, memory=memory, percent=UNSET, cores=min(each.cores for each in parts))
    binds = rules.numa_bind and share.gpus > 1
    # for a MIG instance, the lists contain the uuid of its GPU
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
    """The scores that HAMi publishes for the links between the machine's GPUs. MIG instances have none."""

    def score(a: DeviceID, b: DeviceID) -> int:
        link = topology.link_by_pair.get((a, b))
        # GPUs with NVLinks can be in different fabrics
        nvlinks = 0 if link is None or kept_apart(topology, a, b) else link.fabric_links
        return link_score(pcie_class(topology, a, b)) + (link_score(nvlinks) if nvlinks else 0)

    return {a.id: {b.id: score(a.id, b.id) for b in topology.gpus if b is not a} for a in topology.gpus}
