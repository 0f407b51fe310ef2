"""
Tells discovery of GPUs whose driver makes no MIG instances, so that their health says it: what the registry sends pods by,
and what people look at, is the health that discovery publishes.
"""

from contextlib import suppress

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.maintenance import DevicesRequest
from topoalign.core.ports import Bus

ASK_SECONDS = 5.0


async def report_fault(bus: Bus, node: NodeName, gpu: DeviceID, why: str) -> None:
    """Reports that MIG instances of a GPU cannot be changed. Where discovery does not answer, the kubelet alone knows it."""
    request = DevicesRequest(node=node, devices=(gpu,), reason=f"its MIG instances cannot be changed: {why}")
    with suppress(TopoalignError):  # a discovery of an earlier version does not know the word
        answer = await bus.ask(wire.devices_subject(node, "report"), msgspec.json.encode(request), ASK_SECONDS)
        wire.answered(answer, dict[DeviceID, DeviceHealth])
