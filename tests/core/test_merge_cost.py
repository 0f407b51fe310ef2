"""A warning names how long the kubelet's own merge takes, and a prediction where the kubelet picks by chance."""

from pathlib import Path

import msgspec
import pytest
from decision_support import admitted, container, machine, node, pod, refused

from topoalign.core.admission.admit import admit
from topoalign.core.model.ids import CPU, GPU, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.policy.merge.merge_time import MANY, duration, longest, warn_of_combinations


def test_where_topoalign_decides_itself_nothing_is_said_of_the_kubelet() -> None:
    eight = machine(nodes=8, gpus=range(8), nics=range(8))
    rules = AdmissionRules(mode=Mode.BEST, policy=Policy.RESTRICTED)
    init, main = container("init", gpus=2), container("main", gpus=1, nics=1, cpus=1, gib=1)

    assert () == admit(node(eight), pod(main, init=[init]), rules).explanation.notes


def test_a_warning_begins_at_a_hundred_million_combinations() -> None:
    assert None is warn_of_combinations({GPU: MANY - 1})
    assert "100000000 of nvidia.com/gpu" in (warn_of_combinations({GPU: MANY, CPU: 1}) or "")
    assert "1 of cpu" not in (warn_of_combinations({GPU: MANY, CPU: 1}) or "")


def test_any_number_of_combinations_can_be_said() -> None:
    """100 resources on 64 NUMA nodes are more than a float holds."""
    many = {ResourceName(f"example.com/{i}"): longest(64, Policy.RESTRICTED) for i in range(100)}

    assert "about 1.0e+24 combinations" in (warn_of_combinations(many) or "")
    assert 64 == longest(64, Policy.SINGLE_NUMA_NODE)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (25.0, "25 seconds"),
        (119.9, "119 seconds"),
        (120.0, "2 minutes"),
        (7199.0, "119 minutes"),
        (7200.0, "2 hours"),
        (172_800.0, "2 days"),
        (63_072_000.0, "2 years"),
        (3.2e16, "1,014,713,343 years"),
    ],
)
def test_a_duration_is_said_in_the_largest_unit_that_it_fills_twice(seconds: float, said: str) -> None:
    assert said == duration(seconds)


KUBELET = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, cpu_manager="none", memory_manager="None")


@pytest.mark.parametrize(
    ("init", "sidecar", "app", "chance"),
    [(3, False, 2, True), (3, False, 3, False), (3, False, 4, False), (3, True, 1, False)],
)
def test_an_app_container_with_some_init_devices_gets_them_by_chance(
    init: int, sidecar: bool, app: int, chance: bool
) -> None:
    """
    An app container that takes some devices of an init container gets them by chance. All of them, or all and more, are
    certain; a sidecar gives up none.
    """
    first = container("init", gpus=init, sidecar=sidecar)
    decision = admit(node(machine()), pod(container("main", gpus=app), init=[first]), KUBELET)

    notes = decision.explanation.notes
    assert chance == (app == len(admitted(decision)["main"].devices[GPU]) and bool(notes))
    if chance:
        assert notes[0].startswith("container main takes over 2 of the 3 nvidia.com/gpu of init containers")
        assert "at random" in notes[0]


def test_a_refusal_that_follows_from_such_a_choice_says_so_as_well() -> None:
    """What the second app container can have depends on which device the first one took over."""
    mains = container("one", gpus=1), container("two", gpus=4)
    decision = refused(admit(node(machine()), pod(*mains, init=[container("init", gpus=2)]), KUBELET))

    assert "two" == decision.container
    assert decision.explanation.notes[0].startswith("container one takes over 1 of the 2")


def test_published_cases_that_the_kubelet_picks_by_chance_have_the_note(vectors: Path) -> None:
    """
    The published cases in which the kubelet picks by chance are those with the note. A case is not compared by chance
    where the devices differ in the end; a note may be given for less.
    """
    from topoalign.tools.conformance.kubelet_files import FilesCase, decided

    cases = [
        msgspec.json.decode(line, type=FilesCase)
        for name in ("gone", "ended")
        for line in (vectors / f"kubelet_files/{name}.jsonl").read_bytes().splitlines()
    ]
    noted = {case.id for case in cases if any("at random" in note for note in decided(case).explanation.notes)}

    assert {case.id for case in cases if case.expect.by_chance} == noted & {c.id for c in cases if c.expect.admit}
