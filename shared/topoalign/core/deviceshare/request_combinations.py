"""
Checks the combination of resources that a pod requests of a device type, and computes the number of devices.

Rules of koordinator a7a1b76b (deviceshare, request validation and conversion): the resources of a type must form a
valid combination. Whole GPUs are converted to hundredths of compute and memory. The sum over GPUs is divided evenly.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.deviceshare.joint_refusals import InvalidShareRequest
from topoalign.core.deviceshare.koordinator_names import (
    CORE,
    GPU_BYTES,
    HUNDREDTHS,
    NPU_CORE,
    NPU_CPU,
    NPU_DVPP,
    RATIO,
    RESOURCES,
    SHARED,
    WHOLE,
    WHOLE_GPUS,
    DeviceType,
)

Quantities = Mapping[str, int]

FIELD = "pod.requests"
"""The requests of the whole pod, because Koordinator sums up its containers. Callers can name one container instead."""
COUNTED = (HUNDREDTHS, *RESOURCES[DeviceType.RDMA], *RESOURCES[DeviceType.FPGA])
"""Resources in hundredths of a device. Amounts above one device must be whole devices."""

_SHARES = [{GPU_BYTES}, {RATIO}, {CORE, GPU_BYTES}, {CORE, RATIO}]
COMBINATIONS = [
    *({name} for name in (*WHOLE_GPUS, HUNDREDTHS)),
    *_SHARES,
    *({SHARED, *share} for share in _SHARES),
    {NPU_CORE, RATIO},
    {SHARED, NPU_CORE, NPU_CPU, GPU_BYTES},
    {SHARED, NPU_CORE, NPU_CPU, NPU_DVPP, GPU_BYTES},
]
"""The valid sets of GPU resources."""


class Wanted(msgspec.Struct, frozen=True):
    """How many devices of one type are requested, and how much of each."""

    count: int
    each: Quantities


class GpuDemand(Wanted, frozen=True):
    """The GPU request of a pod."""

    shared: bool
    """Other pods can get the rest of the GPU. A request in bytes is always shared, even for a whole GPU's memory."""


def by_type(requests: Quantities) -> dict[DeviceType, dict[str, int]]:
    """Type -> normalized quantities, without zeros, for the requested types. Raises InvalidShareRequest."""
    asked = {kind: {name: requests[name] for name in names if requests.get(name)} for kind, names in RESOURCES.items()}
    for quantities in filter(None, asked.values()):
        check_combination(quantities)
    return {kind: normalise_quantities(quantities) for kind, quantities in asked.items() if quantities}


def check_combination(quantities: Quantities) -> None:
    """Raises InvalidShareRequest unless these quantities of one device type are a valid combination."""
    if not quantities:
        raise InvalidShareRequest(FIELD, "pod request should not be empty", "ask for at least one device")
    for name in COUNTED:
        amount = quantities.get(name, 0)
        if amount < 0 or not _whole_above_one(amount):
            raise InvalidShareRequest(
                f"{FIELD}[{name}]",
                f"invalid resource unit {name}: {amount}",
                "ask for up to 100 units of one device, or for whole devices in multiples of 100",
            )
    names = {*quantities}
    if (names & {*RESOURCES[DeviceType.GPU]} and names not in COMBINATIONS) or not _shares_sound(quantities):
        raise InvalidShareRequest(
            FIELD,
            f"invalid resource device requests: [{' '.join(sorted(names))}]",
            "ask for whole GPUs, or for gpu-core with either gpu-memory or gpu-memory-ratio, evenly over gpu.shared",
        )


def _whole_above_one(amount: int) -> bool:
    return amount <= WHOLE or amount % WHOLE == 0


def _shares_sound(quantities: Quantities) -> bool:
    if any(amount < 0 for amount in quantities.values()) or quantities.get(NPU_DVPP, 0) > WHOLE:
        return False
    hundredths = [quantities.get(CORE, 0), quantities.get(RATIO, 0)]
    over = quantities.get(SHARED)
    if over is None:
        return all(map(_whole_above_one, hundredths))
    if NPU_CORE in quantities and over != 1:
        return False
    return all(amount % over == 0 and amount <= WHOLE * over for amount in hundredths)


def normalise_quantities(quantities: Quantities) -> dict[str, int]:
    """Converts whole GPUs to hundredths of compute and memory. Other quantities stay unchanged."""
    for name in (*WHOLE_GPUS, HUNDREDTHS):
        if name in quantities:
            amount = quantities[name] * (1 if name == HUNDREDTHS else WHOLE)
            return {CORE: amount, RATIO: amount}
    return dict(quantities)


def gpu_demand(quantities: Quantities) -> GpuDemand:
    """Divides normalized quantities evenly over GPUs, rounded down."""
    ratio = quantities.get(RATIO, 0)
    count = quantities.get(SHARED, 0) or (ratio // WHOLE if ratio > WHOLE and ratio % WHOLE == 0 else 1)
    each = {name: amount // count for name, amount in quantities.items() if name != SHARED}
    return GpuDemand(count, each, shared=GPU_BYTES in each or each.get(RATIO, WHOLE) < WHOLE)
