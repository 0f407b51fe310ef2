"""Who uses which GPU, from the driver's library and /proc to the HTTP API of the registry, while things fail."""

from pathlib import Path
from typing import Any

import pytest
from kubelet_support import learn_owners, pod
from node_support import HURRY, NODE, WholeNode, whole_node
from nvml_support import host_tree, script, standing_in
from process_support import CONTAINER_ID, mounts, put_namespace, put_process

from topoalign.core.model.decisions import Admission
from topoalign.discovery.use_meter import FRESH_SECONDS

pytestmark = pytest.mark.anyio

SHARED = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 5}]}}
"""
SHARERS = 5
GIB = 1 << 30


async def shares(node: WholeNode) -> dict[str, Any]:
    """By GPU, measured anew."""
    await node.clock.advance(FRESH_SECONDS)
    return {row["device"]: row for row in (await node.get(f"/v1/shares?node={NODE}"))["items"]}


async def test_c18_a_card_is_lost_with_five_sharers(nvml_library: Path, tmp_path: Path) -> None:
    """
    Each sharer is shown with its own memory, and whoever came uninvited beside them. When the card is lost, its holders stay
    listed and what they use is not known; the other card is told as before. A process that ends is no error.
    """
    host, config = host_tree(tmp_path / "host", gpus=2), tmp_path / "config.yaml"
    config.write_text(SHARED)
    put_namespace(host / "proc")
    (tmp_path / "nvml").mkdir()
    with standing_in(nvml_library, tmp_path / "nvml", script(gpus=range(2), more=[HURRY])) as standin:
        async with whole_node(host, standin, tmp_path / "state", config=str(config), offered=2 * SHARERS) as node:
            by_gpu: dict[str, list[str]] = {}
            running = []
            for number in range(SHARERS * 2):
                assert isinstance(await node.kubelet.admit(pod(f"pod-{number}", gpus=1)), Admission)
                await learn_owners(node.kubelet)
                (held,) = (await node.explain(f"default/pod-{number}")).allocations
                (device,) = held.device_ids
                gpu = device.partition("::")[0]
                by_gpu.setdefault(gpu, []).append(f"pod-{number}")
                put_process(
                    host / "proc",
                    100 + number,
                    cgroup=f"0::/kubepods/pod{held.pod_uid}/{CONTAINER_ID}\n",
                    mountinfo=mounts(held.pod_uid),
                )
                running.append(f"process {gpu[-1]} pid={100 + number} memory={(number + 1) * GIB} sm=1")
            put_process(host / "proc", 7, cgroup="0::/user.slice\n")
            running.append(f"process 0 pid=7 memory={GIB}")
            await node.play(*running, gpus=range(2))

            found = await shares(node)
            assert {"GPU-0": SHARERS, "GPU-1": SHARERS} == {gpu: len(pods) for gpu, pods in by_gpu.items()}
            for gpu, pods in by_gpu.items():
                assert {name: (int(name[4:]) + 1) * GIB for name in pods} == {
                    holder["owner"]["pod"]: holder["use"]["memory"] for holder in found[gpu]["holders"]
                }
            assert [["host"], []] == [[other["where"] for other in found[gpu]["others"]] for gpu in ("GPU-0", "GPU-1")]

            for file in (host / "proc/100").iterdir():
                file.unlink()
            await node.play(*running, "fail nvmlDeviceGetComputeRunningProcesses_v3 1 15", gpus=range(2))
            lost = await shares(node)

            assert ("GPU is lost", SHARERS) == (lost["GPU-1"]["failure"][-11:], len(lost["GPU-1"]["holders"]))
            assert {None} == {holder["use"]["memory"] for holder in lost["GPU-1"]["holders"]}
            assert "" == lost["GPU-0"]["failure"]
            assert SHARERS == len(lost["GPU-0"]["holders"])
