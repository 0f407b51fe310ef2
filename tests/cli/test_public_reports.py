"""Files that people paste into reports are answered by the command line, each with what helps."""

import shutil
from pathlib import Path

import pytest

from topoalign.cli import exit_codes, root
from topoalign.tools.conformance.nccl import named_neutrally

CPUS = ("--cpus", "2", "--memory", "1Gi")


@pytest.fixture(scope="module")
def reports(vectors: Path) -> Path:
    """The files; tests skip without them."""
    if not (vectors / "reports").is_dir():
        pytest.skip("no reports in the case files")
    return vectors / "reports"


def published(document: Path, folder: Path) -> Path:
    """A copy of a published machine document, with today's names of fields."""
    copy = folder / document.name
    copy.write_bytes(named_neutrally(document.read_bytes()))
    return copy


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and all that is printed."""
    status = root.run_command_line(arguments)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("configmap.yaml", 0, ["data.any, is a valid configuration", "nvidia.com/gpu.shared"]),
        ("misplaced-keys.yaml", exit_codes.INVALID, ["flags", "renameByDefault"]),
        ("replicas-16384.yaml", exit_codes.INVALID, ["<= 2500"]),
    ],
)
def test_configurations_of_reports(
    capsys: pytest.CaptureFixture[str], reports: Path, name: str, status: int, words: list[str]
) -> None:
    code, text = answered(capsys, "config", "check", str(reports / "configs" / name), "--machine", "dgx-a100")

    assert status == code
    assert [] == [word for word in words if word not in text]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("z_configz.json", 0, ["taken from kubeletconfig", "aligned to  NUMA 0"]),
        ("kubeadm-configmap.yaml", 0, ["taken from data.kubelet"]),
        ("talos.yaml", exit_codes.INVALID, ["no KubeletConfiguration", "/configz"]),
    ],
)
def test_kubelet_configurations_of_reports(
    capsys: pytest.CaptureFixture[str], reports: Path, name: str, status: int, words: list[str]
) -> None:
    folder = reports / "kubelet_configs"
    where = ("--machine", str(folder / "m64.json"), "--kubelet-config", str(folder / name))
    code, text = answered(capsys, "what-if", *where, *CPUS)

    assert status == code
    assert [] == [word for word in words if word not in text]


@pytest.mark.parametrize("name", ["w_klog.txt", "w_legendfirst.txt", "w_html.txt"])
def test_matrices_of_reports_are_read(capsys: pytest.CaptureFixture[str], reports: Path, name: str) -> None:
    code, text = answered(capsys, "topo", "--machine", str(reports / "machines" / name))

    assert 0 == code
    assert [*"0011"] == [line.split("\t")[10] for line in text.splitlines()[1:5]]
    assert all(f"NIC{place}: mlx5_bond_{place}" in text for place in range(4))


@pytest.mark.parametrize(("name", "words"), [("x_smiq.xml", "`nvidia-smi -q`"), ("x_rocm.txt", "AMD GPUs")])
def test_other_output_of_reports_is_recognised(
    capsys: pytest.CaptureFixture[str], reports: Path, name: str, words: str
) -> None:
    code, text = answered(capsys, "topo", "--machine", str(reports / "machines" / name))

    assert exit_codes.INVALID == code
    assert words in text and "nvidia-smi topo -m" in text


def test_a_gpu_without_nvlink_is_the_last_choice(capsys: pytest.CaptureFixture[str], reports: Path) -> None:
    machine = str(reports / "machines" / "b200-gpu0-off-nvlink.txt")
    _, text = answered(capsys, "what-if", "--machine", machine, "--gpus", "4", "--policy", "none")

    assert "GPU-0" not in text and "18 NVLinks" in text


def test_a_pod_that_the_most_likely_random_pick_admits_is_admitted(
    capsys: pytest.CaptureFixture[str], reports: Path, tmp_path: Path
) -> None:
    """The directory of the one pod that is left is made here: the files do not have it, as it is empty."""
    folder = reports / "predictions/by-chance"
    kubelet = shutil.copytree(folder / "root", tmp_path / "root")
    (kubelet / "pods/74521246-e6b4-4687-85e8-f1424e2d530b").mkdir(parents=True)
    where = (
        "--machine",
        str(published(folder.parent / "r36.json", tmp_path)),
        "--kubelet-config",
        str(folder / "config.yaml"),
    )
    pod = ("--kubelet-root", str(kubelet), "--pod-file", str(folder / "pod.json"))
    code, text = answered(capsys, "what-if", *where, *pod)

    assert 0 == code
    assert "picks them at random" in text


def test_sparse_numa_ids_are_refused(capsys: pytest.CaptureFixture[str], reports: Path, tmp_path: Path) -> None:
    folder = reports / "predictions"
    where = (
        "--machine",
        str(published(folder / "sparse-nodes.json", tmp_path)),
        "--kubelet-config",
        str(folder / "sparse-nodes-config.yaml"),
    )
    code, text = answered(capsys, "what-if", *where, *CPUS)

    assert exit_codes.REFUSED == code
    assert "NumaIdsSparse" in text and "panic" in text


def test_state_files_of_reports_are_failures(
    capsys: pytest.CaptureFixture[str], reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOALIGN_MACHINE", "dgx1-volta")  # it has 80 CPUs, and the file 96
    _, text = answered(capsys, "doctor", "--kubelet-dir", str(reports / "state_files/r5/device-plugins"))

    assert "which the machine does not have; a kubelet does not start with it" in text
    assert "kubelet_internal_checkpoint cannot be trusted: it is cut off" in text
