"""simple: the GPUs that must be in the set, then the lowest indexes. Knows nothing of links."""

from topoalign.core.placement.gpus.device_policy import DevicePolicy, GpuChoice
from topoalign.core.placement.gpus.scores import Members


class Simple(DevicePolicy):
    """The device policy simple of go-gpuallocator: takes the GPUs with the lowest indexes."""

    def choose(self, asked: GpuChoice) -> Members:
        """Chooses the required GPUs, and the lowest indexes of the others."""
        others = sorted({*asked.available}.difference(asked.required))
        return tuple(sorted([*asked.required, *others[: asked.size - len(asked.required)]]))
