"""The table of hint providers: a provider is a class and a line, and takes part in everything from there on."""

import re
from collections.abc import Set
from pathlib import Path

import pytest
from decision_support import admitted, asking, container, machine, node, pod

from topoalign import core
from topoalign.core.admission.admit import admit
from topoalign.core.hints import providers
from topoalign.core.hints.answer_checks import check_answer
from topoalign.core.hints.provider import HintProvider, HintRequest, Largest
from topoalign.core.hints.providers import PROVIDERS, answer_hint_request
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.hints import HintAnswer, ProviderHints, TopologyHint
from topoalign.core.model.ids import ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules

POWER = ResourceName("example.com/power")
MAIN = ContainerName("main")


class PowerProvider(HintProvider):
    """A toy: only NUMA node 1 has power left."""

    name = "power"

    def hints(self, asked: HintRequest) -> ProviderHints:
        return {POWER: (TopologyHint(0b10, True),)}

    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        return {POWER}

    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        return Largest(1, len(asked.state.hardware.nodes), 0)


@pytest.fixture
def with_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with one more line."""
    power: HintProvider = PowerProvider()
    table = {**PROVIDERS, power.name: power}
    for module in ("providers", "answer_checks"):
        monkeypatch.setattr(f"topoalign.core.hints.{module}.PROVIDERS", table)


def test_the_kubelets_order_is_the_order_of_the_table() -> None:
    """Device, CPU and memory manager are asked in this order, each under its own name."""

    assert ["device", "cpu", "memory"] == list(PROVIDERS)
    assert list(PROVIDERS) == [each.name for each in providers.PROVIDERS.values()]


def test_without_the_toy_the_first_gpu_is_given() -> None:
    """The counter-check of the next test."""
    decision = admit(node(machine()), pod(container(gpus=1)), AdmissionRules())

    assert (0,) == admitted(decision)["main"].affinity


def test_a_provider_in_the_table_takes_part_in_the_decision(with_power: None) -> None:
    """The toy's hints are merged with those of the others, and stand in the explanation."""
    decision = admit(node(machine()), pod(container(gpus=1)), AdmissionRules())

    assert (1,) == admitted(decision)["main"].affinity
    assert ["device", "cpu", "memory", "power"] == list(decision.explanation.alignments[0].hints)


def test_a_provider_in_the_table_has_its_answers_checked(with_power: None) -> None:
    """An answer without the toy's resource is refused, and one with it is not."""
    state = node(machine())
    asked = asking(state, pod(container(gpus=1)), MAIN, AdmissionRules())
    good = answer_hint_request(asked)
    check_answer(asked, good)

    with pytest.raises(InvalidField, match="not device, cpu, memory and power"):
        check_answer(asked, HintAnswer(providers={"device": {}, "cpu": {}, "memory": {}}))
    with pytest.raises(InvalidField, match="not on the resources"):
        check_answer(asked, HintAnswer(providers={**good.providers, "power": {}}))


def test_nothing_but_the_providers_names_one() -> None:
    """No module of the hints, policies or decisions asks for a provider by its name."""
    root = Path(core.__file__).parent
    parts = [path for part in ("hints", "policy", "placement", "admission") for path in (root / part).rglob("*.py")]
    found = {path.name for path in parts if re.search(r"[\"'](device|cpu|memory)[\"']", path.read_text())}

    assert {"device_hints.py", "cpu.py", "memory_hints.py"} == found
