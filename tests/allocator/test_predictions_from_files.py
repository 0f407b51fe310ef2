"""
What is predicted from a kubelet's files is what the kubelet then does, however stale the files are.

Pods of all kinds come and go by chance on machines of the catalogue, under all policies, scopes and options: refused after
some devices were allocated, ended and not deleted, static, without volumes. The stand-in decides on what its managers have
in memory; the prediction sees the root directory alone. A thorough run makes 20,000 admissions.
"""

import pytest
from faults_support import sample
from untidy_support import Answer, untidy_node

from topoalign.core.model.decisions import Decision
from topoalign.core.model.requests import PodRequest
from topoalign.kubelet.files.pod_directories import PodDirectories

pytestmark = pytest.mark.anyio

SEEDS, PODS = 800, 25


async def compared(seed: int, pods: int = PODS) -> list[tuple[PodRequest, Decision, Decision]]:
    """Pod by pod what was predicted and what was done."""
    found = []
    async with untidy_node(seed) as node:
        for _ in range(pods):
            await node.something_happens()
            found.append(await node.admit())
    return found


def is_by_chance(prediction: Decision) -> bool:
    """Whether a note says that the kubelet picks devices at random."""
    return any("picks them at random" in note for note in prediction.explanation.notes)


def reuses(pod: PodRequest) -> bool:
    """Whether a plain init container has devices that a later container may use again."""
    return any(not each.sidecar and any("/" in name for name in each.limits) for each in pod.init_containers)


def wrong(predicted: Decision, done: Decision) -> list[str]:
    """What differs and must not. Which devices are used again by chance is not compared."""
    expected, actual = Answer.of(done), Answer.of(predicted)
    fields = ["reason", "cpus", "memory", "devices"]
    if is_by_chance(predicted):
        fields.remove("devices")
    return [field for field in fields if getattr(expected, field) != getattr(actual, field)]


@pytest.mark.parametrize("seed", sample(range(SEEDS), 8))
async def test_what_is_predicted_from_the_files_is_what_the_kubelet_then_does(seed: int) -> None:
    found = await compared(seed)

    assert [] == [(pod.name, differing) for pod, predicted, done in found if (differing := wrong(predicted, done))]
    assert [] == [pod.name for pod, predicted, _ in found if is_by_chance(predicted) and not reuses(pod)]
    assert PODS == len(found)


async def test_without_the_rule_for_gone_pods_many_predictions_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the rule for pods that are gone many predictions are wrong. So the comparison can fail."""
    monkeypatch.setattr(PodDirectories, "is_gone", lambda *_: False)
    found = await compared(seed=9)

    assert 5 < sum(bool(wrong(predicted, done)) for _, predicted, done in found)
