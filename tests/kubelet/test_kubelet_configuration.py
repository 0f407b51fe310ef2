"""A KubeletConfiguration becomes the rules of that kubelet; what it would not start with is an error with a path."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound, StateFault
from topoalign.core.model.ids import MEMORY, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode, Policy, Scope
from topoalign.kubelet.files import checkpoint, documents, kubelet_configuration
from topoalign.kubelet.files.documents import InvalidDocument

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


def rules(text: str, head: str = HEAD) -> AdmissionRules:
    return kubelet_configuration.rules_of(documents.parse_document((head + text).encode(), "config.yaml"))


def test_what_a_file_does_not_say_is_as_in_the_kubelet() -> None:
    expected = AdmissionRules(
        mode=Mode.KUBELET, policy=Policy.NONE, scope=Scope.CONTAINER, cpu_manager="none", memory_manager="None"
    )

    assert expected == rules("")
    assert expected == rules('topologyManagerPolicy: ""\ncpuManagerPolicy: null\nreservedMemory: null\n')


def test_the_settings_that_bear_on_a_decision_are_read() -> None:
    """Every setting that bears on a decision is read, and all others are ignored."""
    text = """
maxPods: 250
evictionHard: {memory.available: 100Mi}
featureGates: {CPUManagerPolicyAlphaOptions: true, Other: false}
topologyManagerPolicy: best-effort
topologyManagerScope: pod
topologyManagerPolicyOptions: {prefer-closest-numa-nodes: T, max-allowable-numa-nodes: "34"}
cpuManagerPolicy: static
cpuManagerPolicyOptions: {align-by-socket: "1", full-pcpus-only: "true", strict-cpu-reservation: "F"}
reservedSystemCPUs: 0-1,4
kubeReserved: {cpu: 500m, memory: 1Gi}
memoryManagerPolicy: Static
reservedMemory:
  - numaNode: 0
    limits: {memory: 1Gi, hugepages-2Mi: 4194304}
  - numaNode: 1
    limits: {memory: 1.5G}
"""
    expected = AdmissionRules(
        mode=Mode.KUBELET,
        policy=Policy.BEST_EFFORT,
        scope=Scope.POD,
        prefer_closest_numa_nodes=True,
        max_allowable_numa_nodes=34,
        cpu_manager="static",
        cpu_options=frozenset({CpuOption.ALIGN_BY_SOCKET, CpuOption.FULL_PCPUS_ONLY}),
        reserved_cpus="0-1,4",
        memory_manager="Static",
        reserved_memory={0: {MEMORY: 1 << 30, ResourceName("hugepages-2Mi"): 4194304}, 1: {MEMORY: 1_500_000_000}},
    )

    assert expected == rules(text)


def test_json_is_read_like_yaml() -> None:
    content = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1"}

    assert Policy.RESTRICTED == rules(json.dumps({**content, "topologyManagerPolicy": "restricted"}), head="").policy


@pytest.mark.parametrize(
    ("system", "kube", "count"), [("500m", "500m", 1), ("1", "1m", 2), ("1.5", "0", 2), ("100u", "0", 1), ("2", "2", 4)]
)
def test_cpus_kept_for_the_system_and_the_kubelet_are_added_and_rounded_up(system: str, kube: str, count: int) -> None:
    text = f'cpuManagerPolicy: static\nsystemReserved: {{cpu: "{system}"}}\nkubeReserved: {{cpu: "{kube}"}}\n'

    assert count == rules(text).reserved_cpu_count
    assert 0 == rules(text + 'reservedSystemCPUs: "3"\n').reserved_cpu_count


def test_topology_manager_options_are_ignored_under_policy_none() -> None:
    """Options of the topology manager are ignored under the policy none."""
    assert 8 == rules("topologyManagerPolicyOptions: {nobody-knows: x}").max_allowable_numa_nodes


@pytest.mark.parametrize(
    ("gates", "option", "starts"),
    [
        ("", "align-by-socket", False),
        ("CPUManagerPolicyAlphaOptions: true", "align-by-socket", True),
        ("AllAlpha: true", "distribute-cpus-across-cores", True),
        ("AllAlpha: true, CPUManagerPolicyAlphaOptions: false", "align-by-socket", False),
        ("", "distribute-cpus-across-numa", True),
        ("CPUManagerPolicyBetaOptions: false", "distribute-cpus-across-numa", False),
        ("AllBeta: false", "distribute-cpus-across-numa", False),
        ("AllBeta: false", "full-pcpus-only", True),
    ],
)
def test_an_option_whose_feature_gate_is_off_prevents_a_start(gates: str, option: str, starts: bool) -> None:
    """An option whose feature gate is off prevents the kubelet from starting."""
    text = (
        f'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\nfeatureGates: {{{gates}}}\n'
        f'cpuManagerPolicyOptions: {{{option}: "true"}}\n'
    )
    if starts:
        assert frozenset({CpuOption(option)}) == rules(text).cpu_options
    else:
        with pytest.raises(InvalidField, match=rf"cpuManagerPolicyOptions\[{option}\]: its feature gate"):
            rules(text)


STATIC = 'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\n'
MEMORY_STATIC = "memoryManagerPolicy: Static\nreservedMemory: "
OPTIONS = "topologyManagerPolicy: restricted\ntopologyManagerPolicyOptions: "


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("topologyManagerPolicy: strict", "topologyManagerPolicy: Invalid enum value 'strict'"),
        ("topologyManagerScope: node", "topologyManagerScope"),
        ("topologyManagerPolicy: 7", "topologyManagerPolicy: Expected `str`, got `int`"),
        (
            OPTIONS + "{max-allowable-numa-nodes: 16}",
            r"topologyManagerPolicyOptions\[max-allowable-numa-nodes\]: Expected `str`",
        ),
        (OPTIONS + '{max-allowable-numa-nodes: "7"}', r"topologyManagerPolicyOptions\[max-allowable-numa-nodes\]"),
        (OPTIONS + '{max-allowable-numa-nodes: "٨٨"}', r"topologyManagerPolicyOptions\[max-allowable-numa-nodes\]"),
        (OPTIONS + '{max-allowable-numa-nodes: "true"}', r"topologyManagerPolicyOptions\[max-allowable-numa-nodes\]"),
        (OPTIONS + '{prefer-closest-numa-nodes: "yes"}', r"topologyManagerPolicyOptions\[prefer-closest-numa-nodes\]"),
        (OPTIONS + '{numa-allocation-strategy: "x"}', r"topologyManagerPolicyOptions\[numa-allocation-strategy\]"),
        ("cpuManagerPolicy: dynamic", "cpuManagerPolicy: Invalid enum value"),
        ("cpuManagerPolicy: static", "cpuManagerPolicy: the static policy needs CPUs"),
        ('cpuManagerPolicy: static\nkubeReserved: {cpu: "0"}', "cpuManagerPolicy: the static policy needs CPUs"),
        ('kubeReserved: {cpu: "-1"}', r"kubeReserved\[cpu\]"),
        ("systemReserved: {cpu: 1}", r"systemReserved\[cpu\]: Expected `str`"),
        ("reservedSystemCPUs: 0-", "reservedSystemCPUs"),
        ("reservedSystemCPUs: 1", "reservedSystemCPUs: Expected `str`"),
        ('cpuManagerPolicyOptions: {full-pcpus-only: "true"}', "cpuManagerPolicyOptions: options of a static policy"),
        (STATIC + 'cpuManagerPolicyOptions: {full: "true"}', r"cpuManagerPolicyOptions\[full\]: an unknown option"),
        (STATIC + 'cpuManagerPolicyOptions: {full-pcpus-only: "on"}', r"cpuManagerPolicyOptions\[full-pcpus-only\]"),
        (
            STATIC + "cpuManagerPolicyOptions: {prefer-align-cpus-by-uncorecache: t, distribute-cpus-across-numa: t}",
            "cpu_options: the kubelet does not start with both",
        ),
        ("memoryManagerPolicy: static", "memoryManagerPolicy: Invalid enum value 'static'"),
        ("memoryManagerPolicy: Static", "memoryManagerPolicy: the static policy needs memory"),
        (MEMORY_STATIC + "[{numaNode: -1, limits: {memory: 1}}]", r"reservedMemory\[0\].numaNode"),
        (MEMORY_STATIC + "[{limits: {memory: 0}}]", r"reservedMemory\[0\].limits\[memory\]"),
        (MEMORY_STATIC + "[{limits: {memory: -1Gi}}]", r"reservedMemory\[0\].limits\[memory\]"),
        (MEMORY_STATIC + "[{limits: {memory: .inf}}]", r"reservedMemory\[0\].limits\[memory\]"),
        (MEMORY_STATIC + "[{limits: {memory: true}}]", r"reservedMemory\[0\].limits\[memory\]: Expected"),
        (MEMORY_STATIC + "[{limits: {cpu: 1}}]", r"reservedMemory\[0\].limits\[cpu\]"),
        (MEMORY_STATIC + "[{limits: {memory: 1}}, {limits: {memory: 1}}]", r"reservedMemory\[1\].limits\[memory\]"),
        (MEMORY_STATIC + "{memory: 1}", "reservedMemory: Expected `array`"),
        ("1: x", "document: Expected `str`"),
        ("systemReserved: {1: x}", "systemReserved: Expected `str`"),
        ('kubeReserved: {cpu: "99999999999999999999999"}', r"kubeReserved\[cpu\]: '9+' is no amount"),
        (MEMORY_STATIC + "[{limits: {memory: 99999999999Gi}}]", r"limits\[memory\]: '9+Gi' is no amount"),
        ("featureGates: {AllBeta: true, AllAlpha: 'true', A: 'false'}", r"featureGates\[AllAlpha\]: Expected `bool`"),
    ],
)
def test_a_value_that_no_kubelet_starts_with_is_named_by_its_path(text: str, path: str) -> None:
    with pytest.raises(InvalidField, match=path) as caught:
        rules(text)
    assert caught.value.remedy


@pytest.mark.parametrize("field", ["cpuManagerPolicy", "memoryManagerPolicy", "topologyManagerPolicy"])
def test_the_remedy_for_a_policy_that_is_not_known_names_those_that_are(field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        rules(f"{field}: dynamic")

    known = {"cpuManagerPolicy": "static", "memoryManagerPolicy": "Static", "topologyManagerPolicy": "restricted"}
    assert re.search(rf"{field} [^;]*\b{known[field]}\b", caught.value.remedy)


@pytest.mark.parametrize(
    "head", ["maxPods: 3\n", "kind: Pod\napiVersion: v1\n", "kind: KubeletConfiguration\napiVersion: v1\n"]
)
def test_another_kind_of_object_is_no_configuration(head: str) -> None:
    with pytest.raises(InvalidField, match="kind"):
        rules("", head)


@pytest.mark.parametrize(
    ("raw", "finding"),
    [
        (b"a: 1\na: 2", "line 2, column 1: a key stands twice: 'a'"),
        (b'{"a": 1, "a": 2}', "a key stands twice: 'a'"),
        (b"a: &x [1]\nb: *x", "line 2, column 4: aliases are not read"),
        (b"a: 1\n---\nb: 2", "line 2, column 1: a second document begins"),
        (b"a:\n\t- 1", "line 2, column 1: found character"),
        (b"a: !!python/object:os.system x", "tags are not read"),
        (b"a: !!timestamp x", "tags are not read"),
        (b"a: \xff", "byte 4 is not UTF-8"),
        (b"", "it is empty"),
        (b"- 1", "not a mapping"),
        (b"a: " + b"[" * 100, "more than 64 levels deep"),
        (b'{"a": ' * 30_000, "recursion"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"a: 2001-99-99", "month"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "digits"),
        (b'{"a": ' * 70 + b"1" + b"}" * 70, "more than 64 levels"),
        (b"? [a]\n: 1", "unhashable"),
        (b"a: \x00", "control characters"),
        (b"#" * (10 << 20), "larger than 256 KiB"),
    ],
)
def test_a_file_that_is_no_document_is_one_clear_error(raw: bytes, finding: str) -> None:
    with pytest.raises(InvalidDocument, match=finding) as caught:
        documents.parse_document(raw, "config.yaml")
    assert str(caught.value).startswith("config.yaml: ") and caught.value.remedy


def test_numbers_to_the_base_of_60_are_text_as_in_the_kubelet() -> None:
    """Digits without end would take seconds as a number, too, or be one that cannot be shown."""
    long, longer = "1" + ":5" * 100_000, "0x" + "f" * 20_000

    found = documents.parse_document(f"a: 1:30\nb: 1:30.5\nc: 90\nd: {long}\ne: {longer}\n".encode(), "config.yaml")

    assert {"a": "1:30", "b": "1:30.5", "c": 90, "d": long, "e": longer} == found


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Nobody writes to the pipe: to open it as usual would be to wait without end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(InvalidDocument, match="cannot be read: Not a regular file"):
        kubelet_configuration.load_configuration(pipe)
    with pytest.raises(StateFault, match="cannot be read: Not a regular file"):
        checkpoint.read_checkpoint_file(pipe)


def test_a_bomb_of_aliases_is_refused_before_it_is_built() -> None:
    """Nine levels of ten aliases each stand for a billion values."""
    levels = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]

    with pytest.raises(InvalidDocument, match="aliases"):
        documents.parse_document("\n".join(levels).encode(), "bomb")


def test_a_file_that_is_not_there_or_is_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="absent"):
        kubelet_configuration.load_configuration(tmp_path / "absent")
    with pytest.raises(InvalidDocument, match="cannot be read: Is a directory"):
        kubelet_configuration.load_configuration(tmp_path)
    with pytest.raises(InvalidDocument, match="cannot be read"):
        kubelet_configuration.load_configuration(Path("a\0b"))


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
)
FIELDS = ("featureGates", "topologyManagerPolicy", "topologyManagerPolicyOptions", "cpuManagerPolicyOptions")
MORE_FIELDS = ("cpuManagerPolicy", "reservedSystemCPUs", "kubeReserved", "memoryManagerPolicy", "reservedMemory")


@given(st.dictionaries(st.sampled_from((*FIELDS, *MORE_FIELDS)), values))
def test_no_values_in_our_fields_end_in_a_trace(fields: dict[str, Any]) -> None:
    head = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1"}
    try:
        found = kubelet_configuration.rules_of({**head, **fields})
    except BadRequest as error:
        assert error.remedy
    else:
        assert Mode.KUBELET is found.mode


@given(st.one_of(st.binary(max_size=400), st.text("{}[]:,-?&*!|>'\"#%@\n\t ab01.", max_size=200).map(str.encode)))
def test_no_bytes_end_in_a_trace(raw: bytes) -> None:
    try:
        assert isinstance(documents.parse_document(raw, "noise"), dict)
    except InvalidDocument as error:
        assert error.remedy


@given(st.integers(0, len(HEAD)), st.binary(min_size=1, max_size=3))
def test_a_configuration_that_is_cut_or_spoilt_is_read_or_refused(place: int, noise: bytes) -> None:
    whole = (HEAD + "topologyManagerPolicy: restricted\n").encode()
    for raw in (whole[:place], whole[:place] + noise + whole[place:]):
        try:
            kubelet_configuration.rules_of(documents.parse_document(raw, "config.yaml"))
        except BadRequest as error:
            assert error.remedy
