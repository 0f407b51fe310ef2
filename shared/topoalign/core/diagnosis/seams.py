"""
The weakest seam of the GPUs that a pod would get on a node.

The kubelet's full decision is computed, so these are the GPUs that it would give, whatever ranks the nodes. Of several
containers the weakest seam counts. Plain init containers count only where no other container gets GPUs, because the others
take their GPUs over. MIG instances have no traffic between GPUs and thus no seam.
"""

from topoalign.core.diagnosis.nodes import Node, Question
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.scores import Members
from topoalign.core.placement.preference import positions, set_scorer


def seam_on(question: Question, node: Node) -> str:
    """For people: `18 NVLinks, 722 GB/s`. Empty: the node refuses the pod, or no container would get several GPUs."""
    decision = question.decide(node)
    if not isinstance(decision, Admission):
        return ""
    held = [(each.role, members_of(each, node.announced)) for each in decision.allocations]
    lasting = [members for role, members in held if role != "init" and members]
    several = [members for members in lasting or [members for _, members in held] if len(members) > 1]
    scorer = set_scorer(node.announced.shape)
    return scorer.describe(min(several, key=scorer.seam)) if several else ""


def members_of(allocation: Allocation, topology: Topology) -> Members:
    """The positions of the GPUs that a container has, or has a share of, but for those in MIG mode."""
    position = positions(topology)
    cards = {topology.card_of(device) for device in allocation.device_ids}
    return tuple(sorted(position[gpu.id] for gpu in topology.gpus if gpu.id in cards and gpu.mig is None))
