"""Files as people have them for NVIDIA's device plugin: each is understood as that plugin does, or refused by its field."""

import msgspec
import pytest
from serving_support import configured, gpu, listed, machine, made

from topoalign.core.model.errors import InvalidField
from topoalign.kubelet.files.documents import InvalidDocument
from topoalign.plugin_config.configuration import Configuration, Flags, PluginFlags

PRINTED = """
{"version": "v1",
 "flags": {"migStrategy": "none", "failOnInitError": false, "mpsRoot": "", "nvidiaDriverRoot": "/", "nvidiaDevRoot": "/",
  "gdrcopyEnabled": false, "gdsEnabled": false, "mofedEnabled": false, "useNodeFeatureAPI": null,
  "deviceDiscoveryStrategy": "auto",
  "plugin": {"passDeviceSpecs": false, "deviceListStrategy": ["envvar"], "deviceIDStrategy": "uuid",
   "cdiAnnotationPrefix": "cdi.k8s.io/", "nvidiaCTKPath": "/usr/bin/nvidia-ctk", "containerDriverRoot": "/driver-root"}},
 "resources": {"gpus": [{"pattern": "*", "name": "nvidia.com/gpu"}]},
 "sharing": {"timeSlicing": {}},
 "imex": {}}
"""
"""What that plugin logs as its configuration when it starts."""

TWO, FOUR = ["GPU-0::0", "GPU-0::1"], ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]
SLICES = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2"


def test_the_configuration_that_nvidias_plugin_logs_can_be_used_as_a_file() -> None:
    flags = Flags(nvidia_dev_root="/", plugin=PluginFlags(nvidia_cdi_hook_path="/usr/bin/nvidia-ctk"))
    found = configured(PRINTED)

    assert flags == found.flags
    assert {"nvidia.com/gpu": ["GPU-0", "GPU-1"]} == listed(made(machine([gpu(0), gpu(1)]), PRINTED))


@pytest.mark.parametrize(
    "text",
    [
        "version: v1",
        "---\nversion: v1\n...\n",
        "version:",
        "version: v1\nflags:\nresources:\nsharing:\nimex:\n",
        "version: v1\nflags: {}\nresources: {}\nsharing: {}\nimex: {}\n",
        "flags: {plugin: , gfd: null, migStrategy: ~}",
        "resources: {gpus: null, mig: []}",
        "sharing: {timeSlicing: null, mps: null}",
        "sharing: {timeSlicing: {renameByDefault: false, failRequestsGreaterThanOne: null, resources: []}}",
        "imex: {channelIDs: [], required: false}",
        "flags: {failOnInitError: no, gfd: {oneshot: false, noTimestamp: true, sleepInterval: 60s, outputFile: /f}}",
        "flags: {gfd: {sleepInterval: 60000000000}, useNodeFeatureAPI: true}",
        "flags: {deviceDiscoveryStrategy: nvml, plugin: {cdiFeatureFlags: '', kubeletSocket: null}}",
        "flags: {plugin: {deviceListStrategy: envvar, deviceIDStrategy: uuid, nvidiaCTKPath: ''}}",
    ],
)
def test_what_asks_for_nothing_changes_nothing(text: str) -> None:
    assert Configuration() == configured(text)


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        (SLICES + "}]}}", {"nvidia.com/gpu": FOUR}),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}", {"nvidia.com/gpu": FOUR}),
        (SLICES + ", devices: all}]}}", {"nvidia.com/gpu": FOUR}),
        (SLICES + ", devices: null}]}}", {"nvidia.com/gpu": FOUR}),
        (SLICES + ", devices: 1}]}}", {"nvidia.com/gpu": [*TWO, "GPU-1"]}),
        (SLICES + ', devices: [0, "0:0"]}]}}', {"nvidia.com/gpu": [*TWO, "GPU-1"]}),
        (SLICES + ', devices: ["0", 0:0]}]}}', {"nvidia.com/gpu": [*TWO, "GPU-1"]}),
        (SLICES + ", devices: [GPU-0]}], renameByDefault: true}}", {"nvidia.com/gpu.shared": TWO}),
        (SLICES + "}, {name: nvidia.com/mig-1g.5gb, replicas: 7}]}}", {"nvidia.com/gpu": FOUR}),
        ("resources: {gpus: [{pattern: 'A100*40GB', name: a40}, {pattern: '*', name: gpu}]}", {}),
        ("resources: {mig: [{pattern: '*', name: nvidia.com/gpu}]}", {}),
    ],
)
def test_shares_are_those_that_the_file_asks_for(text: str, offered: dict[str, list[str]]) -> None:
    whole = {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}
    found = listed(made(machine([gpu(0), gpu(1)]), text))
    rest = {"nvidia.com/gpu": ["GPU-1"]} if "nvidia.com/gpu.shared" in offered else {}

    assert ({**rest, **offered} or whole) == found


def test_one_share_is_the_device_itself_under_the_name_of_the_shares() -> None:
    """A node for which one file of many says `replicas: 1` shares nothing, and asks for nothing more than its name."""
    text = SLICES.replace("replicas: 2", "replicas: 1")
    topology = machine([gpu(0), gpu(1)])

    assert made(topology).offers == made(topology, text + "}]}}").offers
    (renamed,) = made(topology, text + "}], renameByDefault: true, failRequestsGreaterThanOne: true}}").offers
    assert ("nvidia.com/gpu.shared", 1, None) == (renamed.resource, renamed.replicas, renamed.most)
    assert "gpu" == msgspec.structs.replace(topology, offers=(renamed,)).kind_of(renamed.resource)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("flags: {renameByDefault: true}", "flags"),
        ("flags: {passDeviceSpecs: true}", "flags"),
        ("flags: {plugin: {migStrategy: mixed}}", "flags.plugin"),
        ("flags: {plugin: {cdiDisableHooks: [enable-cuda-compat]}}", "flags.plugin.cdiDisableHooks"),
        ("flags: {plugin: {nvidiaCTKPath: nvidia-ctk}}", "flags.plugin.nvidiaCDIHookPath"),
        ("flags: {plugin: {nvidiaCTKPath: 7}}", "flags.plugin.nvidiaCDIHookPath"),
        ("flags: {plugin: {nvidiaCDIHookPath: nvidia-ctk}}", "flags.plugin.nvidiaCDIHookPath"),
        ("flags: {plugin: {kubeletSocket: ''}}", "flags.plugin.kubeletSocket"),
        ("resources: {migs: [{pattern: 1g.5gb, name: small}]}", "resources"),
        ("resources: []", "resources"),
        ("resources: {gpus: [{pattern: A100}]}", "resources.gpus[0].name"),
        ("sharing: {mps: {}}", "sharing.mps.resources"),
        ("flags: {mpsRoot: run/mps}", "flags.mpsRoot"),
        (
            "sharing: {timeSlicing: {strategy: '', resources: [{name: gpu, replicas: 2}]}}",
            "sharing.timeSlicing",
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 0}]}}",
            "sharing.timeSlicing.resources[0].replicas",
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 16384}]}}",
            "sharing.timeSlicing.resources[0].replicas",
        ),
        (SLICES + ", devices: [all]}]}}", "sharing.timeSlicing.resources[0].devices[0]"),
        (SLICES + ", devices: '3'}]}}", "sharing.timeSlicing.resources[0].devices"),
        ("imex: {channelIDs: [0, 0]}", "imex.channelIDs[1]"),
        ("imex: {channelIDs: 0}", "imex.channelIDs"),
        ("health: {disabled: true}", "health"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {any: 'version: v1'}", "document"),
        ("config: {map: {default: 'version: v1'}}", "document"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_field_in_the_file(text: str, field: str) -> None:
    """The error names the field with the spelling of the file."""
    with pytest.raises(InvalidField) as caught:
        configured(text)

    assert field == caught.value.field
    assert caught.value.finding.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("all: &all {migStrategy: none}\nflags: *all", "line 2, column 8"),
        ("flags:\n\tmigStrategy: none", "line 2, column 1"),
        ("flags: {migStrategy: none}\nflags: {migStrategy: mixed}", "line 2, column 1"),
        ("version: v1\n---\nversion: v1", "line 2"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(text: str, place: str) -> None:
    with pytest.raises(InvalidDocument, match=place):
        configured(text)


def test_a_variable_that_says_a_thing_twice_is_named() -> None:
    with pytest.raises(InvalidField) as caught:
        configured(IMEX_CHANNEL_IDS="0,0")

    assert "IMEX_CHANNEL_IDS" == caught.value.field


def test_a_hook_that_a_variable_names_is_not_taken_for_the_one_in_the_file() -> None:
    with pytest.raises(InvalidField) as caught:
        configured("flags: {plugin: {nvidiaCTKPath: /usr/bin/nvidia-ctk}}", NVIDIA_CTK_PATH="nvidia-ctk")

    assert "NVIDIA_CTK_PATH" == caught.value.field


def test_a_variable_that_disables_hooks_is_refused_not_ignored() -> None:
    """A variable of NVIDIA's plugin that leaves out hooks is refused; the hooks are not added silently."""
    with pytest.raises(InvalidField) as caught:
        configured(CDI_DISABLE_HOOKS="enable-cuda-compat")

    assert "CDI_DISABLE_HOOKS" == caught.value.field
