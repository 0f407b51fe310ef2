"""
Pods as the documents of gpu-manager, HAMi, Koordinator and volcano-vgpu show them, through what-if, webhook and filter.

The manifests have the shapes of those examples; docs/migration.md has their sources and a row for each. A pod gets the
devices that it names, under the configuration of its row, or is refused with the code and the remedy of the row.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from bad_share_support import RULES, review
from instance_support import A100
from scheduling_support import serving
from unit_support import DGX
from view_support import OneNode

from topoalign.cli import root
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.file import interpret_document
from topoalign.plugin_config.resource_offers import offer_resources
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

MIGRATION = Path(__file__).parents[2] / "docs" / "migration.md"

Amounts = dict[str, Any]
WHOLE: Amounts = {}
UNITS: Amounts = {"sharing": {"units": {}}}
SLOTS: Amounts = {"sharing": {"slots": {}}}
HAMI_CORE: Amounts = {
    "flags": {"hamiRoot": "/var/lib/topoalign/hami"},
    "sharing": {"slots": {}, "limiter": "hami-core"},
}
MIXED: Amounts = {"flags": {"migStrategy": "mixed"}}
DYNAMIC: Amounts = {"flags": {"migStrategy": "dynamic"}, "sharing": {"slots": {}}}


def slots_named(number: str, **amounts: str) -> Amounts:
    return {
        "resources": {"gpus": [{"pattern": "*", "name": number}]},
        "sharing": {"slots": {"name": number, **amounts}},
    }


VOLCANO = slots_named(
    "volcano.sh/vgpu-number",
    memory="volcano.sh/vgpu-memory",
    percentage="volcano.sh/vgpu-memory-percentage",
    cores="volcano.sh/vgpu-cores",
)
OLD_VOLCANO = slots_named("volcano.sh/gpu-number", memory="volcano.sh/gpu-memory")
KOORDINATOR = slots_named(
    "koordinator.sh/gpu.shared", percentage="koordinator.sh/gpu-memory-ratio", cores="koordinator.sh/gpu-core"
)

JOINT, HINT, PARTITION = (
    f"scheduling.koordinator.sh/{key}"
    for key in ("device-joint-allocate", "device-allocate-hint", "gpu-partition-spec")
)
OTHER = "GPU-03f69c50-0000-0000-0000-000000000000"
"""A uuid as an example has it: no node has this GPU."""


class Example(NamedTuple):
    """One of the examples, and what becomes of it."""

    name: str
    """How the row of docs/migration.md names it."""
    configuration: Amounts
    limits: list[Amounts]
    """Of each container."""
    gets: dict[str, int] | str
    """How many devices of which resource the first container gets; or the code of the refusal."""
    annotations: dict[str, str] = {}
    warns: str = ""
    """The annotation that a warning is about, or the beginning of the remedy of a refusal."""
    mode: str = "kubelet"


def hami(name: str, gets: dict[str, int] | str, configuration: Amounts = SLOTS, **rest: Any) -> Example:
    """An example of HAMi; the resources and the annotations without a domain are in `nvidia.com/`."""
    limits = {f"nvidia.com/{key}".replace("_", "-"): value for key, value in rest.pop("limits").items()}
    return Example(name, configuration, [limits], gets, **rest)


VCUDA = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}
TWO_CARDS = {"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": 60}
EXAMPLES = [
    Example(
        "0.3 of a GPU with a limit of utilization",
        UNITS,
        [VCUDA],
        VCUDA,
        {"tencent.com/vcuda-core-limit": "50"},
        "tencent.com/vcuda-core-limit",
    ),
    Example("2 GPU cards", UNITS, [TWO_CARDS], TWO_CARDS),
    Example("2 GPU cards", WHOLE, [TWO_CARDS], "UnservedResource", warns="offer GPUs in units (`sharing.units`"),
    hami("default_use.yaml", {"nvidia.com/gpu": 1}, limits={"gpu": 1, "gpumem": 3000, "gpucores": 30}),
    hami(
        "default_use.yaml",
        "UnservedResource",
        WHOLE,
        limits={"gpu": 1, "gpumem": 3000, "gpucores": 30},
        warns="offer GPUs in slots (`sharing.slots`",
    ),
    hami("default_use_legacy.yaml", {"nvidia.com/gpu": 2}, limits={"gpu": 2}),
    hami(
        "dynamic_mig_example.yaml",
        {"nvidia.com/gpu": 2},
        DYNAMIC,
        limits={"gpu": 2, "gpumem": 8000},
        annotations={"nvidia.com/vgpu-mode": "mig", "hami.io/gpu-scheduler-policy": "binpack"},
    ),
    hami(
        "dynamic_mig_example.yaml",
        "NoGpuAccepted",
        HAMI_CORE,
        limits={"gpu": 2, "gpumem": 8000},
        annotations={"nvidia.com/vgpu-mode": "mig"},
        warns="choose a node whose plugin configuration has",
    ),
    hami("example.yaml", {"nvidia.com/gpu": 1}, limits={"gpu": 1, "gpumem": 3000}),
    hami("mig_example.yaml", {"nvidia.com/mig-3g.20gb": 1}, MIXED, limits={"mig-3g.20gb": 1}),
    hami(
        "mig_example.yaml",
        "UnservedResource",
        WHOLE,
        limits={"mig-3g.20gb": 1},
        warns="offer MIG instances (`flags.migStrategy: mixed`)",
    ),
    hami(
        "specify_card_type_not_use.yaml",
        {"nvidia.com/gpu": 2},
        limits={"gpu": 2},
        annotations={"nvidia.com/nouse-gputype": "1080,2080"},
    ),
    hami(
        "specify_card_type_to_use.yaml",
        {"nvidia.com/gpu": 2},
        limits={"gpu": 2},
        annotations={"nvidia.com/use-gputype": "A100,V100"},
    ),
    hami(
        "specify_scheduling_policy.yaml",
        {"nvidia.com/gpu": 1},
        limits={"gpu": 1},
        annotations={"hami.io/node-scheduler-policy": "spread", "hami.io/gpu-scheduler-policy": "binpack"},
        warns="hami.io/node-scheduler-policy",
    ),
    hami(
        "specify_uuid_not_use.yaml",
        {"nvidia.com/gpu": 2},
        limits={"gpu": 2},
        annotations={"nvidia.com/nouse-gpuuuid": OTHER},
    ),
    hami(
        "specify_uuid_to_use.yaml",
        {"nvidia.com/gpu": 1},
        limits={"gpu": 1},
        annotations={"nvidia.com/use-gpuuuid": f"{OTHER},GPU-1"},
    ),
    hami(
        "specify_uuid_to_use.yaml",
        "NoGpuAccepted",
        limits={"gpu": 1},
        annotations={"nvidia.com/use-gpuuuid": OTHER},
        warns="change the lists of types and uuids",
    ),
    hami("use_as_normal.yaml", {"nvidia.com/gpu": 1}, limits={"gpu": 1}),
    hami(
        "use_exclusive_card.yaml",
        {"nvidia.com/gpu": 2},
        limits={"gpu": 2, "gpumem_percentage": 100, "gpucores": 100},
    ),
    hami("use_memory_fraction.yaml", {"nvidia.com/gpu": 2}, limits={"gpu": 2, "gpumem_percentage": 50, "gpucores": 30}),
    hami("use_sharing_card.yaml", {"nvidia.com/gpu": 1}, limits={"gpu": 1, "gpumem_percentage": 40, "gpucores": 60}),
    hami(
        "vllm_cross_vgpu.yaml",
        {"nvidia.com/gpu": 2},
        HAMI_CORE,
        limits={"gpu": 2, "gpumem_percentage": 30, "gpucores": 30},
    ),
    Example("`koordinator.sh/gpu: 50`", UNITS, [{"koordinator.sh/gpu": 50}], "UnservedResource", warns="ask for slots"),
    Example(
        "`koordinator.sh/gpu: 50`",
        UNITS,
        [{"koordinator.sh/gpu": 50}],
        {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 80},
        mode="best",
    ),
    Example("`kubernetes.io/gpu: 100`", SLOTS, [{"kubernetes.io/gpu": 100}], "UnservedResource", warns="ask for slots"),
    Example(
        "`gpu-core: 50`, `gpu-memory-ratio: 60`",
        KOORDINATOR,
        [{"koordinator.sh/gpu-core": 50, "koordinator.sh/gpu-memory-ratio": 60}],
        {"koordinator.sh/gpu.shared": 1},
    ),
    Example(
        "`gpu-core: 60`, `gpu-memory: 4Gi`",
        KOORDINATOR,
        [{"koordinator.sh/gpu-core": 60, "koordinator.sh/gpu-memory": "4Gi"}],
        "UnservedResource",
        warns="ask for slots",
    ),
    Example(
        "`gpu-core: 60`, `gpu-memory: 4Gi`",
        UNITS,
        [{"koordinator.sh/gpu-core": 60, "koordinator.sh/gpu-memory": "4Gi"}],
        {"tencent.com/vcuda-core": 60, "tencent.com/vcuda-memory": 16},
        mode="best",
    ),
    Example(
        "GPU Share With HAMi",
        KOORDINATOR,
        [{"koordinator.sh/gpu-shared": 1, "koordinator.sh/gpu-core": 50, "koordinator.sh/gpu-memory-ratio": 50}],
        "UnservedResource",
        warns="did you mean koordinator.sh/gpu.shared?",
    ),
    Example(
        "GPU Share With HAMi",
        KOORDINATOR,
        [{"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-core": 50, "koordinator.sh/gpu-memory-ratio": 50}],
        {"koordinator.sh/gpu.shared": 1},
    ),
    Example("`nvidia.com/gpu: 2`", WHOLE, [{"nvidia.com/gpu": 2}], {"nvidia.com/gpu": 2}),
    Example('`nvidia.com/gpu: "100"`', WHOLE, [{"nvidia.com/gpu": 100}], "NotEnoughDevices"),
    Example(
        "`koordinator.sh/rdma: 100`",
        WHOLE,
        [{"koordinator.sh/rdma": 100}],
        "UnservedResource",
        warns="ask for topoalign",
    ),
    Example("`koordinator.sh/rdma: 100`", WHOLE, [{"koordinator.sh/rdma": 100}], {"topoalign.io/nic": 1}, mode="best"),
    Example(
        "4 GPUs with `koordinator.sh/rdma: 1`",
        WHOLE,
        [{"nvidia.com/gpu": 4, "koordinator.sh/rdma": 1}],
        {"nvidia.com/gpu": 4, "topoalign.io/nic": 2},
        {JOINT: '{"deviceTypes": ["gpu", "rdma"]}'},
    ),
    Example(
        "the same with `SamePCIe`",
        WHOLE,
        [{"nvidia.com/gpu": 4, "koordinator.sh/rdma": 1}],
        {"nvidia.com/gpu": 4, "topoalign.io/nic": 2},
        {JOINT: '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}'},
    ),
    Example(
        "the same, exclusively",
        WHOLE,
        [{"nvidia.com/gpu": 4, "koordinator.sh/rdma": 1}],
        "DevicesDoNotFit",
        {
            JOINT: '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}',
            HINT: '{"rdma": {"vfSelector": {}, "exclusivePolicy": "PCIeLevel"}}',
        },
    ),
    Example(
        "all NICs of the machine",
        WHOLE,
        [{"koordinator.sh/rdma": 100}],
        "UnservedResource",
        {HINT: '{"rdma": {"allocateStrategy": "ApplyForAll"}}'},
        "ask for topoalign.io/nic",
    ),
    Example(
        "one virtual function of each of two NICs",
        WHOLE,
        [{"koordinator.sh/rdma": 2}],
        "UnservedResource",
        {HINT: '{"rdma": {"vfSelector": {}, "allocateStrategy": "RequestsAsCount"}}'},
        "ask for topoalign.io/nic",
    ),
    Example(
        "a partition of GPUs",
        WHOLE,
        [{"nvidia.com/gpu": 1}],
        "DevicesDoNotFit",
        {PARTITION: '{"allocatePolicy": "Restricted", "ringBusBandwidth": "200Gi"}'},
    ),
    Example(
        "Running VGPU Jobs",
        VOLCANO,
        [{"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 3000, "volcano.sh/vgpu-cores": 50}],
        {"volcano.sh/vgpu-number": 2},
        {"volcano.sh/vgpu-mode": "hami-core"},
    ),
    Example(
        "Running VGPU Jobs",
        WHOLE,
        [{"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 3000}],
        "UnservedResource",
        warns="give slots of GPUs Volcano's names",
    ),
    *(
        Example(
            name,
            VOLCANO,
            [{"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": size}],
            {"volcano.sh/vgpu-number": 1},
        )
        for name, size in (("vgpu-case01.yml", 1024), ("vgpu-case02.yml", 10240), ("vgpu-deployment.yaml", 16384))
    ),
    Example(
        "vgpu-case03.yml",
        VOLCANO,
        [
            {"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 2000},
            {},
            {"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 3000},
        ],
        {"volcano.sh/vgpu-number": 2},
    ),
    Example("gpu-share.yml", OLD_VOLCANO, [{"volcano.sh/gpu-memory": 1024}], {"volcano.sh/gpu-number": 1}),
]


def hardware_of(configuration: Amounts) -> Topology:
    """The machine with what it offers by this configuration; in MIG mode where that is about MIG."""
    found = DGX
    if "migStrategy" in configuration.get("flags", {}):
        mig = () if configuration is DYNAMIC else ("3g.20gb", "3g.20gb")
        gpus = (
            msgspec.structs.replace(
                gpu,
                mig_profiles=A100,
                mig=tuple(
                    MigDevice(
                        uuid=DeviceID(f"MIG-{gpu.index}-{number}"),
                        profile=profile,
                        gpu_instance=number,
                        compute_instance=0,
                        memory=20 << 30,
                    )
                    for number, profile in enumerate(mig)
                ),
            )
            for gpu in DGX.gpus
        )
        found = msgspec.structs.replace(DGX, gpus=tuple(gpus))
    return msgspec.structs.replace(
        found, offers=offer_resources(found, interpret_document(configuration, {}).configuration).offers
    )


def manifest_of(example: Example) -> dict[str, Any]:
    containers = [
        {"name": f"c{number}", "resources": {"limits": limits}} for number, limits in enumerate(example.limits)
    ]
    metadata = {"name": "p", "namespace": "team", "uid": "u", "annotations": example.annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


def patched(pod: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The pod with what the webhook adds to it."""
    changed: dict[str, Any] = json.loads(json.dumps(pod))
    for change in json.loads(base64.b64decode(answer.get("patch", "W10="))):
        *places, last = (part.replace("~1", "/") for part in change["path"][1:].split("/"))
        at: Any = changed
        for place in places:
            at = at[int(place)] if isinstance(at, list) else at[place]
        at[last] = change["value"]
    return changed


EACH = pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{number} {each.name}" for number, each in enumerate(EXAMPLES)]
)


@EACH
def test_what_if_answers_as_the_row_says(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machine.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(hardware_of(example.configuration), offers=None))
    )
    Path("topoalign.json").write_text(json.dumps(example.configuration))
    Path("pod.json").write_text(json.dumps(manifest_of(example)))
    files = ["--machine", "machine.json", "--config", "topoalign.json", "--pod-file", "pod.json"]

    status = root.run_command_line(["what-if", *files, "--mode", example.mode, "--policy", "none", "--json"])

    answer = json.loads(capsys.readouterr().out)
    if isinstance(example.gets, str):
        error = answer.get("error") or answer["decision"]
        assert (6 if example.gets == "UnservedResource" else 4, example.gets) == (status, error["code"])
        assert error["remedy"].startswith(example.warns)
        return
    devices = answer["decision"]["allocations"][0]["devices"]
    assert (0, example.gets) == (status, {name: len(ids) for name, ids in devices.items()})
    notes = answer["decision"]["explanation"]["notes"]
    assert (1 if example.warns else 0) == sum(note.startswith("metadata.annotations[") for note in notes)
    assert not example.warns or any(note.startswith(f"metadata.annotations[{example.warns}]") for note in notes)


@pytest.mark.parametrize(
    "example",
    [each for each in EXAMPLES if each.mode == "kubelet" and each.gets != "UnservedResource"],
    ids=lambda each: each.name,
)
async def test_webhook_and_filter_answer_as_the_row_says(example: Example) -> None:
    """The webhook warns in the words of what-if, and the filter lets those pods pass that what-if admits."""
    node = OneNode(RULES, hardware_of(example.configuration))
    node.tell(node.says.all())
    node.view.renew()
    seen, checks, given = node.view.offers, node.scheduler.checks, manifest_of(example)
    webhook = Webhook("", lambda name: name in seen.names, checks.check, seen.left_out, warn=checks.warnings)
    async with serving(node.scheduler, more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await review(http, given, "/webhook")
        asked = {"Pod": patched(given, answer), "NodeNames": ["node-1"]}
        passed = (await http.post("/scheduler/filter", json=asked)).json()["NodeNames"]

    fits = not isinstance(example.gets, str)
    assert fits == (passed == ["node-1"])
    assert fits <= answer["allowed"]
    warned = [text.partition("]")[0] for text in answer.get("warnings", ())]
    assert ([f"metadata.annotations[{example.warns}"] if fits and example.warns else []) == warned


def test_every_example_has_a_row_in_the_documentation() -> None:
    rows = [line for line in MIGRATION.read_text().splitlines() if line.startswith("|")]
    first = [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]

    assert [] == [each.name for each in EXAMPLES if not any(each.name in cell for cell in first)]
