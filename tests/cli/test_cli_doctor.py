"""`doctor` finds what people get stuck on and says what to do; only a gate flag makes it fail."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from topoalign.cli import link, root
from topoalign.kubelet.files import device_checkpoint


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No `up` of the user who runs the tests, no settings of theirs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE", "TOPOALIGN_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="ta") as folder:
        yield Path(folder)


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and each finding by the name of its check."""
    status = root.run_command_line(["doctor", "--json", *arguments])
    return status, {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_every_finding_that_is_not_ok_has_a_remedy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    _, findings = examined(capsys, "--kubelet-dir", str(tmp_path), "--state-dir", str(file / "state"), "--node", "")

    machine = {"Python", "node name", "NUMA nodes", "NVML", "hardware", "state directory"}
    assert machine | {"nats-server", "NATS", "kubelet", "kubelet config", "allocator"} == set(findings)
    assert [] == [name for name, found in findings.items() if found["verdict"] != "ok" and not found["remedy"]]
    assert ["failure"] * 3 == [findings[name]["verdict"] for name in ("kubelet", "state directory", "node name")]


def test_an_unreadable_directory_fails_its_check_and_no_other(
    capsys: pytest.CaptureFixture[str], short_dir: Path
) -> None:
    """On a node /var/lib/kubelet is root's alone, and who is called at night may not be root."""
    closed = short_dir / "closed"
    closed.mkdir(mode=0)
    where = ["--kubelet-dir", str(closed / "plugins"), "--state-dir", str(closed / "state")]
    _, open_to_root = examined(capsys, *where)
    with unprivileged():
        _, findings = examined(capsys, *where)

    assert list(open_to_root) == list(findings)
    assert ["failure"] * 2 == [findings[name]["verdict"] for name in ("kubelet", "state directory")]
    assert "as root" in findings["kubelet"]["remedy"]
    assert "run as" in findings["state directory"]["remedy"]


@contextmanager
def unprivileged() -> Iterator[None]:
    """Not as root, who may look everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_failures_change_the_exit_code_only_under_the_gate_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--kubelet-dir", str(tmp_path), "--state-dir", str(tmp_path)]

    assert 0 == examined(capsys, *arguments)[0]
    assert 6 == examined(capsys, *arguments, "--fail-on-findings")[0]
    assert 0 == examined(capsys, "--state-dir", str(tmp_path), "--fail-on-findings")[0]


def test_more_numa_nodes_than_the_kubelet_accepts_are_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The warning names the option of the kubelet that has to be set."""
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-33\n")

    _, findings = examined(capsys, "--sysfs-root", str(tmp_path))

    assert "warning" == findings["NUMA nodes"]["verdict"]
    assert "max-allowable-numa-nodes to 34" in findings["NUMA nodes"]["remedy"]


def test_a_kubelet_is_ok_only_if_its_socket_answers(capsys: pytest.CaptureFixture[str], short_dir: Path) -> None:
    path = short_dir / "kubelet.sock"
    path.touch()
    _, plain_file = examined(capsys, "--kubelet-dir", str(short_dir))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        _, not_listening = examined(capsys, "--kubelet-dir", str(short_dir))
        listening.listen()
        _, answering = examined(capsys, "--kubelet-dir", str(short_dir))

    assert "is not a socket" in plain_file["kubelet"]["detail"]
    assert "Connection refused" in not_listening["kubelet"]["detail"]
    assert "ok" == answering["kubelet"]["verdict"]


def test_a_missing_nats_is_a_failure_with_its_address_without_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NATS that does not answer is a failure that names the address, without the password in it."""
    monkeypatch.setattr(link, "CONNECT_SECONDS", 0.2)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        _, findings = examined(capsys, "--nats", f"nats://user:canary@{address}")

    assert "failure" == findings["NATS"]["verdict"]
    assert address in findings["NATS"]["detail"]
    assert "canary" not in json.dumps(findings)


def test_people_get_a_line_per_finding_and_the_remedy_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["doctor", "--node", "Upper"])

    out = capsys.readouterr().out
    assert 0 == status
    assert "warning  node name            Upper has upper-case letters" in out
    assert "do: Kubernetes node names are lower case" in out
    assert "\x1b" not in out


CONFIG = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n"
STATIC = 'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\n'


@pytest.mark.parametrize(
    ("more", "nodes", "verdict", "detail"),
    [
        ("", "0-7", "ok", "policy restricted, scope container, CPU manager none, memory manager None"),
        (STATIC + 'cpuManagerPolicyOptions: {full-pcpus-only: "1"}', "0", "ok", "CPU manager static full-pcpus-only,"),
        ("", "0-33", "failure", "34 NUMA nodes, and policy restricted does not start on more than 8"),
        ('topologyManagerPolicyOptions: {max-allowable-numa-nodes: "34"}', "0-33", "ok", "policy restricted"),
        (
            STATIC + "featureGates: {AllAlpha: true}\n"
            "cpuManagerPolicyOptions: {full-pcpus-only: t, distribute-cpus-across-cores: t}",
            "0",
            "failure",
            "does not start with both full-pcpus-only and distribute-cpus-across-cores",
        ),
        (
            'topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true"}',
            "0,2",
            "failure",
            "panics with prefer-closest-numa-nodes on NUMA nodes 0,2, whose ids have gaps",
        ),
        ('topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true"}', "0-1", "ok", "policy restricted"),
        ("topologyManagerScope: [", "0", "failure", "line 5, column 1"),
    ],
)
def test_the_kubelets_configuration_is_judged_for_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: str, nodes: str, verdict: str, detail: str
) -> None:
    online = tmp_path / "devices/system/node/online"
    online.parent.mkdir(parents=True)
    online.write_text(nodes)
    (tmp_path / "config.yaml").write_text(CONFIG + more)
    where = ["--sysfs-root", str(tmp_path), "--state-dir", str(tmp_path)]

    by_directory = examined(capsys, *where, "--kubelet-dir", str(tmp_path / "device-plugins"))[1]
    by_file = examined(capsys, *where, "--kubelet-config", str(tmp_path / "config.yaml"))[1]

    assert by_directory["kubelet config"] == by_file["kubelet config"]
    assert verdict == by_file["kubelet config"]["verdict"]
    assert detail in by_file["kubelet config"]["detail"]


def test_many_numa_nodes_that_the_configuration_allows_are_no_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    online = tmp_path / "devices/system/node/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-33")
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG + 'topologyManagerPolicyOptions: {max-allowable-numa-nodes: "64"}')
    _, findings = examined(capsys, "--sysfs-root", str(tmp_path), "--kubelet-config", str(file))

    assert ("ok", "ok") == (findings["NUMA nodes"]["verdict"], findings["kubelet config"]["verdict"])


MEMORY = "memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]\n"


@pytest.mark.parametrize(
    ("nodes", "policy", "verdict", "detail"),
    [
        (
            "0-7",
            "restricted",
            "warning",
            "about 1.1e+12 combinations of hints (255 of nvidia.com/gpu x 255 of topoalign.io",
        ),
        ("0-7", "best-effort", "warning", "about 3 days; it admits no other pod meanwhile"),
        ("0-7", "single-numa-node", "ok", "5 resources on 8 NUMA nodes are merged without delay"),
        ("0-1", "restricted", "ok", "5 resources on 2 NUMA nodes"),
        ("0-7", "none", "", ""),
        ("0-33", "restricted", "", ""),
    ],
)
def test_doctor_warns_if_the_kubelets_merge_may_take_minutes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nodes: str, policy: str, verdict: str, detail: str
) -> None:
    """The worst that a pod can ask for: GPUs, NICs, CPUs, memory and one size of hugepages. 1 GiB pages there are none."""
    for kib, count in ((2048, 512), (1048576, 0)):
        pages = tmp_path / f"devices/system/node/node0/hugepages/hugepages-{kib}kB/nr_hugepages"
        pages.parent.mkdir(parents=True)
        pages.write_text(f"{count}\n")
    (tmp_path / "devices/system/node/online").write_text(nodes)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("restricted", policy) + STATIC + MEMORY)
    plugins = tmp_path / "device-plugins"
    plugins.mkdir()
    eight = [f"d{i}" for i in range(8)]
    registered = {"nvidia.com/gpu": eight, "topoalign.io/nic": eight, "example.com/gone": []}
    device_checkpoint.store(plugins, device_checkpoint.CheckpointData(None, registered))

    found = examined(capsys, "--sysfs-root", str(tmp_path), "--kubelet-dir", str(plugins))[1].get("kubelet merge")

    assert bool(verdict) == (found is not None)
    if found is not None:
        assert (verdict, verdict == "warning") == (found["verdict"], bool(found["remedy"]))
        assert detail in found["detail"]


def eight_nodes(root: Path) -> Path:
    """The device plugin directory of a kubelet with static managers, on a machine with eight NUMA nodes."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text("0-7")
    (root / "config.yaml").write_text(CONFIG + STATIC + MEMORY)
    (root / "device-plugins").mkdir()
    return root / "device-plugins"


def test_a_resource_counts_on_no_more_numa_nodes_than_it_has_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugins = eight_nodes(tmp_path)
    verdicts = []
    for devices in (1, 2):  # 255 x 255 x 1, and 255 x 255 x 3^10, which is 3.8e9
        registered = {f"example.com/r{i}": ["a", "b"][:devices] for i in range(10)}
        device_checkpoint.store(plugins, device_checkpoint.CheckpointData(None, registered))
        found = examined(capsys, "--sysfs-root", str(tmp_path), "--kubelet-dir", str(plugins))[1]
        verdicts.append(found["kubelet merge"]["verdict"])

    assert ["ok", "warning"] == verdicts


@pytest.mark.parametrize("content", ["{", ""])
def test_without_a_readable_checkpoint_cpus_and_memory_still_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    """If the checkpoint cannot be read, the estimate still counts CPUs and memory."""
    plugins = eight_nodes(tmp_path)
    (plugins / device_checkpoint.NAME).write_text(content)

    found = examined(capsys, "--sysfs-root", str(tmp_path), "--kubelet-dir", str(plugins))[1]

    assert "2 resources on 8 NUMA nodes are merged without delay" == found["kubelet merge"]["detail"]


def test_a_kubelet_without_a_configuration_file_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finding = examined(capsys, "--kubelet-dir", str(tmp_path / "device-plugins"))[1]["kubelet config"]

    assert "warning" == finding["verdict"] and "--kubelet-config" in finding["remedy"]


def test_the_lock_holder_and_the_socket_server_are_one_process(
    capsys: pytest.CaptureFixture[str], short_dir: Path
) -> None:
    """One allocator is well, one that serves nothing is a warning, and two are a failure."""
    state = short_dir / "state"
    where = ["--state-dir", str(state), "--kubelet-dir", str(short_dir)]
    _, nobody = examined(capsys, *where)
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(short_dir / "topoalign-nvidia.com_gpu.sock"))
        served.listen()
        _, elsewhere = examined(capsys, *where)
        state.mkdir(mode=0o700)
        with (state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _, one = examined(capsys, *where)
            fcntl.flock(lock, fcntl.LOCK_UN)
            with locked_elsewhere(state / "lock"):
                _, two = examined(capsys, *where)
    with locked_elsewhere(state / "lock"):
        _, silent = examined(capsys, *where)

    assert ("ok", "no allocator runs") == (nobody["allocator"]["verdict"], nobody["allocator"]["detail"][:17])
    assert "no process has the lock" in elsewhere["allocator"]["detail"]
    assert ("ok", True) == (one["allocator"]["verdict"], f"process {os.getpid()} runs" in one["allocator"]["detail"])
    assert ("failure", True) == (two["allocator"]["verdict"], "two allocators" in two["allocator"]["detail"])
    assert ("warning", True) == (silent["allocator"]["verdict"], "serves no resource" in silent["allocator"]["detail"])


def test_a_socket_that_is_too_busy_to_tell_is_no_second_allocator(
    capsys: pytest.CaptureFixture[str], short_dir: Path
) -> None:
    """Its queue of connections is full, so nobody can say which process listens there."""
    with socket.socket(socket.AF_UNIX) as served, ExitStack() as waiting:
        served.bind(str(short_dir / "topoalign-nvidia.com_gpu.sock"))
        served.listen(0)
        for _ in range(2):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(served.getsockname())
        _, found = examined(capsys, "--state-dir", str(short_dir / "state"), "--kubelet-dir", str(short_dir))

    assert ("ok", "no allocator runs") == (found["allocator"]["verdict"], found["allocator"]["detail"][:17])


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    """Another process holds this lock."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(b"\n")


def test_a_kubelet_directory_that_every_user_may_write_is_a_warning(
    capsys: pytest.CaptureFixture[str], short_dir: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(short_dir / "kubelet.sock"))
        kubelet.listen()
        short_dir.chmod(0o777)
        _, open_to_all = examined(capsys, "--kubelet-dir", str(short_dir))

    assert ("warning", "chmod o-w: only root needs to write there") == (
        open_to_all["kubelet"]["verdict"],
        open_to_all["kubelet"]["remedy"],
    )


def test_the_scheduler_is_recommended_for_gpus_in_units(capsys: pytest.CaptureFixture[str], short_dir: Path) -> None:
    """By the ids of the devices that the kubelet has registered: it is a recommendation, not a problem."""
    plugins = short_dir / "device-plugins"
    plugins.mkdir()
    units = {"example.com/time": ["GPU-0::c0", "GPU-0::c1"], "example.com/bytes": ["GPU-0::m0"]}
    found = []
    for registered in (units, {"nvidia.com/gpu": ["GPU-0", "GPU-1::0"]}):
        device_checkpoint.store(plugins, device_checkpoint.CheckpointData(None, registered))
        found.append(examined(capsys, "--kubelet-dir", str(plugins))[1])
    in_units, whole = found

    assert "units" not in whole
    assert "ok" == in_units["units"]["verdict"]
    assert "'example.com/bytes', 'example.com/time'" in in_units["units"]["detail"]
    assert "topoalign's scheduler" in in_units["units"]["remedy"]
