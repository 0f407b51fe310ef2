"""Checks of the NVLinks of one GPU: numbers that a GPU can have, and a fabric state that is known."""

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.topology.degraded import FABRIC_FINDINGS
from topoalign.core.model.topology.model import Gpu

MOST_NVLINKS = 999


def check_nvlinks(path: str, gpu: Gpu) -> None:
    """Raises InvalidField for a GPU at this path whose NVLinks or fabric state cannot be so."""
    for name, count in (("nvswitch_links", gpu.nvswitch_links), ("nvlinks_down", gpu.nvlinks_down)):
        if not 0 <= count <= MOST_NVLINKS:
            raise InvalidField(f"{path}.{name}", f"{count} is no number of NVLinks", f"give 0 to {MOST_NVLINKS}")
    if gpu.fabric_state and gpu.fabric_state not in FABRIC_FINDINGS:
        finding = f"{quoted([gpu.fabric_state])} is no state"
        remedy = f"give one of {', '.join(FABRIC_FINDINGS)}"
        raise InvalidField(f"{path}.fabric_state", finding, remedy)
