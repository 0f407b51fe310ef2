"""`what-if --machine`: a prediction without any service, from a kubelet's own files."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from decision_support import admitted, container, pod
from kubelet_files_support import write_files
from slot_support import in_slots

from topoalign.cli import root
from topoalign.cli.predict import Described
from topoalign.core.admission.admit import admit
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.model import PluginDevice
from topoalign.kubelet.files import kubelet_configuration
from topoalign.machines import load_machine
from topoalign.testing.fake_kubelet.files import cpu_file

CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: single-numa-node
topologyManagerScope: pod
cpuManagerPolicy: static
reservedSystemCPUs: "0"
memoryManagerPolicy: Static
reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: train, namespace: ml}
spec:
  initContainers: [{name: fetch, resources: {limits: {cpu: 1, memory: 1Gi}}}]
  containers:
    - {name: main, resources: {limits: {cpu: 8, memory: 16Gi, nvidia.com/gpu: 2}}}
"""
MACHINE = "dgx-a100"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration and a pod in the current folder, and no NATS to ask."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE"):
        monkeypatch.delenv(name, raising=False)
    Path("config.yaml").write_text(CONFIG)
    Path("pod.yaml").write_text(POD)


def hold(gpus: int, cpus: int) -> None:
    """A kubelet of the machine that holds a pod with so much, in the folder `kubelet`."""
    rules = kubelet_configuration.load_configuration(Path("config.yaml"))
    state = Described(MACHINE, None, None).node(load_machine(MACHINE), rules).state
    for allocation in admitted(
        admit(state, pod(container("main", gpus=gpus, cpus=cpus, gib=8), name="uid"), rules)
    ).values():
        state = state.holding(allocation)
    Path("kubelet").mkdir()
    write_files(Path("kubelet"), state, rules)


def asked(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    status = root.run_command_line(["what-if", "--machine", MACHINE, "--json", *more])
    return status, json.loads(capsys.readouterr().out)


FROM_FILES = ("--kubelet-config", "config.yaml", "--kubelet-root", "kubelet")


def test_a_pod_of_a_manifest_is_predicted_by_the_kubelets_rules(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = asked(capsys, "--kubelet-config", "config.yaml", "--pod-file", "pod.yaml")

    assert (0, MACHINE, "Admission") == (status, answer["node"], answer["decision"]["type"])
    fetch, main = answer["decision"]["allocations"]
    assert ["init", "ml", "train"] == [fetch["role"], fetch["owner"]["namespace"], fetch["owner"]["pod"]]
    assert fetch["affinity"] == main["affinity"] and 1 == len(main["affinity"])
    assert 2 == len(main["devices"][GPU])
    (alignment,) = answer["decision"]["explanation"]["alignments"]
    assert alignment["container"] is None


def test_a_pod_with_pod_level_resources_gets_its_devices_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Its kubelet has all that it gave to others, and gives this pod no CPUs or memory."""
    hold(gpus=2, cpus=4)
    Path("pod.yaml").write_text(POD.replace("spec:", "spec:\n  resources: {limits: {cpu: 16, memory: 64Gi}}"))

    status, answer = asked(capsys, *FROM_FILES, "--pod-file", "pod.yaml")

    _, main = answer["decision"]["allocations"]
    assert (0, 2, None) == (status, len(main["devices"][GPU]), main.get("cpus"))
    assert "memory" not in main


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (
            "resourceClaims: [{name: gpus, resourceClaimName: mine}]",
            "not covered: the devices of resource claims 'gpus'",
        ),
        (
            "resources: {limits: {cpu: 16, memory: 64Gi}}",
            "not covered: exclusive CPUs for 'fetch', 'main': with spec.resources",
        ),
    ],
)
def test_what_the_answer_does_not_cover_comes_first(spec: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pod.yaml").write_text(POD.replace("spec:", f"spec:\n  {spec}"))
    (said,) = asked(capsys, "--pod-file", "pod.yaml")[1]["decision"]["explanation"]["not_covered"]

    assert 0 == root.run_command_line(["what-if", "--machine", MACHINE, "--pod-file", "pod.yaml"])
    lines = capsys.readouterr().out.splitlines()

    assert f"not covered: {said}" == lines[0]
    assert lines[0].startswith(first)
    assert "ml/train/fetch  (would get)" == lines[1]


def test_cpus_without_memory_are_not_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """`--cpus 8` alone makes no Guaranteed pod."""
    assert 0 == root.run_command_line(["what-if", "--machine", MACHINE, "--cpus", "8", "--pod", "train"])

    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("not covered: exclusive CPUs for 'main': the pod is Burstable")
    assert "default/train/main  (would get)" == second


def test_what_the_kubelet_holds_is_not_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    hold(gpus=2, cpus=4)
    first = asked(capsys, "--kubelet-config", "config.yaml", "--gpus", "2", "--cpus", "4", "--memory", "8Gi")[1]
    status, second = asked(capsys, *FROM_FILES, "--gpus", "2", "--cpus", "4", "--memory", "8Gi")

    (empty,), (used,) = first["decision"]["allocations"], second["decision"]["allocations"]
    assert 0 == status
    assert set(empty["devices"][GPU]).isdisjoint(used["devices"][GPU])
    assert empty["cpus"] != used["cpus"]
    assert [] == second["decision"]["explanation"]["notes"]


def test_a_refusal_ends_with_4_and_an_option_overrides_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A refusal ends with exit code 4, and a rule on the command line takes precedence over the file."""
    hold(gpus=2, cpus=4)
    refused = asked(capsys, *FROM_FILES, "--gpus", "3")
    admitted_so = asked(capsys, *FROM_FILES, "--gpus", "3", "--policy", "best-effort")

    assert (4, "TopologyAffinityError") == (refused[0], refused[1]["decision"]["reason"])
    assert (0, "Admission") == (admitted_so[0], admitted_so[1]["decision"]["type"])


def test_a_refusal_says_whether_waiting_helps_and_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a machine with one GPU on each NUMA node, two on one node never fit."""
    never = asked(capsys, "--machine", "epyc-nps4-4gpu", "--policy", "single-numa-node", "--gpus", "2")[1]["decision"]
    hold(gpus=2, cpus=4)
    full = asked(capsys, *FROM_FILES, "--gpus", "7", "--policy", "none")[1]["decision"]

    assert ("never", "in-use") == (never["resolvability"], full["resolvability"])
    assert never["finding"].endswith("; needed, and free on NUMA nodes 0-3: 2 nvidia.com/gpu (1, 1, 1, 1)")
    assert never["remedy"].startswith("the pod never fits on this node: ask for 1 instead of 2 nvidia.com/gpu")
    assert "wait until pods on this node end; or ask for 6 instead of 7 nvidia.com/gpu" == full["remedy"]


@pytest.mark.parametrize("name", ["kubelte", "config.yaml"])
def test_a_missing_root_directory_is_an_error_not_an_empty_machine(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A root directory that does not exist is an error, not a prediction for an empty machine."""
    status, answer = asked(capsys, "--kubelet-config", "config.yaml", "--kubelet-root", name, "--gpus", "1")

    assert (3, "NotFound") == (status, answer["error"]["code"])


def test_people_are_told_on_stderr_what_was_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("kubelet").mkdir()

    assert 0 == root.run_command_line(["what-if", "--machine", MACHINE, *FROM_FILES, "--gpus", "1"])

    said = capsys.readouterr()
    assert "would get" in said.out and "note" not in said.out
    assert 3 == said.err.count("note: there is no kubelet/")


def test_notes_name_pods_that_are_gone_and_a_kubelet_that_just_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The notes list pods that are gone, and say that the kubelet has just started."""
    hold(gpus=2, cpus=4)
    asking = ("--pod", "p", "--gpus", "2", "--cpus", "4", "--memory", "8Gi")
    shutil.rmtree("kubelet/pods/uid")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("kubelet/device-plugins/kubelet.sock")
        status, answer = asked(capsys, *FROM_FILES, *asking)
    empty = asked(capsys, "--kubelet-config", "config.yaml", *asking)[1]

    assert (0, empty["decision"]["allocations"]) == (status, answer["decision"]["allocations"])
    gone, starting = answer["decision"]["explanation"]["notes"]
    assert "'uid'" in gone and starting.startswith("the kubelet started")


@pytest.mark.parametrize(
    ("spoil", "status", "finding"),
    [
        (lambda: Path("config.yaml").write_text("a: *b"), 5, "line 1, column 4: aliases"),
        (
            lambda: Path("config.yaml").write_text(CONFIG.replace("static", "dynamic")),
            5,
            "cpuManagerPolicy: Invalid enum",
        ),
        (lambda: Path("config.yaml").unlink(), 3, "no file named 'config.yaml'"),
        (lambda: Path("kubelet/cpu_manager_state").write_text("{}"), 69, "cpu_manager_state cannot be trusted"),
        (lambda: Path("config.yaml").write_text(CONFIG.replace('"0"', '"1"')), 69, "kept for the system"),
    ],
)
def test_files_that_cannot_be_used_are_one_clear_error_and_no_prediction(
    capsys: pytest.CaptureFixture[str], spoil: Any, status: int, finding: str
) -> None:
    hold(gpus=2, cpus=0)
    if "kept" in finding:  # the record of a pool without CPU 1, under a configuration that keeps CPU 1
        hold_cpu_1()
    spoil()

    got, answer = asked(capsys, *FROM_FILES, "--gpus", "1")

    assert status == got
    assert finding in answer["error"]["finding"] and answer["error"]["remedy"]


def hold_cpu_1() -> None:
    last = len(load_machine(MACHINE).topology.cpus) - 1
    Path("kubelet/cpu_manager_state").write_bytes(cpu_file("static", f"0,2-{last}", {"u": {"c": "1"}}))


def written(name: str, content: object) -> str:
    Path(name).write_text(json.dumps(content))
    return name


def asking(limits: dict[str, object], **annotations: object) -> str:
    """The file of a pod with one container."""
    container = {"name": "main", "resources": {"limits": limits}}
    metadata = {"name": "p", "annotations": {key.replace("__", "/"): value for key, value in annotations.items()}}
    return written("asking.json", {"kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})


SLOTS: dict[str, object] = {"sharing": {"slots": {}}}
UNITS: dict[str, object] = {"sharing": {"units": {}}}


@pytest.mark.parametrize(
    ("configuration", "limits", "devices"),
    [
        (SLOTS, {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, {"nvidia.com/gpu": 2}),
        (
            UNITS,
            {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30},
            {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30},
        ),
        (
            {
                "sharing": {
                    "timeSlicing": {"renameByDefault": True, "resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}
                }
            },
            {"nvidia.com/gpu.shared": 1},
            {"nvidia.com/gpu.shared": 1},
        ),
    ],
    ids=["slots", "units", "time slices"],
)
def test_shares_are_asked_of_a_described_machine_by_its_configuration(
    capsys: pytest.CaptureFixture[str],
    configuration: object,
    limits: dict[str, object],
    devices: dict[str, int],
) -> None:
    file = written("topoalign.json", configuration)

    status, answer = asked(capsys, "--config", file, "--pod-file", asking(limits))

    (given,) = answer["decision"]["allocations"]
    assert (0, devices) == (status, {name: len(ids) for name, ids in given["devices"].items()})
    assert 6 == asked(capsys, "--pod-file", asking(limits))[0]


def test_slots_in_the_kubelets_files_count_as_equal_parts_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A container has 30,000 MiB of a GPU by its slot; the kubelet's checkpoint has the slot alone."""
    plugin = written("topoalign.json", SLOTS)
    rules = kubelet_configuration.load_configuration(Path("config.yaml"))
    described = Described(MACHINE, None, None, Path(plugin))
    state = described.node(described.offering_machine()[0], rules).state
    share = container("main", others={GPU: 1, ResourceName("nvidia.com/gpumem"): 30_000})
    for allocation in admitted(admit(state, pod(share, name="uid"), rules)).values():
        state = state.holding(allocation)
    Path("kubelet").mkdir()
    write_files(Path("kubelet"), state, rules)

    with_files, without = (
        asked(capsys, "--config", plugin, "--gpus", "1", *more)[1]["decision"]["explanation"]["notes"]
        for more in (FROM_FILES, ())
    )

    assert ["the kubelet's files have no amounts: the slots that containers have (1)"] == [
        note[:71] for note in with_files if "no amounts" in note
    ]
    assert [] == [note for note in without if "no amounts" in note]


def test_what_a_machine_cannot_do_of_its_configuration_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    file = written("topoalign.json", {"flags": {"migStrategy": "dynamic"}, **SLOTS})

    (note, *_) = asked(capsys, "--config", file, "--cpus", "1")[1]["decision"]["explanation"]["notes"]

    assert note.startswith("sharing.slots: 8 devices of nvidia.com/gpu are not in MIG mode: not offered; ")


@pytest.mark.parametrize(("strategy", "is_named"), [("envvar", True), ("volume-mounts", False)])
def test_a_container_that_would_not_see_its_gpus_is_named(
    capsys: pytest.CaptureFixture[str], strategy: str, is_named: bool
) -> None:
    """Half of the GPUs are shared in time under another name."""
    shared = {"name": "gpu", "replicas": 4, "rename": "small", "devices": [0, 1, 2, 3]}
    plugin = {
        "flags": {"plugin": {"deviceListStrategy": strategy}},
        "sharing": {"timeSlicing": {"resources": [shared]}},
    }
    file = written("topoalign.json", plugin)

    pod_file = asking({"nvidia.com/gpu": 1, "nvidia.com/small": 1})
    notes = asked(capsys, "--config", file, "--pod-file", pod_file)[1]["decision"]["explanation"]["notes"]

    assert is_named == any("asks for GPUs of nvidia.com/gpu and nvidia.com/small" in each for each in notes)


def test_a_wrong_plugin_configuration_is_an_error_with_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    file = written("topoalign.json", {"sharing": {"slots": {"replicas": 0}}})

    status, answer = asked(capsys, "--config", file, "--gpus", "1")

    assert (5, "sharing.slots.replicas") == (status, answer["error"]["finding"].partition(":")[0])


def test_a_pod_is_predicted_with_what_the_webhook_fills_in(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Without an amount a slot is of a whole GPU. In mode `best` there is no webhook.
    """
    file = written("topoalign.json", SLOTS)
    pod = asking({"nvidia.com/gpu": 2}, **{"nvidia.com__use-gputype": "A100,V100"})

    status, answer = asked(capsys, "--config", file, "--pod-file", pod)

    assert 0 == status
    assert [100, 100] == [each["cores"] for each in answer["decision"]["allocations"][0]["slots"].values()]
    assert (
        "spec.containers[0].resources.limits[nvidia.com/gpucores]: 100 is what the webhook fills in"
        in answer["decision"]["explanation"]["notes"]
    )


def test_a_name_that_nobody_serves_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 6, whoever decides, and not what else the pod would get."""
    for mode in ("kubelet", "best"):
        assert 6 == root.run_command_line(
            ["what-if", "--machine", MACHINE, "--pod-file", asking({"nvidia.com/gpus": 2}), "--mode", mode]
        )

        said = capsys.readouterr()
        assert "" == said.out
        assert "nobody serves 'nvidia.com/gpus' here" in said.err and "did you mean nvidia.com/gpu?" in said.err
    status, answer = asked(capsys, "--pod-file", asking({"koordinator.sh/gpu": 50, "cpu": 4, "memory": "8Gi"}))
    error = {name: answer["error"][name] for name in ("code", "exit")}
    assert (6, {"code": "UnservedResource", "exit": 6}) == (status, error)


def test_what_another_plugin_serves_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is described with it; of one that only the kubelet knows nothing can be predicted, as before."""
    hardware = load_machine(MACHINE).topology
    other = PluginDevice(id=DeviceID("f0"), resource=ResourceName("example.com/fpga"), nodes=(0,))
    Path("fpga.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(hardware, others=(other,))))

    status = root.run_command_line(["what-if", "--machine", "fpga.json", "--pod-file", asking({"example.com/fpga": 1})])

    assert 0 == status


def test_what_probably_means_something_else_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of the webhook's warning."""
    file = written("topoalign.json", SLOTS)
    pod = asking({"nvidia.com/gpu": 1}, **{"nvidia.com__gpumem": "4000", "nvidia.com__use-gpu-uuid": "GPU-0"})

    notes = asked(capsys, "--config", file, "--pod-file", pod)[1]["decision"]["explanation"]["notes"]

    assert [
        "metadata.annotations[nvidia.com/gpumem]: has no effect; write it in resources.limits of a container",
        "metadata.annotations[nvidia.com/use-gpu-uuid]: nobody reads this key; did you mean nvidia.com/use-gpuuuid?",
    ] == notes[-2:]


def test_an_annotation_without_quotes_names_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    pod = asking({"nvidia.com/gpu": 1}, **{"tencent.com__vcuda-core-limit": 50})

    status, answer = asked(capsys, "--pod-file", pod)

    assert 5 == status and "annotations in quotes" in answer["error"]["remedy"]


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        (["--gpus", "1", "--config", "config.yaml"], "go with --machine"),
        (["--cluster", "--gpus", "1", "--config", "config.yaml"], "leave out --node, --machine, --config"),
        (["--gpus", "1", "--pod-file", "pod.yaml"], "--pod-file describes the whole pod"),
        (["--pod", "a/b", "--pod-file", "pod.yaml"], "--pod-file describes the whole pod"),
        (["--gpus", "1", "--kubelet-config", "config.yaml"], "go with --machine"),
        (["--gpus", "1", "--kubelet-root", "kubelet"], "go with --machine"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], finding: str
) -> None:
    assert 2 == root.run_command_line(["what-if", *arguments])
    assert finding in capsys.readouterr().err


def test_gpus_in_slots_are_chosen_as_hami_does_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of equal GPUs HAMi takes the highest index of the highest NUMA node. Its lists of policies are for such nodes."""
    machine = tmp_path / "machine.json"
    machine.write_bytes(msgspec.json.encode(in_slots(load_machine(MACHINE).topology)))
    file = tmp_path / "pod.yaml"
    file.write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: p, annotations: {hami.io/gpu-scheduler-policy: 'numa,binpack'}}, "
        "spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 100}}}]}}"
    )
    asked = ["what-if", "--machine", str(machine), "--json"]
    found = []
    for more in (["--gpus", "1"], ["--gpus", "1", "--compat", "hami"], ["--pod-file", str(file), "--compat", "hami"]):
        assert 0 == root.run_command_line([*asked, *more])
        found += json.loads(capsys.readouterr().out)["decision"]["allocations"][0]["devices"][GPU]

    assert ["GPU-0::0", "GPU-5::0", "GPU-5::0"] == found
    assert 0 != root.run_command_line([*asked, "--pod-file", str(file)])
    assert "InvalidShare" in capsys.readouterr().out
