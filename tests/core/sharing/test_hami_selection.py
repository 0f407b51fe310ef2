"""Which cards a pod accepts in HAMi's words, and how our cards become HAMi's."""

import hami_reference as reference
import pytest
from hami_support import annotations, shared_gpu, usage
from hami_support import request as asking
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.share_annotations import GpuRules, read_as_hami, type_selection, uuid_selection
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.sharing.hami.fit import (
    Surroundings,
    fit,
    held_memory_in_mib,
    is_topology_aware,
    known_numa_node,
    memory_in_mib,
)


@given(annotations, st.sampled_from(["NVIDIA-A100", "nvidia h100", "V100", ""]), st.sampled_from("abcA"))
def test_cards_are_selected_by_type_and_uuid(notes: dict[str, str], model: str, uuid: str) -> None:
    assert reference.type_selected(notes, model) == type_selection(notes).takes_type(model)
    assert reference.uuid_selected(notes, uuid) == uuid_selection(notes).takes_uuid(uuid)


@pytest.mark.parametrize(
    ("notes", "policy", "expected"),
    [
        ({}, "spread", (False, False, False)),
        ({}, "topology-aware", (False, False, True)),
        ({"hami.io/gpu-scheduler-policy": "mutex, topology-aware"}, "spread", (False, True, True)),
        ({"hami.io/gpu-scheduler-policy": "mutex2"}, "topology-aware", (False, False, False)),
        ({"nvidia.com/numa-bind": "T"}, "spread", (True, False, False)),
        ({"nvidia.com/numa-bind": "tRUE"}, "spread", (False, False, False)),
    ],
)
def test_rules_of_a_pod(notes: dict[str, str], policy: str, expected: tuple[bool, bool, bool]) -> None:
    rules = read_as_hami(notes, policy)

    assert expected == (rules.numa_bind, rules.mutex, is_topology_aware(rules))


def test_a_mode_is_accepted_as_a_part_of_the_annotation() -> None:
    def takes(annotated: str | None, mode: str) -> bool:
        card = usage(reference.Card("a", mode=mode))
        return isinstance(fit([card], asking(), Surroundings(rules=GpuRules(mode=annotated))), tuple)

    assert [True, True, False] == [takes("hami-core,mps", each) for each in ("mps", "", "mig")]
    assert takes(None, "mps")


def test_partial_mib_count_against_the_request_and_no_numa_node_is_node_0() -> None:
    card = shared_gpu(1, 10 * MIB - 1, 30, MIB + 1, all_slots=4)

    assert (9, 2, 0) == (memory_in_mib(card), held_memory_in_mib(card), known_numa_node(card))
