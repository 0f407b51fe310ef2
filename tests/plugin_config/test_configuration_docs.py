"""The page about the configuration says what the code has, and its examples are right."""

import re
from pathlib import Path

import msgspec
import pytest

from topoalign.cli import root
from topoalign.kubelet.files import documents
from topoalign.plugin_config import nvidia_fields
from topoalign.plugin_config.configuration import Configuration, GpuSlots, SharedResource, Units
from topoalign.plugin_config.file import flatten_document, interpret_document, load_plugin_config
from topoalign.plugin_config.file_watch import VARIABLE

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "configuration.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def rows(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with this."""
    table = PAGE.split(f"\n| {first} | ")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_is_a_configuration(text: str) -> None:
    found = interpret_document(documents.parse_document(text.encode(), "docs/configuration.md"), {})

    assert Configuration() != found.configuration
    assert () == found.findings


def test_there_are_examples_of_every_section_that_is_a_list() -> None:
    assert 7 == len(EXAMPLES)
    assert Configuration() != load_plugin_config(REPOSITORY / "examples" / "topoalign.yaml").configuration


def test_every_field_is_listed_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows("field")}
    defaults = msgspec.to_builtins(Configuration())
    values = {path: at(defaults, path) for path in flatten_document(defaults)}

    assert {path: written(value) for path, value in values.items()} == documented
    shared = {field.encode_name for field in msgspec.structs.fields(SharedResource)}
    assert shared == {row[0].strip("`") for row in rows("key | default")}
    units = {field.encode_name: str(field.default) for field in msgspec.structs.fields(Units)}
    assert units == {row[0].strip("`"): row[1].strip("`") for row in rows("key of `units`")}
    slots = {field.encode_name: written(field.default) for field in msgspec.structs.fields(GpuSlots)}
    assert slots == {row[0].strip("`"): row[1].strip("`") for row in rows("key of `slots`")}


def at(content: object, path: str) -> object:
    for key in path.split("."):
        assert isinstance(content, dict)
        content = content[key]
    return content


def written(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def test_every_variable_and_unsupported_field_of_nvidias_is_listed() -> None:
    """The page lists every variable of NVIDIA's plugin and every field of its file that is not supported."""
    variables = {name for row in rows("variable") for name in re.findall(r"`([A-Z_]+)`", row[0])}
    assert {*nvidia_fields.VARIABLES, nvidia_fields.FILE, *nvidia_fields.DP_VARIABLES} == variables
    assert {} == nvidia_fields.drop_nvidia_variables(dict.fromkeys(variables, "1")), (
        "what `topoalign up` leaves aside is all of them"
    )
    for row in rows("variable"):
        for name in set(re.findall(r"`([A-Z_]+)`", row[0])) & nvidia_fields.VARIABLES.keys():
            assert f"`{nvidia_fields.VARIABLES[name].field}`" in row[1]

    others = PAGE.split("## Fields of NVIDIA's file that are ignored or refused")[1].split("\n## ")[0]
    assert [] == [
        field for field in (*nvidia_fields.WITHOUT_EFFECT, *nvidia_fields.REFUSED) if f"`{field}`" not in others
    ]
    assert f"`{VARIABLE}`" in PAGE


def test_the_command_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    example = PAGE.split("```console\n$ topoalign ")[1].split("```")[0]
    command, _, shown = example.partition("\n")
    root.run_command_line(command.split())

    assert shown == capsys.readouterr().out


@pytest.mark.parametrize(
    "feature",
    [
        *(
            "configuration file",
            "configuration per node",
            "reload",
            "mig-strategy",
            "fail-on-init-error",
            "driver-root",
        ),
        *("GDS, MOFED, GDRCOPY", "IMEX", "device-discovery-strategy", "pass-device-specs", "device-list-strategy"),
        *("device-id-strategy", "CDI file", "shared-devices-allocation-policy", "kubelet-socket", "resource names"),
        *(
            "time slicing",
            "MPS",
            "preferred allocation",
            "health",
            "registration",
            "PreStartContainer",
            "platforms",
            "labels",
        ),
    ],
)
def test_every_feature_of_nvidias_plugin_has_ours_beside_it(feature: str) -> None:
    found = [row for row in rows("feature") if row[0].startswith(feature)]

    assert found and all(row[1] and row[2] for row in found)
