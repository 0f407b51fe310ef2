"""A KubeletConfiguration is found in the wrappers that it is handed around in, or the field that holds it is named."""

import json
from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.requests import Policy
from topoalign.kubelet.files import kubelet_configuration

OBJECT = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n"
FIELDS = {"topologyManagerPolicy": "restricted"}


def indented(text: str, levels: int) -> str:
    return "".join(f"{'  ' * levels}{line}\n" for line in text.splitlines())


CONFIG_MAP = f"apiVersion: v1\nkind: ConfigMap\ndata:\n  kubelet: |\n{indented(OBJECT, 2)}"
PRINTED = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": json.dumps({"data": {"a": OBJECT}})}
    },
    "data": {"kubelet": OBJECT},
}
"""As kubectl prints it: with a copy of the whole object."""

COMPLETE = {
    "a configz answer": (json.dumps({"kubeletconfig": FIELDS}), "kubeletconfig"),
    "kubeadm's ConfigMap": (CONFIG_MAP, "data.kubelet"),
    "a ConfigMap as kubectl prints it": (json.dumps(PRINTED), "data.kubelet"),
    "a List": (json.dumps({"kind": "List", "items": [{"kind": "Node"}, PRINTED]}), "items[1].data.kubelet"),
    "a key with dots": (CONFIG_MAP.replace("kubelet: |", "config.yaml: |"), "data[config.yaml]"),
    "several documents": (f"kind: ClusterConfiguration\n---\n{OBJECT}---\n", "documents[1]"),
    "kind's patches": (f"kind: Cluster\nkubeadmConfigPatches:\n- |\n{indented(OBJECT, 1)}", "kubeadmConfigPatches[0]"),
    "values in an object": (
        f"kind: HelmRelease\nspec:\n  values: |\n    files:\n      kubelet: |\n{indented(OBJECT, 4)}",
        "spec.values.files.kubelet",
    ),
}

PARTS = {
    "Talos": {"machine": {"kubelet": {"extraConfig": FIELDS}}},
    "OpenShift": {"kind": "KubeletConfig", "spec": {"kubeletConfig": FIELDS}},
    "nodeadm": {"kind": "NodeConfig", "spec": {"kubelet": {"config": FIELDS}}},
    "eksctl": {"kind": "ClusterConfig", "nodeGroups": [{"kubeletExtraConfig": FIELDS}]},
    "GKE": {"kubeletConfig": FIELDS, "linuxConfig": {}},
    "flags of k3s": {"kubelet-arg": ["--cpu-manager-policy=static"]},
    "fields alone": FIELDS,
}


def policy_and_note(tmp_path: Path, text: str) -> tuple[Policy, str | None]:
    path = tmp_path / "file"
    path.write_text(text)
    rules, note = kubelet_configuration.load_with_note(path)
    return rules.policy, note


@pytest.mark.parametrize("wrapper", COMPLETE)
def test_a_whole_configuration_in_a_wrapper_is_taken_and_its_field_named(wrapper: str, tmp_path: Path) -> None:
    text, field = COMPLETE[wrapper]

    note = f"the configuration of the kubelet was taken from {field}"
    assert (Policy.RESTRICTED, note) == policy_and_note(tmp_path, text)


@pytest.mark.parametrize("wrapper", PARTS)
def test_a_part_of_a_configuration_is_refused_with_where_the_whole_is(wrapper: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidField) as caught:
        policy_and_note(tmp_path, json.dumps(PARTS[wrapper]))

    assert "kind" == caught.value.field
    assert "no KubeletConfiguration" in caught.value.finding and "/configz" in caught.value.remedy


@pytest.mark.parametrize("text", [OBJECT, f"---\n{OBJECT}", f"{OBJECT}---\n"])
def test_a_file_without_a_wrapper_has_no_note(text: str, tmp_path: Path) -> None:
    assert (Policy.RESTRICTED, None) == policy_and_note(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (
            CONFIG_MAP.replace("restricted", "strict"),
            "data.kubelet.topologyManagerPolicy",
            ["Invalid enum value 'strict'"],
        ),
        (
            f"{CONFIG_MAP}---\n{OBJECT}cpuManagerPolicy: static\n",
            "document",
            ["documents[0].data.kubelet, documents[1]"],
        ),
        ("{kind: ConfigMap, apiVersion: v1, data: {}}", "kind", ["'ConfigMap' of 'v1' is no Kubelet", "/configz"]),
        ("a: {b: c}", "kind", ["without kind"]),
    ],
)
def test_what_is_wrong_in_a_wrapper_is_named_by_its_whole_path(
    text: str, field: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InvalidField) as caught:
        kubelet_configuration.load_with_note(path)

    assert field == caught.value.field
    assert [] == [word for word in words if word not in f"{caught.value.finding} {caught.value.remedy}"]
