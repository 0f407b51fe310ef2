"""Somebody who lies under the node's name changes nothing for the node, and for the registry nothing that lasts."""

from faults_support import THOROUGH
from simulation.deeds import only
from simulation.scenario import run

from topoalign.core.model.events import LedgerFact, Reading

SEEDS = range(3_000 if THOROUGH else 60)
LIES = ("somebody forges a snapshot", "somebody forges facts", "somebody forges the hardware")
PODS = ("a pod comes", "a pod goes", "somebody asks", "somebody gives back")


def test_after_lies_the_registry_and_the_node_agree() -> None:
    """F06, F07: I10 in the end, with a registry that is rebuilt on a stream full of lies among them."""
    outcomes = [run(seed, deeds=only(*PODS, *LIES, "the registry is rebuilt", "discovery dies")) for seed in SEEDS]
    forged = [details[0] for o in outcomes for _, _, what, *details in o.trace if what == "forged"]

    assert [] == [outcome.report() for outcome in outcomes if outcome.violation is not None]
    assert sum(isinstance(event, LedgerFact) for event in forged) > len(SEEDS)
    assert sum(isinstance(event, Reading) for event in forged) > len(SEEDS) // 4
