"""
Prepares the host for passing devices to containers, when the configuration or the hardware changes.

With the CDI strategies a container gets only device names, so the specification that defines them must exist. Allocate
fails while it cannot be written. This is also checked every few seconds, to report an error before a pod fails.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import structlog

from topoalign.allocator.containers import cdi, host_files
from topoalign.allocator.containers.hami_core.slot_directories import hami_core_edits
from topoalign.allocator.containers.host_files import dev_root
from topoalign.allocator.containers.mps import mps_edits
from topoalign.allocator.containers.responses import (
    CDI,
    CdiNames,
    DeviceLists,
    EditProvider,
    NicEdits,
    OwnNodes,
    ResponseWriter,
)
from topoalign.allocator.containers.vcuda.unit_directories import vcuda_edits
from topoalign.allocator.ports import AllocatorPort
from topoalign.core.demand.device_lists import has_gpus
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.plugin_config.configuration import Configuration
from topoalign.runtime.clock import until_tick
from topoalign.runtime.tasks import wait_for_first

log = structlog.get_logger()

POLL_SECONDS = 5.0
CDI_DIRECTORY = Path("/var/run/cdi")
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class Containers:
    """Prepares what containers of this node get with their devices, according to the current configuration."""

    def __init__(
        self,
        configuration: Callable[[], Configuration] = Configuration,
        cdi_dir: Path = CDI_DIRECTORY,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
    ) -> None:
        """`cdi_dir` is where the runtime reads CDI specifications; `proc` and `cgroups` are the host's."""
        self._configuration = configuration
        self._proc = proc
        self._cgroups = cgroups
        self._cdi_dir = cdi_dir
        self._specified: tuple[tuple[Configuration, Topology, tuple[int, ...]], frozenset[str]] | None = None
        """The inputs and the classes of the specifications. None: the next call must write or check them."""
        self._minors: Mapping[host_files.Instance, int] | None = None
        """The capability minors of MIG instances: four thousand lines of /proc. None: not read since the last poll."""
        self._reason: str | None = None

    def now(self, topology: Topology, resource: ResourceName) -> ResponseWriter:
        """Returns the writer of an Allocate call. Raises ContainerUnready or StateFault if nothing can be allocated."""
        if not has_gpus(topology, resource):
            return ResponseWriter()
        lists = self._device_lists(topology)
        providers: list[EditProvider] = [lists]
        flags = lists.configuration.flags
        if not CDI.isdisjoint(flags.plugin.device_list_strategy):
            specified = self._specify(lists.configuration, topology, lists.channels)
            found = tuple(kind for kind in cdi.extras(lists.configuration) if kind in specified)
            providers.append(CdiNames(lists, found))
        offers = topology.offers_of.get(resource, ())
        limiters = {offer.limiter for offer in offers}
        if "hami-core" in limiters:
            providers.append(hami_core_edits(flags))
        elif "vcuda" in limiters:
            providers.append(vcuda_edits(flags, self._proc, self._cgroups))
        elif any(offer.sharing == "mps" for offer in offers):
            providers.append(mps_edits(flags.mps_root, topology, resource))
        return ResponseWriter(lists, (*providers, OwnNodes(), NicEdits()))

    async def run(self, allocator: AllocatorPort, clock: Clock) -> None:
        """Polls every `POLL_SECONDS` and when the hardware changes, until cancelled; logs each change of the result once."""
        while True:
            topology = allocator.state.hardware
            reason = self.poll(topology)
            if reason != self._reason:
                self._reason = reason
                if reason is None:
                    log.info("devices can be passed to containers")
                else:
                    log.warning("devices cannot be passed to containers", reason=reason)
            await wait_for_first(
                partial(clock.sleep, until_tick(clock, POLL_SECONDS)), partial(wait_for_hardware, allocator, topology)
            )

    def poll(self, topology: Topology) -> str | None:
        """Prepares everything, including CDI specifications. Returns why containers cannot get GPUs; None: they can."""
        self._specified = self._minors = None
        try:
            for resource in topology.offers_of:
                writer = self.now(topology, resource)
                shared = [
                    base for offer in topology.offers_of[resource] if offer.sharing == "mps" for base in offer.devices
                ]
                writer.check(topology, [shared])  # whether the MPS daemon serves them
        except Unavailable as error:
            return f"{error.finding}; {error.remedy}"
        return None

    def reason(self) -> str | None:
        """Why containers cannot get GPUs, for /readyz; None: they can. This is the result of the last poll."""
        return self._reason

    def _device_lists(self, topology: Topology) -> DeviceLists:
        configuration = self._configuration()
        plugin = configuration.flags.plugin
        by_cdi = not CDI.isdisjoint(plugin.device_list_strategy)
        if self._minors is None and any(gpu.mig for gpu in topology.gpus):
            self._minors = host_files.mig_minors(self._proc)
        reads_dev = plugin.pass_device_specs or by_cdi or configuration.imex.channel_ids
        dev = dev_root(configuration.flags) if reads_dev else DeviceLists().dev
        return DeviceLists(
            configuration=configuration,
            dev=dev,
            shared=host_files.present(dev, host_files.SHARED) if plugin.pass_device_specs else (),
            channels=host_files.channels(dev, configuration.imex),
            minors=self._minors or {},
        )

    def _specify(self, configuration: Configuration, topology: Topology, channels: tuple[int, ...]) -> Collection[str]:
        inputs = configuration, topology, channels
        specified = self._specified
        if specified is None or specified[0] != inputs:
            specifications = cdi.specifications(configuration, topology, channels, self._minors or {})
            if cdi.write_specifications(self._cdi_dir, specifications):
                log.info("CDI specifications written", directory=str(self._cdi_dir), kinds=list(specifications))
            specified = self._specified = inputs, frozenset(specifications)
        return specified[1]


async def wait_for_hardware(allocator: AllocatorPort, topology: Topology) -> None:
    """Waits until the allocator's hardware is no longer `topology`."""
    while allocator.state.hardware is topology:
        await allocator.wait_past(allocator.version)
