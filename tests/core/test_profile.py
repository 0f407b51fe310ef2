"""The profiles of the modes: a complete table, without entries that are no difference, read instead of the mode."""

import re
from pathlib import Path

import msgspec

from topoalign import core
from topoalign.core.model.kubelet import KubeletRules
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.profile import BEST, KUBELET, PROFILES, profile_of

CORE = Path(core.__file__).parent


def test_every_mode_has_its_profile() -> None:
    """`profile_of` knows each mode."""

    assert set(Mode) == set(PROFILES)
    assert (KUBELET, BEST) == (profile_of(Mode.KUBELET), profile_of(Mode.BEST))


def test_every_field_is_a_difference() -> None:
    """A field with one value in both profiles would be a rule, and no difference."""
    kubelet, best = msgspec.structs.asdict(KUBELET), msgspec.structs.asdict(BEST)

    assert [] == [name for name in kubelet if kubelet[name] == best[name]]


def test_every_field_is_read() -> None:
    """A difference that nobody reads is none."""
    code = "\n".join(path.read_text() for path in CORE.rglob("*.py") if path.name != "profile.py")

    assert [] == [name for name in KUBELET.__struct_fields__ if f".{name}" not in code]


def test_no_module_of_the_core_asks_for_the_mode() -> None:
    """What a mode does differently is asked of its profile; nothing compares modes."""
    compared = re.compile(r"(\bis|==|!=|\bin) (not )?\(?Mode\.|Mode\.\w+ (is|==|!=|if|else)")
    found = [path.name for path in CORE.rglob("*.py") if compared.search(path.read_text())]

    assert [] == found


def test_a_node_that_is_told_no_rules_decides_by_these() -> None:
    """Defaults are a promise: whoever leaves a rule out of a request or a fact means them."""
    rules = AdmissionRules()
    said = KubeletRules(policy="none", scope="pod", cpu_manager="none", memory_manager="None", placement="topology")

    assert ("best-effort", "container", "best", "topology") == (rules.policy, rules.scope, rules.mode, rules.placement)
    assert ("static", "Static", "", 8) == (
        rules.cpu_manager,
        rules.memory_manager,
        rules.compat,
        rules.max_allowable_numa_nodes,
    )
    assert (False, "", 0, frozenset(), {}) == (
        rules.prefer_closest_numa_nodes,
        rules.reserved_cpus,
        rules.reserved_cpu_count,
        rules.cpu_options,
        rules.reserved_memory,
    )
    assert (False, 8, (), "", 0, {}, "", "") == (
        said.prefer_closest_numa_nodes,
        said.max_allowable_numa_nodes,
        said.cpu_options,
        said.reserved_cpus,
        said.reserved_cpu_count,
        said.reserved_memory,
        said.unknown,
        said.compat,
    )
