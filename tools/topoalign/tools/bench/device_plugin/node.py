"""An agent and its kubelet, in a folder of their own, for as long as a case takes."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.kubelet import Came, Kubelet

MACHINE = "dgx-a100"
GPUS = tuple(DeviceID(f"GPU-{index}") for index in range(8))
WARM = 20
"""Calls that do not count."""

Row = dict[str, object]
Settings = dict[str, str]


def told(healthy: int) -> Callable[[Came], bool]:
    """A test for a list with this number of healthy devices."""
    return lambda came: came.healthy == healthy


@contextmanager
def node(
    name: str,
    settings: Settings,
    command: str = "node",
    *,
    healthy: int | None = len(GPUS),
    environment: Settings | None = None,
    resources: Sequence[ResourceName] = (GPU,),
) -> Iterator[tuple[Kubelet, Agent]]:
    """An agent and its kubelet. `healthy`: waits until so many devices of the `resources` are listed; None: not at all."""
    with scratch() as folder:
        kubelet = Kubelet(folder, resources)
        own = {"NODE": name, "STATE_DIR": str(folder / "state"), "KUBELET_DIR": str(kubelet.plugins_dir)}
        kubelet.start()
        try:
            with running(command, {**settings, **own}, environment, observed=command == "allocator") as agent:
                if healthy is not None:
                    kubelet.until(told(healthy), "the GPUs were not listed")
                yield kubelet, agent
        finally:
            kubelet.stop()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on a disk: what is in /var/tmp outlives a reboot, so it is never kept in memory alone."""
    with tempfile.TemporaryDirectory(prefix="topoalign-", dir="/var/tmp") as folder:
        yield Path(folder)
