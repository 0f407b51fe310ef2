"""A plugin's configuration is found in a ConfigMap and in the values of charts, each by the field that holds it."""

import json
from pathlib import Path

import pytest

from topoalign.core.model.errors import BadRequest, InvalidField
from topoalign.plugin_config.file import configurations, load_content, load_plugin_config

FILE = "version: v1\nflags: {migStrategy: single}\n"
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"any": FILE}}
TWO = {**CONFIG_MAP, "data": {"any": FILE, "mig.yaml": FILE}}
MAP = {"config": {"map": {"default": FILE}}}

WRAPPERS = {
    "a ConfigMap": (json.dumps(CONFIG_MAP), ["data.any"]),
    "a ConfigMap with two keys": (json.dumps(TWO), ["data.any", "data[mig.yaml]"]),
    "a List": (
        json.dumps({"kind": "List", "items": [{"kind": "Pod"}, TWO]}),
        ["items[1].data.any", "items[1].data[mig.yaml]"],
    ),
    "several documents": (f"kind: Namespace\n---\n{json.dumps(CONFIG_MAP)}\n", ["documents[1].data.any"]),
    "values of nvidia-device-plugin": (json.dumps(MAP), ["config.map.default"]),
    "values of a parent chart": (json.dumps({"nvdp": MAP}), ["nvdp.config.map.default"]),
    "values of gpu-operator": (
        json.dumps({"devicePlugin": {"config": {"create": True, "name": "c", "data": {"any": FILE}}}}),
        ["devicePlugin.config.data.any"],
    ),
    "values as text in an object": (
        json.dumps({"kind": "Application", "spec": {"helm": {"values": json.dumps(MAP)}}}),
        ["spec.helm.values.config.map.default"],
    ),
    "values as a mapping": (json.dumps({"config": {"map": {"default": {"version": "v1"}}}}), ["config.map.default"]),
    "no wrapper": (FILE, [""]),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_configuration_in_a_wrapper_is_found_by_its_field(wrapper: str) -> None:
    text, fields = WRAPPERS[wrapper]
    found = configurations(text.encode(), Path("file"))

    assert fields == [each.field for each in found]
    assert [] == [each for each in found if isinstance(each.content, BadRequest)]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (json.dumps(TWO), "document", "2 configurations: data.any, data[mig.yaml]"),
        (json.dumps(CONFIG_MAP).replace("single", "some"), "data.any.flags.migStrategy", "'some'"),
        ("{kind: DaemonSet, spec: {}}", "document", "unknown field `kind`"),
    ],
)
def test_a_wrapper_without_one_valid_configuration_is_refused(text: str, field: str, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        load_content(text.encode(), Path("file"), {})

    assert field == caught.value.field
    assert words in f"{caught.value.finding} {caught.value.remedy}"


def test_the_only_configuration_of_a_wrapper_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps(CONFIG_MAP))

    assert "single" == load_plugin_config(path).configuration.flags.mig_strategy
