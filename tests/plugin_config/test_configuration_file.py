"""Files written for NVIDIA's device plugin, and ours, are understood; what is wrong is named by its path."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serving_support import configured

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound
from topoalign.kubelet.files import documents
from topoalign.kubelet.files.documents import InvalidDocument
from topoalign.plugin_config import nvidia_fields, resource_names
from topoalign.plugin_config.configuration import (
    Configuration,
    Flags,
    GpuEntry,
    Health,
    Imex,
    MigEntry,
    NicEntry,
    PluginFlags,
    ResourcesSection,
    SharedResource,
    SharingSection,
    TimeSlicing,
)
from topoalign.plugin_config.file import interpret_document, load_plugin_config

NVIDIA_FILE = """
version: v1
flags:
  migStrategy: mixed
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  useNodeFeatureAPI: false
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: /usr/bin/nvidia-ctk
    containerDriverRoot: /driver
    kubeletSocket: /var/lib/kubelet/device-plugins/kubelet.sock
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
    sleepInterval: 60s
resources:
  gpus:
    - {pattern: "*A100*", name: a100}
  mig:
    - {pattern: 1g.10gb, name: nvidia.com/small}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - {name: nvidia.com/gpu, replicas: 10}
      - {name: mig-1g.10gb, rename: small, devices: [0, "1:0"], replicas: 2}
imex: {channelIDs: [0], required: true}
"""


def test_every_field_of_nvidias_file_is_read() -> None:
    expected = Configuration(
        flags=Flags(
            mig_strategy="mixed",
            nvidia_driver_root="/run/nvidia/driver",
            nvidia_dev_root="/",
            mps_root="/run/nvidia/mps",
            gdrcopy_enabled=True,
            gds_enabled=True,
            mofed_enabled=True,
            plugin=PluginFlags(
                pass_device_specs=True,
                device_list_strategy=("envvar", "cdi-cri"),
                device_id_strategy="index",
                cdi_annotation_prefix="cdi.example.com/",
                nvidia_cdi_hook_path="/usr/bin/nvidia-ctk",
                container_driver_root="/driver",
                shared_devices_allocation_policy="packed",
            ),
        ),
        resources=ResourcesSection(
            gpus=(GpuEntry(pattern="*A100*", name="nvidia.com/a100"),),
            mig=(MigEntry(pattern="1g.10gb", name="nvidia.com/small"),),
        ),
        sharing=SharingSection(
            time_slicing=TimeSlicing(
                rename_by_default=True,
                fail_requests_greater_than_one=True,
                resources=(
                    SharedResource(name="nvidia.com/gpu", rename="nvidia.com/gpu.shared", replicas=10),
                    SharedResource(
                        name="nvidia.com/mig-1g.10gb", rename="nvidia.com/small", devices=(0, "1:0"), replicas=2
                    ),
                ),
            )
        ),
        imex=Imex(channel_ids=(0,), required=True),
    )
    found = interpret_document(documents.parse_document(NVIDIA_FILE.encode(), "config.yaml"), {})

    assert expected == found.configuration
    assert ["flags.failOnInitError", "flags.useNodeFeatureAPI", "flags.gfd"] == [
        finding.field for finding in found.findings
    ], "what has no effect is named"


def test_what_is_ours_is_read() -> None:
    text = """
resources:
  gpus: [{uuids: [GPU-1], exclude: true}, {indexes: [0], name: example.com/zero}]
nics: [{names: ["mlx5_*"], name: fast, virtualFunctions: true}, {pci: ["0000:0c:*"], exclude: true}]
health: {ignoredXIDs: [13, 94], quietSeconds: 60, holdDownSeconds: 0.5}
"""
    expected = Configuration(
        resources=ResourcesSection(
            gpus=(GpuEntry(uuids=("GPU-1",), exclude=True), GpuEntry(indexes=(0,), name="example.com/zero"))
        ),
        nics=(
            NicEntry(names=("mlx5_*",), name="topoalign.io/fast", virtual_functions=True),
            NicEntry(pci=("0000:0c:*",), exclude=True),
        ),
        health=Health(ignored_xids=(13, 94), quiet_seconds=60, hold_down_seconds=0.5),
    )

    assert expected == configured(text)


def test_json_is_read_like_yaml_and_what_is_null_is_not_said() -> None:
    text = json.dumps({"version": "v1", "flags": {"migStrategy": "single", "gdsEnabled": None}, "sharing": None})

    assert Configuration(flags=Flags(mig_strategy="single")) == configured(text)
    assert ("cdi-cri",) == configured(
        "flags: {plugin: {deviceListStrategy: cdi-cri}}"
    ).flags.plugin.device_list_strategy


def test_a_file_is_loaded_whatever_the_environment_says(tmp_path: Path) -> None:
    file = tmp_path / "topoalign.yaml"
    file.write_text("flags: {migStrategy: mixed}")

    assert "mixed" == load_plugin_config(file).configuration.flags.mig_strategy
    with pytest.raises(NotFound):
        load_plugin_config(tmp_path / "nobody.yaml")
    file.write_text("# nothing yet\n")
    with pytest.raises(InvalidDocument, match="not a mapping"):
        load_plugin_config(file)


def test_a_link_to_nothing_says_nothing(tmp_path: Path) -> None:
    """NVIDIA's config-manager makes it for a node without a label, under its fallback strategy `empty`."""
    file = tmp_path / "config.yaml"
    file.symlink_to("/dev/null")

    assert Configuration() == load_plugin_config(file).configuration


TIME = "sharing: {timeSlicing: "
SCHEMA = "docs/configuration.md"
"""The remedy for what the schema refuses: the finding has the expected type or the unknown field."""
REPLICAS = "sharing.timeSlicing.resources[0].replicas"
ONE = TIME + "{resources: [{name: gpu, replicas: 2"


@pytest.mark.parametrize(
    ("text", "path", "remedy"),
    [
        ("version: v2", "version", SCHEMA),
        ("flag: {}", "document", SCHEMA),
        ("flags: {migstrategy: none}", "flags", SCHEMA),
        ("flags: {migStrategy: both}", "flags.migStrategy", SCHEMA),
        ("flags: []", "flags", SCHEMA),
        ("flags: {gdsEnabled: 'true'}", "flags.gdsEnabled", SCHEMA),
        ("flags: {deviceDiscoveryStrategy: tegra}", "flags.deviceDiscoveryStrategy", "Tegra"),
        ("flags: {plugin: {kubeletSocket: /k.sock}}", "flags.plugin.kubeletSocket", "TOPOALIGN_KUBELET_DIR"),
        ("flags: {plugin: {cdiFeatureFlags: [x]}}", "flags.plugin.cdiFeatureFlags", "leave it out"),
        ("flags: {nvidiaDriverRoot: ''}", "flags.nvidiaDriverRoot", "begin it with /"),
        ('flags: {nvidiaDriverRoot: "/run\\0"}', "flags.nvidiaDriverRoot", "begin it with /"),
        ("flags: {nvidiaDevRoot: dev}", "flags.nvidiaDevRoot", "begin it with /"),
        ("flags: {plugin: {containerDriverRoot: ''}}", "flags.plugin.containerDriverRoot", "begin it with /"),
        ("flags: {plugin: {nvidiaCTKPath: nvidia-ctk}}", "flags.plugin.nvidiaCDIHookPath", "begin it with /"),
        ("flags: {plugin: {cdiAnnotationPrefix: cdi.k8s.io}}", "flags.plugin.cdiAnnotationPrefix", "cdi.k8s.io/"),
        ("flags: {plugin: {deviceListStrategy: []}}", "flags.plugin.deviceListStrategy", "envvar"),
        ("flags: {plugin: {deviceListStrategy: [envvar, cdi]}}", "flags.plugin.deviceListStrategy[1]", SCHEMA),
        ("flags: {plugin: {deviceListStrategy: 7}}", "flags.plugin.deviceListStrategy", SCHEMA),
        ("flags: {plugin: {nvidiaCTKPath: /a, nvidiaCDIHookPath: /b}}", "flags.plugin.nvidiaCTKPath", "one of them"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "flags.mpsRoot", "/run/nvidia/mps"),
        (TIME + "{renameByDefault: true}}", "sharing.timeSlicing.resources", "leave timeSlicing out"),
        (TIME + "{resources: {}}}", "sharing.timeSlicing.resources", SCHEMA),
        (TIME + "{resources: [7]}}", "sharing.timeSlicing.resources[0]", SCHEMA),
        (TIME + "{resources: [{name: gpu}]}}", "sharing.timeSlicing.resources[0]", SCHEMA),
        (TIME + "{resources: [{replicas: 2}]}}", "sharing.timeSlicing.resources[0]", SCHEMA),
        (TIME + "{resources: [{name: gpu, replicas: 0}]}}", "sharing.timeSlicing.resources[0].replicas", SCHEMA),
        (TIME + "{resources: [{name: gpu, replicas: '4'}]}}", "sharing.timeSlicing.resources[0].replicas", SCHEMA),
        (TIME + "{resources: [{name: gpu, replicas: 5000}]}}", "sharing.timeSlicing.resources[0].replicas", SCHEMA),
        (ONE + "}, {name: nvidia.com/gpu, replicas: 3}]}}", "sharing.timeSlicing.resources[1].name", "once"),
        (TIME + f"{{resources: [{{name: gpu, replicas: 0x{'f' * 20_000}}}]}}}}", REPLICAS, SCHEMA),
        (ONE + f", devices: [0x{'f' * 20_000}]}}]}}}}", "sharing.timeSlicing.resources[0].devices[0]", "uuid"),
        (ONE + ", devices: some}]}}", "sharing.timeSlicing.resources[0].devices", SCHEMA),
        (ONE + ", devices: 0}]}}", "sharing.timeSlicing.resources[0].devices", SCHEMA),
        (ONE + ", devices: []}]}}", "sharing.timeSlicing.resources[0].devices", "leave it out"),
        (ONE + ", devices: [0, '0']}]}}", "sharing.timeSlicing.resources[0].devices[1]", "once"),
        (ONE + ", devices: ['GPU-0::1']}]}}", "sharing.timeSlicing.resources[0].devices[0]", "uuid"),
        (ONE + ", rename: a/b/c}]}}", "sharing.timeSlicing.resources[0].rename", "example.com"),
        (ONE + ", rename: topoalign.io/nic}]}}", "sharing.timeSlicing.resources[0].rename", "another name"),
        (
            ONE + ", rename: x.io/a}, {name: topoalign.io/nic, rename: x.io/a, replicas: 2}]}}",
            "sharing.timeSlicing.resources[1].rename",
            "another name",
        ),
        ("sharing: {units: []}", "sharing.units", SCHEMA),
        ("sharing: {units: {core: x}}", "sharing.units", SCHEMA),
        ("sharing: {units: {devices: []}}", "sharing.units.devices", "leave it out"),
        ("sharing: {units: {cores: x.io/a, memory: x.io/a}}", "sharing.units.memory", "another name"),
        ("sharing: {units: {memory: nvidia.com/gpu}}", "sharing.units.memory", "another name"),
        ("sharing: {units: {cores: topoalign.io/nic}}", "sharing.units.cores", "another name"),
        (ONE + "}]}, units: {}}", "sharing.units.name", "resources.gpus"),
        (
            "flags: {mpsRoot: /mps}\nsharing: {units: {}, mps: {resources: [{name: gpu, replicas: 2}]}}",
            "sharing.units.name",
            "resources.gpus",
        ),
        (TIME + "{resources: [{name: a, rename: gpu, replicas: 2}]}, slots: {}}", "sharing.slots.name", "one way"),
        ("sharing: {limiter: vcuda}", "sharing.limiter", "sharing.units"),
        ("sharing: {units: {}, limiter: hami}", "sharing.limiter", SCHEMA),
        ("sharing: {units: {}, limiter: vcuda}", "flags.vcudaRoot", "/run/topoalign/vcuda"),
        ("sharing: {slots: {}, limiter: vcuda}", "sharing.limiter", "sharing.units"),
        ("sharing: {units: {name: other}, limiter: hami-core}", "sharing.limiter", "sharing.slots"),
        ("sharing: {slots: {}, limiter: hami-core}", "flags.hamiRoot", "/var/lib/topoalign/hami"),
        ("flags: {hamiRoot: /}\nsharing: {slots: {}, limiter: hami-core}", "flags.hamiRoot", "for this alone"),
        ("flags: {hamiRoot: opt/hami}", "flags.hamiRoot", "begin it with /"),
        ("flags: {migStrategy: dynamic}", "flags.migStrategy", "add sharing.slots"),
        (
            "flags: {migStrategy: dynamic}\nsharing: {slots: {memoryScaling: 1.5}}",
            "sharing.slots.memoryScaling",
            "leave",
        ),
        ("flags: {migStrategy: dynamic}\nsharing: {slots: {coreScaling: 1.5}}", "sharing.slots.coreScaling", "leave"),
        (
            "flags: {migStrategy: dynamic, hamiRoot: /h}\nsharing: {slots: {}, limiter: hami-core}",
            "sharing.limiter",
            "leave it out",
        ),
        (
            "flags: {migStrategy: mixed, hamiRoot: /h}\nsharing: {slots: {name: mig-1g.5gb}, limiter: hami-core}",
            "sharing.limiter",
            "leave the limiter out",
        ),
        (
            "flags: {migStrategy: mixed, hamiRoot: /h}\nresources: {mig: [{pattern: 1g.*, name: small}]}\n"
            "sharing: {slots: {name: small}, limiter: hami-core}",
            "sharing.limiter",
            "leave the limiter out",
        ),
        ("flags: {vcudaRoot: run/vcuda}", "flags.vcudaRoot", "begin it with /"),
        ("flags: {vcudaLibraries: opt/vcuda}", "flags.vcudaLibraries", "begin it with /"),
        ("flags: {vcudaRoot: /a/../b}", "flags.vcudaRoot", "without ., .. and //"),
        ("flags: {vcudaRoot: /run/./vcuda/}", "flags.vcudaRoot", "without ., .. and //"),
        ("flags: {vcudaLibraries: /opt//vcuda}", "flags.vcudaLibraries", "without ., .. and //"),
        ("flags: {hamiRoot: /var/lib/hami/..}", "flags.hamiRoot", "without ., .. and //"),
        ("flags: {mpsRoot: //run/nvidia/mps}", "flags.mpsRoot", "without ., .. and //"),
        (f"flags: {{vcudaRoot: /{'x' * 57}}}", "flags.vcudaRoot", "at most 57"),
        (ONE + "}]}, slots: {}}", "sharing.slots.name", "resources.gpus"),
        ("sharing: {units: {}, slots: {}}", "sharing.slots.name", "resources.gpus"),
        ("sharing: {slots: {replicas: 1}}", "sharing.slots.replicas", SCHEMA),
        ("sharing: {slots: {priorities: true}}", "sharing.slots.priorities", "limiter: hami-core"),
        ("sharing: {slots: {coreScaling: 0.5}}", "sharing.slots.coreScaling", SCHEMA),
        ("sharing: {slots: {memory: nvidia.com/gpu}}", "sharing.slots.memory", "another name"),
        ("sharing: {slots: {cores: x.io/a, priority: x.io/a}}", "sharing.slots.priority", "another name"),
        ("sharing: {slots: {percentage: nvidia.com/mig-1g.5gb}}", "sharing.slots.percentage", "another name"),
        ("resources: {gpus: [{pattern: x, indexes: [0], name: a}]}", "resources.gpus[0]", "one of pattern"),
        ("resources: {gpus: [{name: a}]}", "resources.gpus[0]", "one of pattern"),
        ("resources: {gpus: [{pattern: x}]}", "resources.gpus[0].name", "exclude: true"),
        ("resources: {gpus: [{pattern: x, name: a, exclude: true}]}", "resources.gpus[0].name", "exclude: true"),
        ("resources: {gpus: [{indexes: [-1], name: a}]}", "resources.gpus[0].indexes[0]", SCHEMA),
        ("resources: {mig: [{pattern: x, name: kubernetes.io/a}]}", "resources.mig[0].name", "example.com"),
        (
            "resources: {mig: [{pattern: x, name: topoalign.io/cut}]}\nnics: [{names: [m], name: cut}]",
            "nics[0].name",
            "another",
        ),
        ("resources: {gpus: [{pattern: x, name: topoalign.io/nic}]}", "resources.gpus[0].name", "another name"),
        ("resources: {mig: [{pattern: x, name: topoalign.io/nic}]}", "resources.mig[0].name", "another name"),
        ("nics: [{names: [m], name: nvidia.com/mig-1g.5gb}]", "nics[0].name", "another name"),
        ("nics: [{names: [m], virtualFunctions: true}]", "nics[0].name", "give the resource a name"),
        ("nics: [{names: [m], virtualFunctions: true, exclude: true}]", "nics[0].exclude", "one of them"),
        ("imex: {channelIDs: [0, 2048]}", "imex.channelIDs[1]", SCHEMA),
        ("health: {quietSeconds: .inf}", "health.quietSeconds", SCHEMA),
        ("health: {ignoredXIDs: [13, x]}", "health.ignoredXIDs[1]", SCHEMA),
    ],
)
def test_what_is_wrong_is_named_by_its_path_with_a_remedy(text: str, path: str, remedy: str) -> None:
    with pytest.raises(InvalidField) as caught:
        configured(text)

    assert path == caught.value.field
    assert caught.value.finding.startswith(f"{path}: ")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("nvidia.com/gpu", True),
        ("example.com/GPU_80.large", True),
        ("a" * 63, True),
        ("a" * 64, False),
        ("x." * 122 + "/gpu", False),
        ("a." * 121 + "ab/gpu", True),
        ("a." * 121 + "abc/gpu", False),
        ("-gpu", False),
        ("gpu-", False),
        ("", False),
        ("/gpu", False),
        ("example.com/", False),
        ("Example.com/gpu", False),
        ("node.kubernetes.io/gpu", False),
        ("requests.nvidia.com/gpu", False),
        ("gpü", False),
        ("example.com/a\n", False),
    ],
)
def test_a_resource_has_a_name_that_kubernetes_takes(name: str, taken: bool) -> None:
    if taken:
        assert name in resource_names.resource("name", name)
    else:
        with pytest.raises(InvalidField, match="name: "):
            resource_names.resource("name", name)


def test_variables_of_nvidias_plugin_go_before_its_file() -> None:
    text = """
      flags: {migStrategy: none, plugin: {deviceListStrategy: envvar, passDeviceSpecs: true, nvidiaCTKPath: /in/the/file}}
    """
    environment = {
        "MIG_STRATEGY": "mixed",
        "DEVICE_LIST_STRATEGY": "volume-mounts, cdi-cri",
        "PASS_DEVICE_SPECS": "F",
        "DEVICE_ID_STRATEGY": "",
        "IMEX_CHANNEL_IDS": "0",
        "NVIDIA_CTK_PATH": "/old",
        "NVIDIA_CDI_HOOK_PATH": "/new",
        "FAIL_ON_INIT_ERROR": "false",
    }
    found = interpret_document(documents.parse_document(text.encode(), "config.yaml"), environment)

    assert (
        Configuration(
            flags=Flags(
                mig_strategy="mixed",
                plugin=PluginFlags(device_list_strategy=("volume-mounts", "cdi-cri"), nvidia_cdi_hook_path="/new"),
            ),
            imex=Imex(channel_ids=(0,)),
        )
        == found.configuration
    )
    assert {
        "flags.migStrategy": "MIG_STRATEGY",
        "flags.plugin.deviceListStrategy": "DEVICE_LIST_STRATEGY",
        "flags.plugin.passDeviceSpecs": "PASS_DEVICE_SPECS",
        "flags.failOnInitError": "FAIL_ON_INIT_ERROR",
        "flags.plugin.nvidiaCDIHookPath": "NVIDIA_CDI_HOOK_PATH",
        "imex.channelIDs": "IMEX_CHANNEL_IDS",
    } == found.origins
    assert ["FAIL_ON_INIT_ERROR"] == [finding.field for finding in found.findings]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MIG_STRATEGY", "both"),
        ("PASS_DEVICE_SPECS", "yes"),
        ("DEVICE_LIST_STRATEGY", "envvar,cdi"),
        ("IMEX_CHANNEL_IDS", "0,x"),
        ("DEVICE_DISCOVERY_STRATEGY", "tegra"),
        ("KUBELET_SOCKET", "/elsewhere/kubelet.sock"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variable: str, value: str) -> None:
    with pytest.raises(InvalidField) as caught:
        interpret_document({}, {variable: value})

    assert variable == caught.value.field


def test_every_variable_stands_for_a_field_that_is_known() -> None:
    values: dict[object, str] = {
        nvidia_fields.parse_boolean: "true",
        nvidia_fields.parse_numbers: "1",
        nvidia_fields.split_values: "envvar",
        str: "/run/nvidia/",
    }
    special = {
        "SHARED_DEVICES_ALLOCATION_POLICY": "packed",
        "MIG_STRATEGY": "single",
        "DEVICE_DISCOVERY_STRATEGY": "nvml",
        "DEVICE_ID_STRATEGY": "index",
        "KUBELET_SOCKET": nvidia_fields.KUBELET_SOCKET,
    }
    for name, variable in nvidia_fields.VARIABLES.items():
        if name not in ("CDI_FEATURE_FLAGS", "CDI_DISABLE_HOOKS"):  # refused whatever they are
            assert name in interpret_document({}, {name: special.get(name) or values[variable.read]}).origins.values()


KEYS = (
    *("version", "flags", "plugin", "gfd", "resources", "gpus", "mig", "sharing", "timeSlicing", "mps", "imex", "nics"),
    *("health", "name", "pattern", "uuids", "indexes", "exclude", "replicas", "devices", "rename", "migStrategy"),
    *("deviceListStrategy", "channelIDs", "nvidiaCTKPath", "kubeletSocket"),
)
NODES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3000)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["gpu", "all", "v1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@given(
    st.dictionaries(st.sampled_from(["version", "flags", "resources", "sharing", "imex", "nics", "health", "x"]), NODES)
)
def test_any_document_is_understood_or_refused_with_a_path(document: dict[str, Any]) -> None:
    try:
        found = interpret_document(documents.without_nulls(document), {}).configuration  # type: ignore[arg-type]  # a mapping stays one
    except InvalidField as error:
        assert error.field and error.remedy
    else:
        assert isinstance(found, Configuration)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.text(max_size=20))
def test_any_file_and_any_variable_is_understood_or_refused(content: bytes, value: str) -> None:
    try:
        interpret_document(
            documents.parse_document(content, "file"), {"MIG_STRATEGY": value, "IMEX_CHANNEL_IDS": value}
        )
    except BadRequest as error:
        assert error.finding and error.remedy


@given(st.integers(0, len(NVIDIA_FILE) - 1), st.integers(0, 40), st.text(max_size=3))
def test_a_damaged_file_is_understood_or_refused(at: int, length: int, put: str) -> None:
    damaged = NVIDIA_FILE[:at] + put + NVIDIA_FILE[at + length :]
    try:
        configured(damaged)
    except BadRequest as error:
        assert error.finding and error.remedy


@given(st.text(alphabet="ab*", max_size=6), st.text(alphabet="ab", max_size=6))
@example("a*a", "a")
def test_patterns_are_those_of_a_shell(pattern: str, name: str) -> None:
    assert fnmatchcase(name, pattern) == resource_names.matches_pattern(pattern, name)
    assert fnmatchcase(name, f"*{pattern}*") == resource_names.found_in(pattern, name)
