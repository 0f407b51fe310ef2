"""Limits of shares against a naive reference, and the file by which they are announced."""

import fcntl
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from serving_support import configured

from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.model import Gpu
from topoalign.mps.daemon_shares import MpsGpu, mps_shares
from topoalign.plugin_config.mps_files import Announcement, Serves, read_served

SERVES = Serves(devices=frozenset({DeviceID("GPU-0")}), replicas=4)


@st.composite
def cards(draw: st.DrawFn) -> list[MpsGpu]:
    return [
        MpsGpu(
            gpu=Gpu(
                id=DeviceID(f"GPU-{index}"),
                index=index,
                name="x",
                memory=draw(st.none() | st.integers(0, 300 << 30)),
                mig=draw(st.sampled_from([None, ()])),
            ),
            capability=(draw(st.integers(6, 9)), draw(st.integers(0, 9))),
        )
        for index in range(draw(st.integers(0, 6)))
    ]


@given(cards(), st.integers(2, 48), st.integers(1, 6))
def test_limits_are_those_of_the_rule_for_each_gpu(found: list[MpsGpu], replicas: int, count: int) -> None:
    """A whole number of MiB and of per cent, rounded down: as many clients as there are replicas never exceed the GPU."""
    resource = f"{{name: gpu, replicas: {replicas}, devices: {count}}}"
    text = f"flags: {{mpsRoot: /mps}}\nsharing: {{mps: {{resources: [{resource}]}}}}"
    share = mps_shares(found, configured(text)).get(GPU)
    fit = [card for card in found[:count] if card.gpu.mig is None]

    if share is None:
        assert [] == fit
        return
    limits = {}
    for card in fit:
        mebibytes = 0
        while (mebibytes + 1) * replicas <= (card.gpu.memory or 0) >> 20:
            mebibytes += 1 + ((card.gpu.memory or 0) >> 20) // replicas // 2 * (mebibytes == 0)
        if card.gpu.memory:
            limits[card.gpu.id] = f"{mebibytes}M"
    assert limits == share.memory_limits
    assert max(p for p in range(101) if p * replicas <= 100) == share.thread_percentage
    assert [card.gpu.id for card in fit] == list(share.devices)
    few = [card.gpu for card in fit if replicas > (48 if card.capability >= (7, 5) else 16)]
    assert few == list(share.with_too_few_clients)


def test_a_file_without_its_writer_says_nothing(tmp_path: Path) -> None:
    """The kernel takes the lock from a writer that is killed: the file stays and is not believed."""
    (tmp_path / GPU).mkdir(parents=True)
    file = tmp_path / GPU / "serves"
    announcement = Announcement(tmp_path, GPU)

    assert read_served(tmp_path, GPU) is None
    announcement.publish(SERVES)
    assert SERVES == read_served(tmp_path, GPU) == read_served(tmp_path, GPU)
    content = file.read_bytes()
    announcement.withdraw()
    assert read_served(tmp_path, GPU) is None and not file.exists()
    file.write_bytes(content)
    assert read_served(tmp_path, GPU) is None


def test_what_is_no_announcement_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / GPU).mkdir(parents=True)
    file = tmp_path / GPU / "serves"
    for content in (b"", b"{", b'{"devices": ["GPU-0"]}', b'{"devices": 7, "replicas": 2}', b"\xff" * 70_000):
        file.write_bytes(content)
        writer = os.open(file, os.O_RDWR)
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert read_served(tmp_path, GPU) is None
        os.close(writer)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert read_served(tmp_path, GPU) is None
    file.unlink()
    os.mkfifo(file)
    assert read_served(tmp_path, GPU) is None
