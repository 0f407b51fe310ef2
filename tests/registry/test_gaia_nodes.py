"""Nodes with `compat: gaia` as a registry sees them: it predicts the GPUs that the node gives."""

from random import Random

import msgspec
from decision_support import pod
from unit_support import CORES, GAIA, MEMORY, REVERSED, asks, gpus_of
from view_support import NODE, OneNode, asked

from topoalign.core.admission.admit import admit
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.requests import Policy


def given(decision: Decision) -> list[int]:
    """Indexes of the GPUs of which the pod would get units; of a refusal none."""
    if not isinstance(decision, Admission):
        return []
    units = [unit for each in decision.allocations for some in each.devices.values() for unit in some]
    return sorted({int(unit.partition("::")[0].removeprefix("GPU-")) for unit in units})


def test_a_registry_predicts_what_such_a_node_gives() -> None:
    """From its facts alone, while pods come and go: the verdict of the filter, and the very GPUs. Of two rules."""
    compared = 0
    for seed in range(8):
        chance = Random(seed)
        rules = msgspec.structs.replace(GAIA, policy=chance.choice([Policy.NONE, Policy.RESTRICTED]))
        world = OneNode(rules, REVERSED)
        world.tell(world.says.all())
        for number in range(8):
            share = asks(*chance.choice([(20, 1), (30, 3), (60, 2), (0, 3), (100, 0), (200, 4)]), name="c0")
            wanted = pod(share, name=f"p{number}")
            passed = world.scheduler.filter(asked(wanted), (NODE,)).passed
            predicted = predict(world.cluster.member(NODE).state, wanted, 0.0)
            decided = admit(world.says.state, wanted, rules)

            assert given(decided) == given(predicted), (seed, number)
            assert ((NODE,) if given(decided) else ()) == passed
            compared += bool(given(decided))
            if chance.random() < 0.7:
                world.tell(world.says.admit(wanted, f"uid-{number}"))
            elif world.says.entries:
                world.tell(world.says.end(chance.choice(world.says.entries).pod_uid))
    assert compared > 35


def test_the_facts_of_a_node_tell_that_it_follows_gpu_manager() -> None:
    """Of four unused GPUs the share goes to the lowest minor; with topoalign's own rules to the lowest index."""
    found = []
    for rules in (GAIA, msgspec.structs.replace(GAIA, compat="")):
        world = OneNode(rules, REVERSED)
        world.tell(world.says.all())
        decision = predict(world.cluster.member(NODE).state, pod(asks(20, 1)), 0.0)
        assert isinstance(decision, Admission)
        devices = decision.allocations[0].devices
        found.append(gpus_of(world.says.state, [*devices[CORES], *devices[MEMORY]]))

    assert [[3], [0]] == found
